"""Queries of two tokens of a vocabulary, [t_a; t_b]: with u = t_a − t_b and x = t_b the answer is

    f([t_b]) + σ(s) (f([t_a]) − f([t_b])),   s = u · (score x + key_bias)

Tokens cannot be rescaled, so the operating point is a matter of choice. Which t_a to put to an
anchor t_b is an experimental design: what is known of the column k = score x + key_bias (first a
prior, then what the answers say) predicts every score and with it the error of every measurement.
The first d tokens are a D-optimal set under that forecast (pivoted QR of u / error); what came out
saturated or imprecise is replaced by the token that shrinks the column's variance most.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr
from scipy.special import expit

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import Counterexample, WrongFamily
from keyhole.learners.single_head.token_values import TokenValues
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import ArrayBank, QueryBatch

SATURATED = 4.0  # a weight below so many of its standard errors carries no information
OUTSIDE = 1e4  # so far outside [0, 1], in the same units, is no rounding
CAUTION = 1.5  # standard deviations of a forecast score that the design allows for
FIRST_CAUTION = 3.0  # the same for a first choice, where the steepest of d scores counts
OVERFLOW = 300.0  # scores beyond are cut in forecasts: their error is as good as infinite
INDEPENDENT = 1e-7  # of a token's distance to the span of the others, relative: below, it is in it
CANCELLED = 1e-13  # of a variance: what is left of it by rounding when all of it is explained
FAINT = 2.0**-200  # error of an exact answer, relative: such answers happen, exactness does not


@dataclass(frozen=True, eq=False)
class PairScores:
    """Scores of a batch, their standard errors, and which of them say nothing."""

    scores: Float[Array, " n"]
    errors: Float[Array, " n"]
    saturated: Array


@dataclass(frozen=True, eq=False)
class TokenPairs:
    """Asks pairs of tokens by number, and forecasts the error of a score before it is asked."""

    oracle: Oracle
    tokens: Float[Array, "m d"]
    known: TokenValues

    def ask(self, first: Int[Array, " n"], anchor: Int[Array, " n"], purpose: str) -> PairScores:
        queries = QueryBatch(ArrayBank(self.tokens), np.stack([first, anchor], axis=1), purpose)
        raw = np.asarray(self.oracle.ask(queries), dtype=np.float64).reshape(len(first), -1)
        known = self.known
        swing = known.answers[first] - known.answers[anchor]
        power = np.maximum(np.sum(swing**2, axis=1), TINY)
        weight = np.sum((raw - known.answers[anchor]) * swing, axis=1) / power
        own = np.sum((known.answers[first] - raw) * swing, axis=1) / power
        answer, one, other = self._errors(first, anchor)
        fuzz, own_fuzz = np.hypot(answer, other), np.hypot(answer, one)
        low = np.minimum(weight / fuzz, own / own_fuzz)
        self._refuse_impossible(queries, raw, low)
        saturated = low <= SATURATED
        weight, own = np.maximum(weight, fuzz), np.maximum(own, own_fuzz)
        errors = np.sqrt((answer / (weight * own)) ** 2 + (other / weight) ** 2 + (one / own) ** 2)
        return PairScores(np.log(weight / own), errors, saturated)

    def _errors(self, first: Array, anchor: Array) -> tuple[Array, Array, Array]:
        """Standard errors of the answer and of the two tokens' own, in units of the swing."""
        known = self.known
        swing = known.answers[first] - known.answers[anchor]
        length = np.maximum(np.linalg.norm(swing, axis=1), TINY)
        size = np.maximum(known.sizes[first], known.sizes[anchor])
        parts = (known.noise.of(size), known.errors[first], known.errors[anchor])
        direction = np.abs(swing) / length[:, None]
        faint = FAINT + TINY
        answer, one, other = (
            np.maximum(np.sqrt(np.sum((direction * part) ** 2, axis=1)) / length, faint)
            for part in parts
        )
        return answer, one, other

    def forecast(self, first: Array, anchor: Array, low: Array, high: Array) -> Array:
        """Standard error of the score, at the worse end of an interval of scores."""
        answer, one, other = self._errors(first, anchor)
        worst = np.zeros(len(first))
        for end in (low, high):
            cut = np.clip(end, -OVERFLOW, OVERFLOW)
            weight, own = expit(cut), expit(-cut)
            error = (answer / (weight * own)) ** 2 + (other / weight) ** 2 + (one / own) ** 2
            worst = np.maximum(worst, error)
        return np.sqrt(worst)

    def _refuse_impossible(self, queries: QueryBatch, answers: Array, low: Array) -> None:
        worst = int(np.argmin(low))
        if low[worst] >= -OUTSIDE:
            return
        pair = self.known.answers[queries.index[worst]]
        nearest = np.clip(answers[worst], pair.min(axis=0), pair.max(axis=0))
        raise WrongFamily(
            "an attention head answers with a mean of its tokens' values, and the box's answer to "
            "a query of 2 tokens is not such a mean",
            Counterexample(
                queries[worst : worst + 1].tokens()[0],
                answers[worst],
                nearest,
                "not a mean of the values",
            ),
        )


