"""open_oracle: whatever the user has becomes an oracle."""

from collections.abc import Callable
from typing import Any

from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention
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
    a keyhole model, or an Oracle.

    The domain (`max_length`, `max_norm`, `low`/`high` per entry, `vocabulary` of allowed tokens)
    is what the box accepts: no question will leave it. `precision` states how exact the answers
    are where that is known; otherwise it is measured.
    """
    domain = Domain(max_length, max_norm, low, high, vocabulary)
    if isinstance(target, Oracle):
        return target
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


def _identity(target: Callable[..., Any]) -> str:
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{getattr(target, '__module__', type(target).__module__)}.{name}"
