"""What a limited interface makes of answers: noise, rounding, labels; to simulate and audit."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.models.sign_attention import Coding
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch


class Noisy(Wrapper):
    """Adds independent normal noise: `additive` in the answer's units, `relative` to its size."""

    def __init__(
        self, inner: Oracle, additive: float = 0.0, relative: float = 0.0, seed: int = 0
    ) -> None:
        if additive < 0 or relative < 0:
            raise InvalidArgument("noise levels must not be negative")
        self.inner, self.additive, self.relative = inner, additive, relative
        self._rng = np.random.default_rng(seed)

    def ask(self, queries: QueryBatch) -> Array:
        answers = self.inner.ask(queries)
        noise = self._rng.standard_normal((2, *answers.shape))
        return answers + self.additive * noise[0] + self.relative * np.abs(answers) * noise[1]


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


BITS = Coding(0.0, 0.0, 1.0)  # the label of `f > 0`


@dataclass(frozen=True, eq=False)
class Labels(Wrapper):
    """Tells only the sign of the inner box's answer: -1, 0, 1, or 0 and 1 with `BITS`; of a vector
    the position of its largest number."""

    inner: Oracle
    coding: Coding = field(default=Coding(-1.0, 0.0, 1.0))

    def ask(self, queries: QueryBatch) -> Array:
        answers = np.asarray(self.inner.ask(queries))
        if answers.ndim == 2:
            return np.argmax(answers, axis=1).astype(np.float64)
        return self.coding.encode(answers.astype(np.float64))
