"""The reference of a diagnosis: a model with known weights, and what a query to it may be.

`hf:FOLDER` is a folder of `transformers`; where it is one of sentence-transformers, modules.json
states pooling and normalisation and sentence_bert_config.json where rows are cut. A module of
transformers is a token model as well. Any other torch module takes vectors.
"""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyhole.diagnosis.anatomy import Anatomy, describe
from keyhole.diagnosis.attention import register
from keyhole.diagnosis.readout import Readout
from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.oracles.token_models import TokenModel, open_token_model
from keyhole.oracles.torch import guessed_width, is_module
from keyhole.targets import FOLDER, check_target


@dataclass(frozen=True, eq=False)
class Reference:
    """A model with known weights."""

    model: Any  # float32, evaluation mode, the doctor's own copy
    anatomy: Anatomy
    readout: Readout
    stated: bool  # whether pooling and normalisation were stated by anyone
    tokens: bool  # whether rows are token numbers; otherwise vectors
    width: int  # of a token's vector
    vocabulary: int
    forbidden: frozenset[int]  # token numbers that mean something of their own
    start: tuple[int, ...]  # tokens in front of every row
    end: tuple[int, ...]  # tokens behind it
    pad: int
    max_length: int | None
    tokenizer: Any
    name: str

    @property
    def layers(self) -> int:
        """How many layers it has."""
        return len(self.anatomy.layers)


def open_reference(
    target: Any, pooling: str | None = None, normalize: bool | None = None
) -> Reference:
    """The reference behind `hf:FOLDER`, a folder or a torch module.

    Args:
        target: where the reference is.
        pooling: how hidden states become one answer, where the folder does not state it.
        normalize: whether answers have length one, where the folder does not state it.

    Raises:
        InvalidArgument: what was given is no such thing.
    """
    torch = need("torch", "torch", "a reference of the doctor")
    if isinstance(target, (str, Path)):
        text = str(target)
        if not text.startswith(FOLDER) and (Path(text) / "config.json").is_file():
            text = f"{FOLDER}{text}"
        if text.startswith(FOLDER):
            if "#" in text:
                raise InvalidArgument(
                    "the doctor compares whole models: leave out what follows the #"
                )
            found = open_token_model(text, pooling=pooling, normalize=normalize)
            return _token_model(found, text.removeprefix(FOLDER))
        from keyhole.oracles.open import load_named

        check_target(text)
        target = load_named(text)
    if not is_module(target):
        raise InvalidArgument(
            f"the reference must be hf:FOLDER or a torch module, whose weights can be changed to "
            f"simulate a fault; got a {type(target).__name__}"
        )
    model = copy.deepcopy(target)  # the caller's module stays as it is
    if hasattr(model, "config") and hasattr(model, "get_input_embeddings"):
        found = open_token_model(model, pooling=pooling, normalize=normalize)
        return _token_model(found, type(model).__name__)
    model = model.eval().to(device="cpu", dtype=torch.float32)
    return _vector_module(model, pooling, normalize)


def _token_model(found: TokenModel, name: str) -> Reference:
    import torch

    model = found.module.eval().to(device="cpu", dtype=torch.float32)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    anatomy = describe(model)
    reading = found.reading
    pooling = "last" if not reading.stated and anatomy.causal else reading.pooling
    readout = Readout(pooling, reading.normalize, reading.dense)
    config = model.config
    start, end = _frame(found.tokenizer)
    pad = getattr(config, "pad_token_id", None)
    pad = 0 if pad is None or pad < 0 else int(pad)
    if anatomy.uses_interface:
        model.set_attn_implementation(register())
    table = model.get_input_embeddings().weight
    offset = pad + 1 if counts_from_padding(config) else 0
    longest = found.spec.max_length
    positions = getattr(config, "max_position_embeddings", None)
    if longest is not None and longest == positions:
        longest -= offset
    return Reference(
        model,
        anatomy,
        readout,
        reading.stated,
        tokens=True,
        width=int(getattr(config, "hidden_size", table.shape[1])),
        vocabulary=int(table.shape[0]),
        forbidden=found.reserved | {pad},
        start=start,
        end=end,
        pad=pad,
        max_length=longest,
        tokenizer=found.tokenizer,
        name=name,
    )


def _vector_module(model: Any, pooling: str | None, normalize: bool | None) -> Reference:
    if pooling is not None:
        raise InvalidArgument(
            "pooling= belongs to models on token numbers; a module on vectors answers as it does"
        )
    width = guessed_width(model)
    if width is None:
        raise InvalidArgument(
            f"{type(model).__name__} does not state how wide its vectors are: give it an attribute "
            "width"
        )
    readout = Readout(None, bool(normalize))
    return Reference(
        model,
        describe(model),
        readout,
        True,
        tokens=False,
        width=width,
        vocabulary=0,
        forbidden=frozenset(),
        start=(),
        end=(),
        pad=0,
        max_length=None,
        tokenizer=None,
        name=type(model).__name__,
    )


def _frame(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that a tokenizer puts in front of and behind a text."""
    if tokenizer is None:
        return (), ()
    word = tokenizer("a", add_special_tokens=False)["input_ids"]
    framed = tokenizer("a")["input_ids"]
    places = [k for k in range(len(framed)) if framed[k : k + len(word)] == word]
    if not word or not places:
        return (), ()
    return tuple(framed[: places[0]]), tuple(framed[places[0] + len(word) :])


def counts_from_padding(config: Any) -> bool:
    """Whether positions begin behind the padding token's number, as in RoBERTa and MPNet."""
    return getattr(config, "model_type", "") in ("roberta", "xlm-roberta", "camembert", "mpnet")
