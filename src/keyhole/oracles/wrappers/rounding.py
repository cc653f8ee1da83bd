"""Answers rounded to decimals, or to the significand of a shorter number format."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class Rounded(Wrapper):
    """`decimals` after the point, or `bits` of significand (float32 has 24)."""

    inner: Oracle
    decimals: int | None = None
    bits: int | None = None

    def __post_init__(self) -> None:
        if (self.decimals is None) == (self.bits is None):
            raise InvalidArgument("give either decimals or bits")
        if self.bits is not None and not 1 <= self.bits <= 53:
            raise InvalidArgument(f"bits must lie in 1 … 53, got {self.bits}")

    def ask(self, queries: QueryBatch) -> Array:
        answers = self.inner.ask(queries)
        if self.decimals is not None:
            return np.round(answers, self.decimals)
        return round_bits(answers, self.bits or 53)


def round_bits(numbers: Array, bits: int) -> Array:
    """Each number rounded to so many significant bits, ties to even."""
    mantissa, exponent = np.frexp(numbers)
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits))