class Column:
    """What is known of k = score x + key_bias for one anchor x."""

    def __init__(self, pairs: TokenPairs, anchor: int, mean: Array, deviation: float) -> None:
        self.pairs, self.anchor, self.mean, self.deviation = pairs, anchor, mean, deviation
        self.probes = np.zeros(0, dtype=np.int64)
        self.scores, self.errors = np.zeros(0), np.zeros(0)
        self.spent = np.array([anchor])  # tokens not worth asking (again)

    def steps(self, probes: Array) -> Float[Array, "n d"]:
        return self.pairs.tokens[probes] - self.pairs.tokens[self.anchor]

    def first_probes(self) -> Int[Array, " d"]:
        """d tokens, best first, that determine the column with the least volume of error."""
        tokens = np.arange(len(self.pairs.tokens))
        steps = self.steps(tokens)
        reach = FIRST_CAUTION * self.deviation * np.linalg.norm(steps, axis=1)
        scaled = steps / self._forecast(tokens, steps @ self.mean, reach)[:, None]
        scaled[self.anchor] = 0.0
        order = qr(scaled.T, mode="r", pivoting=True)[1]
        return np.asarray(order[: steps.shape[1]], dtype=np.int64)

    def _forecast(self, tokens: Array, middle: Array, reach: Array) -> Array:
        anchors = np.full(len(tokens), self.anchor)
        return self.pairs.forecast(tokens, anchors, middle - reach, middle + reach)

    def add(self, probes: Array, found: PairScores) -> None:
        good = ~found.saturated
        self.spent = np.union1d(self.spent, probes)
        self.probes = np.concatenate([self.probes, probes[good]])
        self.scores = np.concatenate([self.scores, found.scores[good]])
        self.errors = np.concatenate([self.errors, found.errors[good]])
        self._solve()

    def _solve(self) -> None:
        """A best set of independent measurements, solved exactly; the prior where there is none.

        The measurements left out are those that better ones replaced. Weights differ by many
        decades here: a square system keeps the digits that normal equations would lose.
        """
        steps, width = self.steps(self.probes), self.pairs.tokens.shape[1]
        used = np.zeros(0, dtype=np.int64)
        if len(steps):
            scaled = steps / self.errors[:, None]
            order = qr(scaled.T, mode="r", pivoting=True)[1]
            upper = qr((steps[order] / np.linalg.norm(steps[order], axis=1)[:, None]).T, mode="r")
            depth = np.abs(np.diag(upper[0]))
            used = order[: len(depth)][depth > INDEPENDENT]
        rows, rest = steps[used], self.scores[used] - steps[used] @ self.mean
        inverse = np.linalg.pinv(rows) if len(used) else np.zeros((width, 0))
        self.estimate = self.mean + inverse @ rest
        if len(used) == width:  # a step of refinement: the last digits matter
            self.estimate = self.estimate + inverse @ (self.scores[used] - rows @ self.estimate)
        unseen = np.eye(width) - inverse @ rows if len(used) < width else np.zeros((width, width))
        factor = inverse * self.errors[used]
        self.covariance = factor @ factor.T + self.deviation**2 * (unseen @ unseen.T)
        self.missing = width - len(used)

    def best_probes(self, count: int) -> tuple[Int[Array, " n"], float]:
        """The tokens that shrink the trace of the covariance most, and by how much the first."""
        tokens = np.setdiff1d(np.arange(len(self.pairs.tokens)), self.spent)
        if not len(tokens):
            return tokens, 0.0
        steps, covariance = self.steps(tokens), self.covariance.copy()
        middle, chosen, gains = steps @ self.estimate, [], []
        floor = CANCELLED * float(np.trace(covariance)) * np.sum(steps**2, axis=1)
        for _ in range(min(count, len(tokens))):
            reached = steps @ covariance
            variance = np.maximum(np.einsum("nd,nd->n", reached, steps), floor)
            error = self._forecast(tokens, middle, CAUTION * np.sqrt(variance))
            gain = np.einsum("nd,nd->n", reached, reached) / (variance + error**2)
            best = int(np.argmax(gain))
            chosen.append(tokens[best])
            gains.append(float(gain[best]))
            covariance -= np.outer(reached[best], reached[best]) / (
                variance[best] + error[best] ** 2
            )
        return np.unique(np.array(chosen)), gains[0]
