"""Ask, and see every answer as a row of float64: a scalar box is a box with one output."""

from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF, Array, Float
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import DETECTION, NoiseModel
from keyhole.oracles.queries import QueryBatch

DOUBLE_PRECISION = 1e3 * UNIT_ROUNDOFF  # relative errors below this are those of float64 sums


def few_digits(spec: Spec) -> bool:
    """Whether the box is stated to answer with fewer digits than float64 sums have."""
    return spec.precision is not None and spec.precision.relative >= DOUBLE_PRECISION


@dataclass
class Transcript:
    """What was seen of the answers; the askers of one box share it and alone write into it."""

    scalar: bool | None = None  # whether answers are single numbers; known after the first one
    outputs: int = 1  # numbers in an answer, likewise
    single: bool = False  # whether answers came as float32
    queries: list[tuple[Array, Array]] = field(default_factory=list)  # tokens and answers, if kept


@dataclass(frozen=True, eq=False)
class Asker:
    """Asks a box, and subtracts an offset from its answers once that is known."""

    oracle: Oracle
    offset: Float[Array, " outputs"] | float = 0.0
    recording: bool = False  # whether queries and answers are kept, for a fit to all of them
    transcript: Transcript = field(default_factory=Transcript)

    def subtracting(self, offset: Float[Array, " outputs"] | float) -> "Asker":
        """The same box, answers less `offset`."""
        return replace(self, offset=offset)

    @property
    def width(self) -> int:
        return self.oracle.spec.width

    @property
    def outputs(self) -> int:
        return self.transcript.outputs

    @property
    def scalar(self) -> bool:
        """Whether answers are single numbers."""
        return bool(self.transcript.scalar)

    def __call__(
        self, tokens: Float[Array, "n length d"], purpose: str
    ) -> Float[Array, "n outputs"]:
        if not len(tokens):
            return np.zeros((0, self.outputs))
        answers = np.asarray(self.oracle.ask(QueryBatch.of(tokens, purpose)))
        seen = self.transcript
        seen.scalar = answers.ndim == 1
        seen.single = seen.single or answers.dtype == np.float32
        rows = answers.astype(np.float64).reshape(len(answers), -1)
        seen.outputs = rows.shape[1]
        if self.recording:
            seen.queries.append((tokens, rows))
        return rows - self.offset

    @property
    def unit(self) -> float:
        """Relative rounding error of an answer."""
        stated = self.oracle.spec.precision
        seen = SINGLE_ROUNDOFF if self.transcript.single else UNIT_ROUNDOFF
        return max(seen, stated.relative if stated is not None else 0.0)

    @property
    def low_precision(self) -> bool:
        """Whether digits are so few that extra queries are worth their price."""
        return self.unit >= DOUBLE_PRECISION

    @property
    def additive(self) -> float:
        """Standard deviation of the error of an answer that does not scale with it."""
        return (self.oracle.spec.precision or NoiseModel()).error_floor

    @property
    def undetected(self) -> float:
        """Answers up to this size may be nothing but noise that does not scale with them."""
        return DETECTION * self.additive
