"""A Hugging Face causal LM as a callable on token numbers: whatever has `config.vocab_size` and
returns `.logits`; and as a box of vectors, where it takes `inputs_embeds`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import InvalidArgument
from keyhole.oracles.base import Oracle
from keyhole.oracles.open import open_oracle


def is_causal_model(target: Any) -> bool:
    """Known by what it has: transformers itself is not imported."""
    return hasattr(getattr(target, "config", None), "vocab_size") and callable(target)


def adapt_causal_model(
    model: Any, vocabulary: int | None, max_length: int | None
) -> tuple[Callable[[Array], Array], int, int | None]:
    """The model as a function that answers for the last position, its vocabulary, its length. An
    output layer padded beyond `config.vocab_size` is cut to it."""
    tokens = int(vocabulary or model.config.vocab_size)
    longest = max_length or getattr(model.config, "max_position_embeddings", None)

    def answer(prompts: Int[Array, "n length"]) -> Array:
        import torch

        with torch.inference_mode():
            device = getattr(model, "device", "cpu")
            found = model(torch.as_tensor(prompts, device=device)).logits[:, -1, :tokens]
            kind = torch.float64 if found.dtype == torch.float64 else torch.float32
            return np.asarray(found.to(kind).cpu())

    answer.__qualname__ = type(model).__qualname__
    answer.__module__ = type(model).__module__
    if hasattr(model, "eval"):
        model.eval()
    return answer, tokens, longest


def open_embeddings(model: Any, *, max_length: int | None = None) -> Oracle:
    """Opens a causal LM as a box that takes vectors in the place of tokens (`inputs_embeds`).

    It answers with the logits of the last position: the bridge to the learners of vectors, and to
    `recover_dictionary`. The vectors of its own dictionary are not read.

    Args:
        model: A Hugging Face causal LM.
        max_length: Vectors in a sequence, at most.

    Returns:
        The oracle.

    Raises:
        InvalidArgument: Something else than a causal LM.

    Example:
        >>> open_embeddings("gpt2")
        Traceback (most recent call last):
        ...
        keyhole.errors.InvalidArgument: open_embeddings takes a Hugging Face causal LM, got 'gpt2'
    """
    if not is_causal_model(model):
        raise InvalidArgument(f"open_embeddings takes a Hugging Face causal LM, got {model!r}")

    def answer(vectors: Float[Array, "n length h"]) -> Array:
        import torch

        with torch.inference_mode():
            kind = next(model.parameters()).dtype
            given = torch.as_tensor(vectors, device=getattr(model, "device", "cpu")).to(kind)
            found = model(inputs_embeds=given).logits[:, -1]
            kept = torch.float64 if found.dtype == torch.float64 else torch.float32
            return np.asarray(found.to(kept).cpu())

    answer.__qualname__, answer.__module__ = type(model).__qualname__, type(model).__module__
    if hasattr(model, "eval"):
        model.eval()
    longest = max_length or getattr(model.config, "max_position_embeddings", None)
    return open_oracle(answer, width=int(model.config.hidden_size), max_length=longest)
