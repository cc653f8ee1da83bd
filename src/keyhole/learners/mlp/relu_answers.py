"""The answers of a box that should be a ReLU network: what they cost, and how exact they are."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, Array, Float
from keyhole.errors import Counterexample, IllConditioned, WrongFamily
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import QueryBatch

ROUNDING = 2.0**-52  # relative error of an answer in double precision: a few operations' worth
VALID = 1e-7  # difference to the box, relative to the answers, that is not rounding any more
VALID_ROUNDINGS = 100.0  # the same in units of one answer's rounding
CLEAN = 1e-11  # rounding beyond this: differences are blamed on the answers' digits
TELLING = 5  # different answers that tell its format from round numbers


@dataclass(eq=False)
class Answers:
    """The box, what was spent on it, and what is known about its answers."""

    oracle: Oracle
    relative: float = ROUNDING
    noise: float = 0.0  # stated error of an answer that does not depend on its size
    unit: float = 0.0  # rounding of an answer as met along the lines
    scale: float = 0.0  # how much the answers vary
    spent: int = 0
    scalar: bool = True
    single: bool = False  # the box computes in single precision, and rounds what it is asked
    numbers: Array = field(default_factory=lambda: np.zeros(0))  # different answers, the first few

    def __post_init__(self) -> None:
        precision = self.oracle.spec.precision
        if precision is not None:
            self.relative = max(self.relative, 2 * precision.relative)
            self.noise = precision.additive + precision.step / 2

    def ask(self, points: Float[Array, "n d"], purpose: str) -> Float[Array, "n k"]:
        points = self.rounded(points)
        raw = self.oracle.ask(QueryBatch.of(points[:, None, :], purpose))
        self.look_at_format(raw)
        self.spent += len(points)
        self.scalar = raw.ndim == 1
        return raw.astype(np.float64).reshape(len(points), -1)

    def look_at_format(self, raw: Array) -> None:
        """Whether all answers are numbers of single precision, once there are enough to tell."""
        if len(self.numbers) >= TELLING:
            return
        self.numbers = np.unique(np.append(self.numbers, raw.astype(np.float64)))
        few = self.numbers == self.numbers.astype(np.float32)
        if len(self.numbers) >= TELLING and few.all():
            self.single, self.relative = True, max(self.relative, SINGLE_ROUNDOFF)

    def rounded(self, points: Array) -> Array:
        """Points as the box sees them."""
        return points.astype(np.float32).astype(np.float64) if self.single else points

    @property
    def rough(self) -> bool:
        """Whether their digits are too few for lines through two of them."""
        return self.single or self.unit > CLEAN * self.scale

    def allowed(self) -> float:
        return max(VALID * self.scale, VALID_ROUNDINGS * self.unit)

    def counterexample(
        self, point: Array, answer: Array, predicted: Array, reason: str
    ) -> Counterexample:
        if self.scalar:
            answer, predicted = answer[0], predicted[0]
        return Counterexample(point, answer, predicted, reason)

    def refusal(
        self, message: str, witness: Counterexample | None, *, lines: int | None = None
    ) -> Exception:
        """What to raise. `lines` counts those of a bounded domain that did not settle it."""
        if self.unit > CLEAN * self.scale:
            return IllConditioned(
                f"{message}. The box's answers are exact to about {self.unit / self.scale:.1g} of "
                "their size only; kinks that are close or weak drown in that. A box in double "
                "precision would be recovered"
            )
        if lines is not None:
            return IllConditioned(
                f"{message}. In a bounded domain a line meets only some of the planes, and "
                f"{lines} lines did not settle what lies between them. A wider domain would help"
            )
        return WrongFamily(f"not one hidden layer of ReLUs: {message}", witness)
