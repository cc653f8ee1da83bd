"""A part of a larger torch model by its name: "encoder.layer.0.attention", "layers[0].mlp"."""

import re
from typing import Any

from keyhole.errors import InvalidArgument
from keyhole.targets import suggest


def submodule(model: Any, path: str) -> Any:
    """One part of a larger model, by its dotted name.

    Args:
        model: A torch module.
        path: The name, as in "encoder.layer.0.attention.self"; `layers[0]` is `layers.0`.

    Returns:
        The part.

    Raises:
        InvalidArgument: No such part; the message names the nearest ones.

    Example:
        >>> import torch
        >>> submodule(torch.nn.TransformerEncoderLayer(8, 2, 16), "self_attn.out_proj").in_features
        8
    """
    try:
        return model.get_submodule(re.sub(r"\[(\d+)\]", r".\1", path))
    except AttributeError as error:
        names = [name for name, _ in model.named_modules() if name]
        raise InvalidArgument(
            f"{type(model).__name__} has no part {path!r}; {suggest(path, names)}"
        ) from error
