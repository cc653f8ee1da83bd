"""open_oracle: whatever the user has becomes an oracle."""

from importlib import import_module
from pathlib import Path
from typing import Any

from keyhole.arrays import digest
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention
from keyhole.models.files import load_model
from keyhole.oracles.base import Domain, Oracle, Precision, Spec
from keyhole.oracles.function import FunctionOracle


def open_oracle(
    target: Any,
    width: int | None = None,
    max_length: int | None = None,
    max_norm: float | None = None,
    vocabulary: Any = None,
    *,
    low: float | None = None,
    high: float | None = None,
    precision: Precision | None = None,
) -> Oracle:
    """The box behind `target`: a callable (batch, length, width) -> (batch,) or (batch, outputs),
    a keyhole model, an Oracle, the path of a saved model, or `package.module:attribute`.

    The domain (`max_length`, `max_norm`, `low`/`high` per entry, `vocabulary` of allowed tokens)
    is what the box accepts: no question will leave it. `precision` states how exact the answers
    are where that is known; otherwise it is measured.
    """
    domain = Domain(max_length, max_norm, low, high, vocabulary)
    if isinstance(target, Oracle):
        return target
    if isinstance(target, (str, Path)):
        target = _named(str(target))
    if width is None:
        width = getattr(target, "width", None)
        if width is None and domain.vocabulary is not None:
            width = int(domain.vocabulary.shape[1])
    if not callable(target):
        raise InvalidArgument(
            f"cannot open a {type(target).__name__} as a box; expected a callable on arrays of "
            "shape (batch, length, width), a keyhole model or an Oracle"
        )
    if not isinstance(width, int):
        raise InvalidArgument("this box does not tell its width: pass width= (--width)")
    outputs = target.outputs if isinstance(target, Attention) else None
    return FunctionOracle(target, Spec(width, outputs, domain, precision, _identity(target)))


def _named(target: str) -> Any:
    """`package.module:attribute` (imports the user's own code), or the path of a saved model."""
    module, colon, attribute = target.partition(":")
    if colon and not Path(target).exists():
        try:
            value: Any = import_module(module)
            for name in attribute.split("."):
                value = getattr(value, name)
            return value
        except (ImportError, AttributeError) as error:
            raise InvalidArgument(f"cannot import {target}: {error}") from error
    path = Path(target)
    return load_model(path / "model.safetensors" if path.is_dir() else path)


def _identity(target: Any) -> str:
    if isinstance(target, Attention):
        return "attention " + digest(*target.to_arrays().values()).hex()
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{getattr(target, '__module__', type(target).__module__)}.{name}"
