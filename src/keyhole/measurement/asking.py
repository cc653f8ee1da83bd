"""Ask, and see every answer as a row of float64: a scalar box is a box with one output."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF, Array, Float
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import QueryBatch

NOISE = 5.0  # standard deviations within which an answer is nothing but noise
COARSE = 1e3  # roundoffs of float64 from which on a box counts as coarse


def few_digits(spec: Spec) -> bool:
    """Whether the box is stated to answer with so few digits that it counts as coarse."""
    return spec.precision is not None and spec.precision.relative >= COARSE * UNIT_ROUNDOFF


@dataclass
class Asker:
    """Remembers what kind of box this is (scalar or vector, float32 or float64)."""

    oracle: Oracle
    scalar: bool | None = None  # known after the first answer
    outputs: int = 1  # numbers in an answer, likewise
    single: bool = False
    asked: int = 0
    offset: Float[Array, " outputs"] | float = 0.0  # subtracted from every answer once known
    recording: bool = False  # whether queries and answers are kept, for a fit to all of them
    recorded: list[tuple[Array, Array]] = field(default_factory=list)

    @property
    def width(self) -> int:
        return self.oracle.spec.width

    def __call__(
        self, tokens: Float[Array, "n length d"], purpose: str
    ) -> Float[Array, "n outputs"]:
        if not len(tokens):
            return np.zeros((0, self.outputs))
        answers = np.asarray(self.oracle.ask(QueryBatch.of(tokens, purpose)))
        self.asked += len(tokens)
        self.scalar = answers.ndim == 1
        self.single = self.single or answers.dtype == np.float32
        answers = answers.astype(np.float64)
        answers = answers[:, None] if self.scalar else answers
        self.outputs = answers.shape[1]
        if self.recording:
            self.recorded.append((tokens, answers))
        return answers - self.offset

    @property
    def unit(self) -> float:
        """Relative rounding error of an answer."""
        stated = self.oracle.spec.precision
        seen = SINGLE_ROUNDOFF if self.single else UNIT_ROUNDOFF
        return max(seen, stated.relative if stated is not None else 0.0)

    @property
    def coarse(self) -> bool:
        """Whether digits are so short that extra queries are worth their price."""
        return self.unit >= COARSE * UNIT_ROUNDOFF

    @property
    def additive(self) -> float:
        """Standard deviation of the error of an answer that does not scale with it."""
        stated = self.oracle.spec.precision
        if stated is None:
            return 0.0
        return float(np.hypot(stated.additive, stated.step / np.sqrt(12.0)))

    @property
    def noise(self) -> float:
        """How much of an answer noise alone may be."""
        return NOISE * self.additive
