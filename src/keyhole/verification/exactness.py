"""How exact is the box that is being verified? Found out on the way, from questions set aside.

The number format and a rounding step show in the answers. Noise shows where one question is asked
again; only then more is spent on it, at two sizes of answers, to tell noise that grows with the
answer from noise that does not. Levels are taken at the upper end of what so few repeats leave
possible: an honest box must not be wronged.
"""

import numpy as np
from scipy.special import gammaincinv

from keyhole.arrays import Array
from keyhole.oracles.base import Oracle, Precision
from keyhole.oracles.questions import Questions
from keyhole.probes.precision import SAME, decimal_step, observed, roundoff
from keyhole.verification.questions import Fresh

PURPOSE = "verification"
REPEATS = 3  # of one question, to see whether the box is noisy
NOISY_SHARE, NOISY_MOST = 4, 32  # one question in so many, and no more than that, measures noise
MISJUDGED = 1e-6  # chance that the level of the noise is taken too low
SMALL, LARGE = 2.0**-6, 2.0**6  # sizes of tokens whose answers show whether noise grows with them
TELLING = 4.0  # growth of the answers between them from which that can be told
TINY = float(np.finfo(float).tiny)


class Measuring:
    """Asks the first of the questions, again, and where answers differ some more."""

    def __init__(self, box: Oracle, fresh: list[Fresh], count: int) -> None:
        self.box, self.spent = box, 0
        self.first: list[Array] = []  # answers to the first questions, asked here
        self.relative, self.additive = 0.0, 0.0
        if count <= REPEATS:
            return
        start = fresh[0].tokens
        self.first = [box.ask(Questions.of(start[None], PURPOSE))]
        again = self._again(start, REPEATS)
        kind = observed(roundoff(None, self.first[0]), self.first[0]).relative
        if np.max(np.ptp(again, axis=0)) > SAME * kind * np.max(np.abs(again)):
            self._noise(fresh, again, min(count // NOISY_SHARE, NOISY_MOST) // 2)

    def _again(self, tokens: Array, times: int) -> Array:
        self.spent += times
        batch = np.repeat(tokens[None], times, axis=0)
        answers = self.box.ask(Questions.of(batch, PURPOSE))
        return np.asarray(answers, dtype=np.float64).reshape(times, -1)

    def _noise(self, fresh: list[Fresh], seen: Array, times: int) -> None:
        """Noise at small and at large answers."""
        level = upper_level(seen)
        self.additive = level
        if times < REPEATS:
            return
        low, high = (self._again(tokens, times) for tokens in self._two_sizes(fresh[0].tokens))
        sizes = [max(float(np.sqrt(np.mean(part**2))), TINY) for part in (low, high)]
        scatter = [float(np.sqrt(np.mean(np.var(part, axis=0, ddof=1)))) for part in (low, high)]
        growth = sizes[1] / sizes[0]
        self.additive = max(upper_level(low), upper_level(high))
        if growth < TELLING or scatter[1] > np.sqrt(growth) * scatter[0]:
            self.relative = upper_level(high) / sizes[1]
        if growth >= TELLING and self.relative:
            self.additive = upper_level(low)

    def _two_sizes(self, tokens: Array) -> tuple[Array, Array]:
        domain = self.box.spec.domain
        if domain.vocabulary is not None:
            return tokens, tokens
        return domain.drawn_in(SMALL * tokens), domain.drawn_in(LARGE * tokens)

    def precision(self, answers: list[Array]) -> Precision:
        """Number format and rounding step from all answers, noise as measured."""
        numbers = np.concatenate([np.asarray(a, dtype=np.float64).ravel() for a in answers])
        kind = observed(roundoff(None, answers[0]), numbers)
        relative = max(kind.relative, self.relative)
        return Precision(relative, self.additive, decimal_step(numbers))


def upper_level(repeats: Array) -> float:
    """Standard deviation of repeated answers, as high as it may be."""
    freedom = (len(repeats) - 1) * repeats.shape[1]
    square = float(np.mean(np.var(repeats, axis=0, ddof=1)))
    low = 2.0 * gammaincinv(freedom / 2.0, MISJUDGED)  # quantile of chi square
    return float(np.sqrt(square * freedom / low))
