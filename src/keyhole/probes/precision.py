"""How exact is this box? Read off the answers that were paid for anyway.

A box that computes in float32 (or less) gives answers that are float32 numbers, whatever type it
hands them over in: the number of trailing zero bits of the answers tells.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.oracles.base import UNIT_ROUNDOFF, Precision

FORMATS = (  # name, bits of the significand (with the hidden one)
    ("bfloat16", 8),
    ("float16", 11),
    ("float32", 24),
    ("float64", 53),
)
TELLING_ANSWERS = 1  # one irrational-looking answer is round by chance once in 2**29


@dataclass(frozen=True)
class Roundoff:
    """Unit roundoff of the box's arithmetic, and the number format it belongs to."""

    relative: float
    name: str


def roundoff(stated: Precision | None, answers: Array) -> Roundoff:
    """The stated precision, else what the type of the answers allows."""
    if stated is not None:
        return Roundoff(stated.relative, "stated")
    if answers.dtype == np.float16:
        return Roundoff(2.0**-11, "float16")
    if answers.dtype == np.float32:
        return Roundoff(2.0**-24, "float32")
    return Roundoff(UNIT_ROUNDOFF, "float64")


def observed(known: Roundoff, answers: Array) -> Roundoff:
    """`known`, or the coarser format that all these (irrational-looking) answers belong to."""
    numbers = np.asarray(answers, dtype=np.float64).ravel()
    numbers = numbers[numbers != 0]
    if known.name == "stated" or numbers.size < TELLING_ANSWERS:
        return known
    bits = int(significant_bits(numbers).max())
    for name, width in FORMATS:
        if bits <= width:
            coarser = Roundoff(2.0**-width, name)
            return coarser if coarser.relative > known.relative else known
    return known


def significant_bits(numbers: Array) -> Array:
    """How many bits of each number's significand are in use."""
    mantissa, _ = np.frexp(np.asarray(numbers, dtype=np.float64))
    integers = np.abs(mantissa * 2.0**53).astype(np.int64)
    lowest = integers & -integers
    trailing = np.where(integers == 0, 53, np.log2(np.maximum(lowest, 1)).astype(np.int64))
    return np.asarray(53 - trailing)
