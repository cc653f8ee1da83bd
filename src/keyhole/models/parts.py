"""A part of a larger torch model by its name: "encoder.layer.0.attention", "layers[0].mlp"."""

import re
from typing import Any

from keyhole.errors import InvalidArgument
from keyhole.targets import suggest


def submodule(model: Any, path: str) -> Any:
    """One part of a larger model, by its dotted name (`layers[0]` is `layers.0`); the message
    names the nearest parts if it is not there."""
    try:
        return model.get_submodule(re.sub(r"\[(\d+)\]", r".\1", path))
    except AttributeError as error:
        names = [name for name, _ in model.named_modules() if name]
        raise InvalidArgument(
            f"{type(model).__name__} has no part {path!r}; {suggest(path, names)}"
        ) from error
