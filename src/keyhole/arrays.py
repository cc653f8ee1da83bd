"""Array types, the limits of their arithmetic, and the checks at the border.

Shapes are written in annotations (`Float[Array, "batch length width"]`) and enforced while
testing, where jaxtyping is installed; at run time they cost nothing.
"""

import hashlib
import numbers
import operator
from typing import TYPE_CHECKING, Any

import numpy as np

from keyhole.errors import InvalidArgument, NotFinite

if TYPE_CHECKING:
    from jaxtyping import Float, Int
else:
    try:
        from jaxtyping import Float, Int
    except ImportError:  # the annotations then only name the array type

        class _Unchecked:
            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Float = Int = _Unchecked

__all__ = [
    "SINGLE_ROUNDOFF",
    "TINY",
    "UNIT_ROUNDOFF",
    "Array",
    "Float",
    "Int",
    "digest",
    "finite_array",
    "frozen",
    "random_stream",
    "real_number",
    "sequences",
    "whole_number",
]

Array = np.ndarray

UNIT_ROUNDOFF = 2.0**-53  # relative rounding error of float64, the best a box can do
SINGLE_ROUNDOFF = 2.0**-24  # and of float32
TINY = 1e-300  # in place of a divisor that is zero: less than any number that means something, and
# ordinary numbers divided by it stay finite


def finite_array(name: str, value: Any, *, ndim: int | tuple[int, ...]) -> Array:
    """`value` as a float array of one of the given dimensions, or a sentence on what is wrong.

    float32 stays float32; everything else that is a real number becomes float64.
    """
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} is not an array: {error}") from error
    if array.dtype.kind not in "fiub":
        raise InvalidArgument(f"{name} must hold real numbers, got dtype {array.dtype}")
    if array.dtype != np.float32:
        array = array.astype(np.float64, copy=False)
    dims = (ndim,) if isinstance(ndim, int) else ndim
    if array.ndim not in dims:
        wanted = " or ".join(str(n) for n in dims)
        raise InvalidArgument(f"{name} must have {wanted} dimension(s), got shape {array.shape}")
    if not np.isfinite(array).all():
        raise NotFinite(f"{name} holds NaN or infinity")
    return array


def whole_number(name: str, value: Any, least: int) -> int:
    """`value` as an int (NumPy's integers are whole numbers too, True and 2.0 are not), or a
    sentence on what is wrong."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if isinstance(value, bool) or number < least:
        raise InvalidArgument(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def sequences(tokens: Any, width: int, dtype: Any) -> Float[Array, "batch length width"]:
    """Tokens as what a model is called on, or a sentence on what is wrong."""
    tokens = np.asarray(tokens, dtype=dtype)
    if tokens.ndim != 3 or tokens.shape[1] < 1 or tokens.shape[2] != width:
        raise InvalidArgument(
            f"expected tokens of shape (batch, length, {width}), got {tokens.shape}"
        )
    return tokens


def real_number(
    name: str,
    value: Any,
    low: float = -np.inf,
    high: float = np.inf,
    *,
    with_low: bool = False,
    finite: bool = True,
) -> float:
    """`value` as a float above `low` (or `low` itself) and below `high`, or a sentence on what is
    wrong: text and truth values are no numbers. Not `finite`: infinity stands for no limit."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    number = float(value) if real else np.nan
    above = low < number or (with_low and number == low)
    if not (above and (number < high or (number == np.inf and not finite))):
        limits = [f"{'of at least' if with_low else 'above'} {low:g}"] if low > -np.inf else []
        limits += [f"below {high:g}"] if high < np.inf else []
        kind = "a finite number" if finite and high == np.inf else "a number"
        words = " ".join([kind, *([" and ".join(limits)] if limits else [])])
        raise InvalidArgument(f"{name} must be {words}, got {value!r}")
    return number


def frozen(array: Array) -> Array:
    """The array itself if nobody can write to it, else a read-only copy."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and not owner.flags.writeable:
        owner = owner.base  # a read-only view changes with what it is a view of
    if owner is not None:
        array = array.copy()
        array.flags.writeable = False
    return array


def digest(*parts: Array | bytes) -> bytes:
    """Sixteen bytes that name these contents (shape and dtype included)."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, bytes):
            state.update(b"b%d:" % len(part) + part)
        else:
            state.update(f"a{part.dtype.str}{part.shape}:".encode())
            state.update(np.ascontiguousarray(part).data.cast("B") if part.size else b"")
    return state.digest()


def random_stream(seed: int, label: str) -> np.random.Generator:
    """A generator for one purpose of a run. No box that was drawn from the same seed shares it:
    `np.random.default_rng(seed)` gives other numbers, and so does every other label.

    >>> one, other = random_stream(0, "learning"), random_stream(0, "verification")
    >>> len({one.random(), other.random(), np.random.default_rng(0).random()})
    3
    """
    entropy = np.random.SeedSequence(seed, spawn_key=tuple(f"keyhole {label}".encode()))
    return np.random.default_rng(entropy)
