"""Queries of probes against an anchor: [u_1 + x; …; u_k + x; x], answered by log-odds.

With the value map known, the answer is a known mixture of known values, so the attention weights
can be solved for; their logarithms against the weight of the anchor's own token are

    s_i = u_i · (score x + key_bias)                             (the x-on-x score cancels)

k = 1 for a scalar box. A box with vector answers reads off up to rank(value) probes at once.

Operating point. An error ε of the answer is an error ε(1 + e^s) of s, so s should be small and
rather negative than large: the anchor's length is set so that s has root mean square TARGET_SPREAD.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import Counterexample, IllConditioned, WrongFamily
from keyhole.linalg.inverses import right_inverse
from keyhole.measurement.linear_response import SHORT, LinearPart, answer_noise
from keyhole.measurement.noise import recognise_format
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import ArrayBank, ProbeAnchorBank, QueryBatch, TokenBank

TARGET_SPREAD = 0.5  # root mean square of s: (1 + e^s)/s is flat around its best value here
STEEPEST = 5.0  # score above which the factor 1 + e^s is worth another query
LOOSE = 64.0  # error of a score, in units of the answer's, that is worth another query
SHRINK = 2.0**-7  # step of the anchor's length where the answer is saturated
ROUNDS = 40  # of shrinking: a score that then still saturates is no score
SATURATED = 4.0  # rounding errors: a weight this close to 0 or 1 carries no digits
UNSEEN = 16.0  # standard errors: scores this small are zero as far as one can see


@dataclass(frozen=True, eq=False)
class ProbeSet:
    """Probe tokens, by groups of `group` that are asked together, and what is known of them."""

    bank: TokenBank  # rows are the probes u
    count: int
    group: int
    values: Float[Array, "n D"]  # u · value
    bias: Float[Array, " n"]  # u · key_bias, zero where there is none
    bias_error: float = 0.0  # standard error of that

    @property
    def groups(self) -> int:
        return -(-self.count // self.group)

    def members(self, group: int) -> slice:
        return slice(group * self.group, min((group + 1) * self.group, self.count))


@dataclass(frozen=True, eq=False)
class Weights:
    """Log-odds of a batch with their standard errors, and which of them are usable."""

    scores: Float[Array, "n k"]
    errors: Float[Array, "n k"]
    saturated: Array  # (n,) some weight is 0 or 1 as far as one can see


class LogOdds:
    """Measures log-odds with one probe set."""

    def __init__(self, oracle: Oracle, linear: LinearPart, probes: ProbeSet, purpose: str) -> None:
        self.oracle, self.linear, self.probes, self.purpose = oracle, linear, probes, purpose
        self.noise = linear.noise
        scalar = probes.group == 1 == probes.values.shape[1]  # division does: thousands of groups
        self._inverse = [
            right_inverse(probes.values[probes.members(g)])
            for g in range(0 if scalar else probes.groups)
        ]

    def ask(
        self,
        anchors: TokenBank,
        count: int,
        rows: Int[Array, " n"],
        groups: Int[Array, " n"],
        values: Float[Array, "n D"],
        lengths: Float[Array, " n"] | None = None,
    ) -> Weights:
        """Query q: probe group groups[q] against anchor rows[q], of `count`, and its value. Where
        the anchor's `lengths` are given, a value that is small because its terms cancel is known
        to be rounded at the size of the terms.

        The last group may be smaller than the others; its missing members read as score 0 with
        error 0.
        """
        probes, short = self.probes, self.probes.count % self.probes.group
        reach = np.zeros(len(rows)) if lengths is None else lengths
        last = groups == probes.groups - 1
        if not (short and last.any()):
            queries = self._queries(anchors, count, rows, groups, probes.group)
            return self._invert(self.oracle.ask(queries), queries, groups, values, reach)
        shape = (len(rows), probes.group)
        found = Weights(np.zeros(shape), np.zeros(shape), np.zeros(len(rows), dtype=bool))
        for chosen, size in ((np.flatnonzero(~last), probes.group), (np.flatnonzero(last), short)):
            if len(chosen):
                queries = self._queries(anchors, count, rows[chosen], groups[chosen], size)
                answers = self.oracle.ask(queries)
                part = self._invert(answers, queries, groups[chosen], values[chosen], reach[chosen])
                found.scores[chosen, :size] = part.scores
                found.errors[chosen, :size] = part.errors
                found.saturated[chosen] = part.saturated
        return found

    def _queries(
        self, anchors: TokenBank, count: int, rows: Array, groups: Array, size: int
    ) -> QueryBatch:
        """The first `size` probes of each group against its anchor."""
        probes = self.probes
        index = np.empty((len(rows), size + 1), dtype=np.int64)
        index[:, :size] = groups[:, None] * probes.group + np.arange(size)
        index[:, :size] *= count
        index[:, size] = probes.count * count
        index += rows[:, None]
        tokens = ProbeAnchorBank(probes.bank, anchors, probes.count, count)
        return QueryBatch(tokens, index, self.purpose)

    def _invert(
        self, answers: Array, queries: QueryBatch, groups: Array, values: Array, lengths: Array
    ) -> Weights:
        self.noise = recognise_format(self.noise, answers)
        answers = np.asarray(answers, dtype=np.float64).reshape(len(queries), -1)
        size = queries.length - 1
        rest = answers - self.linear.offset - values
        if size == 1 == answers.shape[1]:
            swing = self.probes.values[groups]
            weights, gain = rest / swing, 1.0 / np.abs(swing)
            own, own_gain = ((swing - rest) / swing)[:, 0], gain[:, 0]
        else:
            weights, gain = np.empty((len(answers), size)), np.empty((len(answers), size))
            own_gain = np.empty(len(answers))
            for g in np.unique(groups):
                here, inverse = groups == g, self._inverse[g]
                weights[here] = rest[here] @ inverse
                gain[here] = np.linalg.norm(inverse, axis=0)
                own_gain[here] = np.linalg.norm(inverse.sum(axis=1))
            own = 1.0 - weights.sum(axis=1)
        # the offset is added last: it costs the rounding of one sum, not that of all terms
        terms = np.abs(answers - self.linear.offset) + np.abs(values)
        spread = float(np.linalg.norm(self.linear.value)) / np.sqrt(queries.width)
        sizes = np.maximum(np.linalg.norm(terms, axis=1), lengths * spread)
        level = answer_noise(self.noise, queries.width) * sizes
        # the offset is rounded twice: in the box, and where it is subtracted
        level += 2.0 * self.noise.relative * np.linalg.norm(self.linear.offset)
        level += self.noise.error_floor
        # an answer of zero is exact; its error, relative to the probes' values, is not
        faint = 2.0**-200
        level = np.maximum(level, faint * float(np.max(np.abs(self.probes.values))))
        fuzz, own_fuzz = level[:, None] * gain, level * own_gain
        self._refuse_impossible(answers, queries, weights / fuzz, own / own_fuzz)
        saturated = (weights <= SATURATED * fuzz).any(axis=1) | (own <= SATURATED * own_fuzz)
        safe, safe_own = np.maximum(weights, fuzz), np.maximum(own, own_fuzz)[:, None]
        if size == 1:  # the two weights share one error, of opposite sign
            errors = fuzz / (safe * safe_own)
        else:
            errors = np.hypot(fuzz / safe, own_fuzz[:, None] / safe_own)
        return Weights(np.log(safe / safe_own), errors, saturated)

    def _refuse_impossible(
        self, answers: Array, queries: QueryBatch, weights: Array, own: Array
    ) -> None:
        """Weights in units of their rounding error: far below zero is no attention head."""
        low = np.minimum(weights.min(axis=1), own)
        worst = int(np.argmin(low))
        # in units of the rounding error: a weight so far outside [0, 1] is no rounding
        outside = 1e4
        if low[worst] < -outside:
            tokens = queries[worst : worst + 1].tokens()[0]
            values = self.linear.offset + self.linear.at(tokens)
            nearest = np.clip(answers[worst], values.min(axis=0), values.max(axis=0))
            raise WrongFamily(
                "an attention head answers with a mean of its tokens' values, and the box's "
                "answer to a query of "
                f"{queries.length} tokens is not such a mean",
                Counterexample(tokens, answers[worst], nearest, "not a mean of the values"),
            )

    def scale(self, anchor: Float[Array, " d"], natural: float, longest: float) -> float | None:
        """|probe · score · anchor| of one probe and one unit anchor, to a digit or better.

        Asks one query after another until a score is seen: None if there is none to see.
        """
        length, value = min(natural, longest), self.linear.at(anchor[None])
        far = 2.0**20  # step of the anchor's length where no score is seen at all
        grow = 2.0**3 if self.noise.relative > SHORT else far  # numbers of float16 end at 65504
        unseen, saturated = 0.0, np.inf  # lengths known to be too short, too long
        groups, clearest = np.zeros(1, dtype=np.int64), (-1.0, 0.0, 0.0)
        # six probes must show nothing before a score is called zero
        others = np.arange(1, min(6, self.probes.count // self.probes.group))
        growths = 3  # beyond grow**growths times the natural length, an unseen score is called zero
        narrow = 4.0  # the useful lengths may be few: no point in looking between closer bounds
        hardly_seen = 3.0  # in standard errors: a score below this may be noise
        for _ in range(ROUNDS):
            token, rows = ArrayBank(length * anchor[None]), np.zeros_like(groups)
            found = self.ask(token, 1, rows, groups, np.repeat(length * value, len(groups), axis=0))
            members = groups[:, None] * self.probes.group + np.arange(self.probes.group)
            usable = ~found.saturated
            score = np.abs(found.scores - self.probes.bias[members])[usable]
            errors = found.errors[usable]
            if usable.any():
                size = float(np.sqrt(np.mean(np.maximum(score, errors) ** 2)) / length)
                clearest = max(clearest, (float((score / errors).max()), size, length))
                if clearest[0] > UNSEEN:
                    return clearest[1]
                alone = len(groups) == 1
                if saturated < narrow * length or not (alone or np.isfinite(saturated)):
                    nothing = clearest[0] < hardly_seen and usable.all()
                    if not nothing or np.isfinite(longest) or grow < far:
                        return clearest[1]  # a bound: a short format may hide one score of many
                    if not len(others):
                        return None  # nothing at any length
                    # one score of many may be small by chance: look at others
                    groups, others = others, others[:0]
                    length, unseen, saturated = clearest[2], 0.0, np.inf
                    continue
                unseen = length
                if length >= longest:  # longer tokens might show it: all that is known is a bound
                    return float(np.max(errors) / length)
                if length >= natural * grow**growths:
                    return None
            else:
                saturated = length
            length = min(_next_length(length, unseen, saturated, grow), longest)
        raise IllConditioned("at every length of the tokens, one token takes all the attention")


def _next_length(length: float, unseen: float, saturated: float, grow: float) -> float:
    """Between a length that is too short and one that is too long, or beyond the one known."""
    if unseen > 0 and np.isfinite(saturated):
        return float(np.sqrt(unseen * saturated))
    return length * (SHRINK if unseen == 0 else grow)
