"""The levels of doubt: every decision of a learner compares an estimate with its standard error.

Statement.  A stage has an estimate and its standard error, and asks here whether it is zero,
            whether two of them differ, whether a model explains answers, how many singular values
            are real. No stage compares a number with a literal of its own.
Algebra.    Zero and seen: DETECTION standard errors. Differs, contradicts: REJECTION of them, and
            what two evaluations of one sum may differ by. Ranks: what errors of this size can make
            (`linalg.rank`). Derivatives: central differences at two step sizes; their difference
            bounds what the longer series leaves out, rounding is known from the noise, and the step
            is where both are alike. Repetitions: as many as make a wrong answer as unlikely as
            FALSE_ALARM.
When it fails. An estimate near a border: every decision is reported with its margin
            (`linalg.decisions`), and a run says how close its closest one was. Who can ask more
            does so before it decides.
Source.     The levels are in `oracles.noise`, with their meaning as probabilities.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.linalg.decisions import margin_of, note_decision
from keyhole.linalg.rank import count_above, find_fall, noise_edge
from keyhole.oracles.noise import ACCURACY, DETECTION, FALSE_ALARM, REJECTION, ROUNDINGS, NoiseModel

Ask = Callable[[Float[Array, "n length d"]], Float[Array, "n outputs"]]


@dataclass(frozen=True, eq=False)
class Estimate:
    """Numbers with their standard errors, of one shape.

    step: where they are derivatives, that of the differences they were made from.
    """

    value: Array
    error: Array
    step: float = 0.0

    @property
    def clarity(self) -> float:
        """Size over standard error of the number that is farthest from zero."""
        return float(np.max(np.abs(self.value) / np.maximum(self.error, TINY), initial=0.0))


@dataclass(frozen=True)
class Evidence:
    """Decides for a box whose answers are this exact.

    Args:
        noise: Of the box.

    Example:
        >>> evidence = Evidence(NoiseModel())
        >>> evidence.is_zero(Estimate(np.array([1e-9]), np.array([1e-9])))
        True
        >>> evidence.rank(np.diag([2.0, 1.0, 1e-9]), error=1e-8)
        2
    """

    noise: NoiseModel

    def is_zero(self, estimate: Estimate, question: str = "zero") -> bool:
        """Whether nothing but error is seen: no number is DETECTION standard errors from zero.

        Args:
            estimate: Numbers with their standard errors.
            question: What is decided, for the reader of a run.
        """
        zero = estimate.clarity <= DETECTION
        note_decision(question, zero, margin_of(estimate.clarity, DETECTION))
        return zero

    def vanishes(self, block: Estimate, scale: float = np.inf) -> bool:
        """Whether a block of parameters is zero, and may be set so: its norm is within REJECTION of
        that of its standard errors, and would not matter.

        Args:
            block: Parameters with their standard errors.
            scale: Size beside which a part below ACCURACY, or below roundings, does not matter.
        """
        size, doubt = (float(np.linalg.norm(part)) for part in (block.value, block.error))
        negligible = max(ACCURACY, ROUNDINGS * self.noise.relative) * scale
        border = float(min(REJECTION * doubt, negligible))
        if size > 0.0:  # else there is nothing to decide
            note_decision("a block of parameters is zero", size <= border, margin_of(size, border))
        return size <= border

    def differs(self, one: Estimate, other: Estimate, question: str = "differs") -> bool:
        """Whether two estimates of one quantity contradict each other: some numbers are more than
        REJECTION of their joint standard errors apart."""
        gap = Estimate(one.value - other.value, np.hypot(one.error, other.error))
        apart = gap.clarity > REJECTION
        note_decision(question, apart, margin_of(gap.clarity, REJECTION))
        return apart

    def explains(self, residual: Array, scale: Array | float) -> bool:
        """Whether a model explains answers.

        Args:
            residual: Answers less predictions.
            scale: Size of the terms that answers are sums of.
        """
        return not self.noise.rejects(residual, scale)

    def same_direction(self, one: Estimate, other: Estimate) -> bool:
        """Whether two vectors point the same way, or opposite ones, within their errors."""
        first, second = np.linalg.norm(one.value), np.linalg.norm(other.value)
        if not (first > 0 and second > 0):
            return False
        a, b = one.value / first, other.value / second
        across = a - b * np.sign(a @ b)
        error = np.hypot(one.error / first, other.error / second)
        clarity = float(np.linalg.norm(across) / max(float(np.linalg.norm(error)), TINY))
        same = clarity <= DETECTION
        note_decision("the same direction", same, margin_of(clarity, DETECTION))
        return same

    def rank(self, matrix: Float[Array, "m n"], error: Array | float | None = None) -> int:
        """How many singular values are real.

        Args:
            matrix: Estimates.
            error: Standard errors of the entries, or one for all; None where they are not known:
                then the spectrum itself shows where it ends, all of it if it does not.
        """
        sizes = np.linalg.svd(matrix, compute_uv=False)
        if error is None:
            fall = find_fall(sizes)
            return len(sizes) if fall is None else fall
        least = UNIT_ROUNDOFF * float(sizes.max(initial=0.0)) * max(matrix.shape)
        spread = DETECTION * float(np.max(error, initial=0.0))  # of the edge, from draw to draw
        return count_above(sizes, max(noise_edge(error, matrix.shape) + spread, least))

    def difference(
        self,
        ask: Ask,
        point: Float[Array, "length d"],
        direction: Float[Array, "length d"],
        order: int = 2,
        reach: float = 1.0,
    ) -> Estimate:
        """The first or second derivative of the answers along a direction, with standard errors
        from rounding and from what the series leaves out.

        Args:
            ask: Answers, as rows, to sequences.
            point: A sequence.
            direction: What is added to it; the derivative is with respect to its multiple.
            order: 1 or 2.
            reach: Multiple of the direction over which the answers bend by about their own size.

        Raises:
            ValueError: The order is neither 1 nor 2.
        """
        if order not in (1, 2):
            raise ValueError(f"order must be 1 or 2, got {order!r}")
        unit = max(self.noise.relative, UNIT_ROUNDOFF)
        # Truncation of the improved difference grows with the fourth power of the step, rounding
        # with its inverse, or the square of that.
        step = reach * unit ** (1.0 / (4.0 + order))
        ways = np.array([-2.0, -1.0, 0.0, 1.0, 2.0]) * step
        answers = ask(point + ways[:, None, None] * direction)
        sigma = self.noise.sigma(np.abs(answers).max(axis=0))
        # rows: weights of the five answers in the narrow difference and in the wide one
        first = np.array([[0, -0.5, 0, 0.5, 0], [-0.25, 0, 0, 0, 0.25]]) / step
        second = np.array([[0, 1, -2, 1, 0], [0.25, 0, -0.5, 0, 0.25]]) / step**2
        weights, others = (first, second) if order == 1 else (second, first)
        improved = weights[0] + (weights[0] - weights[1]) / 3.0
        # What the narrow difference leaves out bounds what the improved one does, except where its
        # leading term happens to vanish: there that of the other order does not.
        left_out = (weights[0] - weights[1]) @ answers / 3.0
        beside = (others[0] - others[1]) @ answers / 3.0 * reach ** (2 * (order == 1) - 1)
        rounding = float(np.linalg.norm(improved)) * sigma
        return Estimate(improved @ answers, rounding + np.hypot(left_out, beside), step)

    def enough(self, chance: float) -> int:
        """How many independent repetitions until all of them are wrong with a probability below
        FALSE_ALARM.

        Args:
            chance: Probability that one of them is wrong.

        >>> Evidence(NoiseModel()).enough(0.5)
        20
        """
        if not 0.0 < chance < 1.0:
            raise ValueError(f"chance must lie between 0 and 1, got {chance!r}")
        return int(np.ceil(np.log(FALSE_ALARM) / np.log(chance)))
