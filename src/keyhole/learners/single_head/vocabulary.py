"""One softmax head through a finite vocabulary: only known tokens may be asked.

Statement.  A head over R^d is recovered exactly from d + 1 + d² queries of one and two tokens of
            a vocabulary whose tokens are d + 1 affinely independent ones at least (an offset costs
            nothing more, a key bias d more). A few per cent more replace saturated answers.
Queries.    [t_a]: value and offset from d + 1 affinely independent tokens. [t_a; t_b]: for d
            anchors t_b, d tokens t_a each. One or two queries at a (d+1)-th anchor, predicted by
            the others, tell whether there is a key bias.
Algebra.    With u = t_a − t_b and x = t_b the answer to a pair is

                f([t_b]) + σ(s) (f([t_a]) − f([t_b])),   s = u · (score x + key_bias)

            Each anchor's column k = score t_b + key_bias from d differences t_a − t_b; then
            score = K X⁻¹ (with a key bias: [score key_bias] = K [X; 1]⁻¹).
            Tokens cannot be rescaled, so the operating point is a matter of choice. Which t_a to
            put to an anchor t_b is an experimental design: what is known of the column (first a
            prior, then what the answers say) predicts every score and with it the error of every
            measurement. The first d tokens are a D-optimal set under that forecast (pivoted QR of
            u / error); what came out saturated or imprecise is replaced by the token that shrinks
            the column's variance most.
Fails.      Tokens in a flat of lower dimension: only the score between directions of the flat is
            determined (NotIdentifiable). Scores too large for the box's precision between all
            tokens, and no scale to turn: IllConditioned.
Source.     Theorem 4.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026), whose queries are differences of two tokens; the design is ours.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.linalg import qr
from scipy.special import expit

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import (
    Counterexample,
    IllConditioned,
    InvalidArgument,
    NotIdentifiable,
    WrongFamily,
)
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head.hypothesis import Parameters, SingleHeadDiagnostics, assemble
from keyhole.measurement.linear_response import answer_noise
from keyhole.measurement.noise import noise_of_type, recognise_format
from keyhole.oracles.base import Domain, Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ArrayBank, QueryBatch

UNSEEN = 16.0  # standard errors below which an offset or a key bias is called zero
CAUTION = 1.5  # standard deviations of a forecast score that a replacement allows for
OVERFLOW = 300.0  # log-odds beyond are cut in forecasts: their error is as good as infinite
REPAIR_ROUNDS = 12  # rounds of calibration, of completion and of replacements


def learn_from_vocabulary(
    oracle: Oracle, rng: np.random.Generator, tokens: Float[Array, "m d"] | None = None
) -> Hypothesis:
    """Recovers one head asking tokens of the domain's vocabulary (or of `tokens`) only."""
    table = oracle.spec.domain.vocabulary if tokens is None else tokens
    if table is None:
        raise InvalidArgument("the box declares no vocabulary: pass vocabulary= or tokens=")
    longest = oracle.spec.domain.max_length
    if longest is not None and longest < 2:
        raise NotIdentifiable("queries of one token say nothing about the score matrix")
    pool = choose_pool(np.asarray(table, dtype=np.float64), rng)
    width = pool.shape[1]
    scale = 1.0 / np.sqrt(width)  # the natural guess, as for unbounded tokens
    anchors = choose_anchors(pool, scale)
    known = measure_token_values(oracle, pool, anchors)
    if not known.value.any():
        raise NotIdentifiable(
            "the value map is zero: the box answers the same to every sequence, so nothing of "
            "its score matrix can be seen"
        )
    work = _Columns(TokenPairs(oracle, pool, known), scale)
    anchors = work.calibrate(anchors)
    work.measure(anchors[:width])
    work.improve(int(0.03 * width**2))  # three per cent more replace imprecise measurements
    bias_error = work.look_for_bias(int(anchors[width]))
    if len(work.columns) > width:
        work.improve(width // 4)
    return work.assemble(bias_error)


# -- which tokens ------------------------------------------------------------------------------


def choose_pool(table: Float[Array, "m d"], rng: np.random.Generator) -> Float[Array, "n d"]:
    """Distinct tokens, at most about `pool`, that span affinely; NotIdentifiable if none do."""
    table = np.unique(table + 0.0, axis=0)
    width = table.shape[1]
    centred = table - table.mean(axis=0)
    upper, order = qr(centred.T, mode="r", pivoting=True)
    depth = np.abs(np.diag(upper))
    # A direction that the tokens span no further than 1e-11 of their extent is not spanned.
    dimension = int(np.sum(depth > 1e-11 * max(float(depth.max(initial=0.0)), TINY)))
    if dimension < width:
        raise NotIdentifiable(
            f"the {len(table)} distinct tokens of the vocabulary lie in a flat of dimension "
            f"{dimension} of {width}: scores between directions of that flat are determined, and "
            f"nothing is of the other {width - dimension}. {width + 1} affinely independent "
            "tokens are needed"
        )
    pool = 1024  # tokens considered for a design: more cost time and hardly improve it
    if len(table) <= pool:
        return table
    chosen = np.union1d(order[: 2 * width], rng.choice(len(table), size=pool, replace=False))
    return table[chosen]


def sample_vocabulary(
    domain: Domain, width: int, rng: np.random.Generator, count: int
) -> Float[Array, "n d"]:
    """Random tokens inside a domain without room around zero, at many distances from each other.

    Half of them fill the domain, the others crowd around its middle, down to a thousandth of it:
    near tokens are what keeps scores in range where a box's tokens are long.
    """
    if domain.vocabulary is not None:
        return np.asarray(domain.vocabulary, dtype=np.float64)
    reach = domain.max_norm if domain.max_norm is not None else np.sqrt(width)
    low = domain.low if domain.low is not None else min(-reach, (domain.high or 0.0) - reach)
    high = domain.high if domain.high is not None else max(reach, low + reach)
    corner = np.full(width, np.clip(0.0, low, high))  # the token nearest to zero
    distance = np.ones(count)
    near = count // 2
    distance[:near] = 2.0 ** -rng.uniform(0.0, 10.0, size=near)
    middle = (corner + domain.drawn_in(np.full((1, width), (low + high) / 2))[0]) / 2
    spread = distance[:, None] * (rng.uniform(low, high, size=(count, width)) - middle)
    return domain.drawn_in(middle + spread)


def extend_anchors(tokens: Float[Array, "m d"]) -> Float[Array, "m e"]:
    """An entry for the key bias, of the size of the others, to forecast with."""
    width = tokens.shape[1]
    one = max(float(np.median(np.linalg.norm(tokens, axis=1))) / np.sqrt(width), TINY)
    return np.hstack([tokens, np.full((len(tokens), 1), one)])


def choose_anchors(tokens: Float[Array, "m d"], scale: float) -> Int[Array, " n"]:
    """d independent tokens whose columns can be measured well, and one that is affinely
    independent of them. `scale` is the root mean square of an entry of the score.

    The error of an anchor's column is forecast: by how much the logistic of the scores with the
    tokens around it loses, over how far these are.
    """
    width, count = tokens.shape[1], len(tokens)
    enough = min(2 * width, count - 1)  # the anchor itself is the nearest
    square = np.sum(tokens**2, axis=1)
    distance = square[:, None] + square - 2.0 * tokens @ tokens.T
    near = np.sqrt(np.maximum(np.partition(distance, enough, axis=1)[:, enough], 0.0))
    reach = CAUTION * scale * near * np.linalg.norm(extend_anchors(tokens), axis=1)
    costs = np.exp(np.minimum(reach - reach.min(), OVERFLOW)) / np.maximum(near, TINY)
    order = qr((tokens / costs[:, None]).T, mode="r", pivoting=True)[1]
    first = order[:width]
    share = tokens @ np.linalg.inv(tokens[first])
    lever = np.abs(1.0 - share.sum(axis=1)) / np.sqrt(1.0 + np.sum(share**2, axis=1))
    lever[first] = 0.0
    return np.append(first, np.argmax(lever)).astype(np.int64)


# -- single tokens -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenValues:
    """What single tokens tell. `answers` are those of all tokens, asked or predicted."""

    value: Float[Array, "d D"]
    value_error: Float[Array, "d D"]
    offset: Float[Array, " D"]
    offset_error: Float[Array, " D"]
    answers: Float[Array, "m D"]
    errors: Float[Array, "m D"]  # standard errors of these
    sizes: Float[Array, "m D"]  # of the terms that the box adds up for them
    scalar: bool
    noise: NoiseModel

    def answer_error(self, size: Float[Array, "n D"]) -> Float[Array, "n D"]:
        return _answer_error(self.noise, len(self.value), size)


def _answer_error(noise: NoiseModel, width: int, size: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """Standard error of an answer: what the box's arithmetic loses of terms of this size, and what
    is added on top. (The terms' root sum of squares exceeds the answer: a measured factor.)"""
    return np.hypot(0.45 * answer_noise(noise, width) * size, noise.error_floor)


def measure_token_values(
    oracle: Oracle, tokens: Float[Array, "m d"], chosen: Int[Array, " n"]
) -> TokenValues:
    """Asks the d + 1 chosen tokens; the first d of them span. Where these predict the answer to
    the last one, there is no offset."""
    width = tokens.shape[1]
    raw = oracle.ask(QueryBatch(ArrayBank(tokens), chosen[:, None], "value"))
    noise = recognise_format(noise_of_type(oracle.spec.precision, raw), raw)
    asked = np.asarray(raw, dtype=np.float64).reshape(width + 1, -1)
    # without an offset: d tokens, and the last one as a test
    basis, last = tokens[chosen[:width]], tokens[chosen[width]]
    inverse = np.linalg.inv(basis)
    value = solve_exactly(basis, asked[:width])
    sizes = _term_sizes(tokens, value, asked, chosen)
    error = _answer_error(noise, width, sizes[chosen])
    share = last @ inverse
    gap = asked[width] - last @ value
    gap_error = np.sqrt(share**2 @ error[:width] ** 2 + error[width] ** 2)
    offset, lever = np.zeros(asked.shape[1]), abs(1.0 - float(share.sum()))
    offset_error = gap_error / max(lever, TINY)
    value_error = np.sqrt(inverse**2 @ error[:width] ** 2)
    coordinates = tokens @ inverse
    if (np.abs(gap) > UNSEEN * gap_error).any():
        basis = np.hstack([tokens[chosen], np.ones((width + 1, 1))])
        inverse, solution = np.linalg.inv(basis), solve_exactly(basis, asked)
        value, offset = solution[:width], solution[width]
        sizes = np.hypot(_term_sizes(tokens, value, asked, chosen), np.abs(offset))
        error = _answer_error(noise, width, sizes[chosen])
        errors = np.sqrt(inverse**2 @ error**2)
        value_error, offset_error = errors[:width], errors[width]
        coordinates = np.hstack([tokens, np.ones((len(tokens), 1))]) @ inverse
    answers = tokens @ value + offset
    spread = np.sqrt(coordinates**2 @ error[: coordinates.shape[1]] ** 2)
    answers[chosen], spread[chosen] = asked, error
    return TokenValues(
        value=value,
        value_error=value_error,
        offset=offset,
        offset_error=offset_error,
        answers=answers,
        errors=spread,
        sizes=sizes,
        scalar=raw.ndim == 1,
        noise=noise,
    )


def solve_exactly(matrix: Float[Array, "n n"], right: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """Solves, with one step of refinement in longer arithmetic: a moderately conditioned choice
    of tokens then costs none of the answers' digits."""
    solution = np.linalg.solve(matrix, right)
    rest = right - matrix.astype(np.longdouble) @ solution.astype(np.longdouble)
    return np.asarray(solution + np.linalg.solve(matrix, rest.astype(np.float64)))


def _term_sizes(tokens: Array, value: Array, asked: Array, chosen: Array) -> Array:
    """Root sum of squares of the terms t_i value_i: the scale of the box's rounding."""
    sizes = np.sqrt(tokens**2 @ value**2)
    sizes[chosen] = np.maximum(sizes[chosen], np.abs(asked))
    return sizes


# -- pairs -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PairScores:
    """Scores of a batch, their standard errors, and which of them say nothing."""

    scores: Float[Array, " n"]
    errors: Float[Array, " n"]
    saturated: Array

    def part(self, which: slice) -> "PairScores":
        return PairScores(self.scores[which], self.errors[which], self.saturated[which])


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
        saturated = low <= 4.0  # a weight below so many standard errors carries no information
        weight, own = np.maximum(weight, fuzz), np.maximum(own, own_fuzz)
        errors = np.sqrt((answer / (weight * own)) ** 2 + (other / weight) ** 2 + (one / own) ** 2)
        return PairScores(np.log(weight / own), errors, saturated)

    def _errors(self, first: Array, anchor: Array) -> tuple[Array, Array, Array]:
        """Standard errors of the answer and of the two tokens' own, in units of the swing. Exact
        answers happen, exactness does not."""
        known = self.known
        swing = known.answers[first] - known.answers[anchor]
        length = np.maximum(np.linalg.norm(swing, axis=1), TINY)
        size = np.maximum(known.sizes[first], known.sizes[anchor])
        parts = (known.answer_error(size), known.errors[first], known.errors[anchor])
        direction = np.abs(swing) / length[:, None]
        faint = 2.0**-200 + TINY
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
        """Weights in units of their error: 1e4 of them below zero are no rounding."""
        worst = int(np.argmin(low))
        if low[worst] >= -1e4:
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


# -- columns -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Column:
    """What is known of k = score x + key_bias for one anchor x: a forecast, and measurements."""

    pairs: TokenPairs
    anchor: int
    mean: Float[Array, " d"]  # the forecast,
    deviation: float  # and its standard error in every direction
    probes: Int[Array, " n"]  # tokens measured,
    scores: Float[Array, " n"]
    errors: Float[Array, " n"]
    spent: Int[Array, " m"]  # and those not worth asking (again)

    @classmethod
    def forecast(
        cls, pairs: TokenPairs, anchor: int, mean: Float[Array, " d"], deviation: float
    ) -> "Column":
        nothing = np.zeros(0)
        probes, spent = np.zeros(0, dtype=np.int64), np.array([anchor])
        return cls(pairs, anchor, mean, deviation, probes, nothing, nothing, spent)

    def add(self, probes: Int[Array, " n"], found: PairScores) -> "Column":
        """With these measurements, as far as they are not saturated."""
        good = ~found.saturated
        return replace(
            self,
            spent=np.union1d(self.spent, probes),
            probes=np.concatenate([self.probes, probes[good]]),
            scores=np.concatenate([self.scores, found.scores[good]]),
            errors=np.concatenate([self.errors, found.errors[good]]),
        )

    def steps(self, probes: Array) -> Float[Array, "n d"]:
        return self.pairs.tokens[probes] - self.pairs.tokens[self.anchor]

    def first_probes(self) -> Int[Array, " d"]:
        """d tokens, best first, that determine the column with the least volume of error. Three
        standard deviations are allowed for: the steepest of d scores counts."""
        tokens = np.arange(len(self.pairs.tokens))
        steps = self.steps(tokens)
        reach = 3.0 * self.deviation * np.linalg.norm(steps, axis=1)
        scaled = steps / self._forecast(tokens, steps @ self.mean, reach)[:, None]
        scaled[self.anchor] = 0.0
        order = qr(scaled.T, mode="r", pivoting=True)[1]
        return np.asarray(order[: steps.shape[1]], dtype=np.int64)

    def remaining_probes(self) -> Int[Array, " n"]:
        """The first choice of tokens, less what was asked already."""
        first = self.first_probes()
        return first[~np.isin(first, self.spent)][: len(self.mean) - len(self.probes)]

    def best_probes(self, count: int) -> tuple[Int[Array, " n"], float]:
        """The tokens that shrink the trace of the covariance most, and by how much the first."""
        tokens = np.setdiff1d(np.arange(len(self.pairs.tokens)), self.spent)
        if not len(tokens):
            return tokens, 0.0
        steps, covariance = self.steps(tokens), self.covariance.copy()
        middle, chosen, gains = steps @ self.estimate, [], []
        # what rounding leaves of a variance when all of it is explained
        floor = 1e-13 * float(np.trace(covariance)) * np.sum(steps**2, axis=1)
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

    def _forecast(self, tokens: Array, middle: Array, reach: Array) -> Array:
        anchors = np.full(len(tokens), self.anchor)
        return self.pairs.forecast(tokens, anchors, middle - reach, middle + reach)

    @property
    def estimate(self) -> Float[Array, " d"]:
        return self._solution[0]

    @property
    def covariance(self) -> Float[Array, "d d"]:
        return self._solution[1]

    @property
    def missing(self) -> int:
        """Directions that no measurement tells."""
        return self._solution[2]

    @cached_property
    def _solution(self) -> tuple[Float[Array, " d"], Float[Array, "d d"], int]:
        """A best set of independent measurements, solved exactly; the forecast where there is none.

        The measurements left out are those that better ones replaced. Weights differ by many
        decades here: a square system keeps the digits that normal equations would lose.
        """
        steps, width = self.steps(self.probes), len(self.mean)
        used = np.zeros(0, dtype=np.int64)
        if len(steps):
            scaled = steps / self.errors[:, None]
            order = qr(scaled.T, mode="r", pivoting=True)[1]
            upper = qr((steps[order] / np.linalg.norm(steps[order], axis=1)[:, None]).T, mode="r")
            depth = np.abs(np.diag(upper[0]))
            used = order[: len(depth)][depth > 1e-7]  # a token closer to the others' span is in it
        rows, rest = steps[used], self.scores[used] - steps[used] @ self.mean
        inverse = np.linalg.pinv(rows) if len(used) else np.zeros((width, 0))
        estimate = self.mean + inverse @ rest
        if len(used) == width:  # a step of refinement: the last digits matter
            estimate = estimate + inverse @ (self.scores[used] - rows @ estimate)
        unseen = np.eye(width) - inverse @ rows if len(used) < width else np.zeros((width, width))
        factor = inverse * self.errors[used]
        covariance = factor @ factor.T + self.deviation**2 * (unseen @ unseen.T)
        return estimate, covariance, width - len(used)


class _Columns:
    """The columns of one score while they are measured."""

    def __init__(self, pairs: TokenPairs, scale: float) -> None:
        self.pairs, self.tokens = pairs, pairs.tokens
        self.anchors = extend_anchors(pairs.tokens)
        self.columns: list[Column] = []
        self.scale = scale  # root mean square of an entry of the score

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    def predict(self, number: int) -> Column:
        """A column as the columns known so far predict it."""
        anchor = self.anchors[number]
        done = [column for column in self.columns if not column.missing]
        if not done:
            size = self.scale * float(np.linalg.norm(anchor))
            return Column.forecast(self.pairs, number, np.zeros(self.width), size)
        rows = self.anchors[[column.anchor for column in done]]
        share = np.linalg.lstsq(rows.T, anchor, rcond=None)[0]
        rest = anchor - share @ rows
        mean = share @ np.stack([column.estimate for column in done])
        noise = np.sqrt(
            sum(s**2 * np.trace(c.covariance) for s, c in zip(share, done, strict=True))
        )
        size = self.scale * float(np.linalg.norm(rest)) + float(noise) / np.sqrt(self.width)
        return Column.forecast(self.pairs, number, mean, size)

    def calibrate(self, anchors: Int[Array, " n"]) -> Int[Array, " n"]:
        """The scale of the score from eight answers at the first anchor, and a plan that fits."""
        for _ in range(REPAIR_ROUNDS):
            column = self.predict(int(anchors[0]))
            probes = column.first_probes()[:8]
            found = self.pairs.ask(probes, np.full(len(probes), anchors[0]), "score")
            # A saturated answer says "at least what float64 can show".
            size = np.where(found.saturated, 36.0, np.abs(found.scores))
            steps = np.linalg.norm(column.steps(probes), axis=1)
            ratio = size / (steps * np.linalg.norm(self.anchors[anchors[0]]))
            normal = 0.6745  # median of |s| over its root mean square, s normal
            scale = max(float(np.median(ratio)) / normal, TINY)
            old, self.scale = self.scale, scale
            if found.saturated.mean() > 0.5:
                self.scale = max(scale, 8.0 * old)
            elif old / 3.0 < scale < 3.0 * old:  # not worth a new plan
                self.columns.append(column.add(probes, found))
                return anchors
            anchors = choose_anchors(self.tokens, self.scale)
            if found.saturated.mean() <= 0.5:
                return anchors
        raise IllConditioned(
            "in every pair of tokens one takes all the attention: the scores between the tokens "
            "of the vocabulary are too large for the box's precision"
        )

    def measure(self, anchors: Int[Array, " d"]) -> None:
        """Columns in blocks that grow by half: each block is forecast by those before."""
        started = {column.anchor: column for column in self.columns}
        self.columns, start, block = [], 0, 1
        while start < len(anchors):
            fresh = [
                started.get(int(anchor)) or self.predict(int(anchor))
                for anchor in anchors[start : start + block]
            ]
            fresh = self._ask(fresh, [column.remaining_probes() for column in fresh])
            self.columns += self._complete(fresh)
            sizes = [
                float(np.sum(c.estimate**2)) / float(np.sum(self.anchors[c.anchor] ** 2))
                for c in self.columns
            ]
            self.scale = max(float(np.sqrt(np.mean(sizes) / self.width)), TINY)
            start, block = start + len(fresh), max(1, round(1.5 * block))

    def _ask(
        self, columns: list[Column], probes: list[Array], purpose: str = "score"
    ) -> list[Column]:
        """One batch; every column gets its own answers."""
        first = np.concatenate(probes)
        if not len(first):
            return columns
        anchor = np.repeat([column.anchor for column in columns], [len(part) for part in probes])
        found, start, updated = self.pairs.ask(first, anchor, purpose), 0, []
        for column, part in zip(columns, probes, strict=True):
            answers = found.part(slice(start, start + len(part)))
            updated.append(column.add(part, answers) if len(part) else column)
            start += len(part)
        return updated

    def _complete(self, columns: list[Column], purpose: str = "score") -> list[Column]:
        """Replaces saturated answers until every column is determined."""
        for _ in range(REPAIR_ROUNDS):
            if not any(column.missing for column in columns):
                return columns
            none = np.zeros(0, dtype=np.int64)
            probes = [c.best_probes(c.missing)[0] if c.missing else none for c in columns]
            columns = self._ask(columns, probes, purpose)
        if any(column.missing for column in columns):
            raise IllConditioned(
                "the scores of an anchor with the tokens of the vocabulary are saturated in too "
                "many directions for the box's precision"
            )
        return columns

    def _inverse(self) -> Float[Array, "n n"]:
        """Takes the columns (as rows) to the score, and with one column more to the key bias."""
        table = self.tokens[[column.anchor for column in self.columns]]
        if len(table) > self.width:
            table = np.hstack([table, np.ones((len(table), 1))])
        return np.linalg.inv(table)

    def improve(self, spare: int) -> None:
        """Replaces the measurements that carry most of the score's variance: a replacement is
        worth a query if it removes eight average shares of the variance."""
        weight = np.sum(self._inverse() ** 2, axis=0)
        for _ in range(REPAIR_ROUNDS):
            share = np.array([np.trace(c.covariance) for c in self.columns]) * weight
            best = [column.best_probes(1) for column in self.columns]
            gain = np.array([g for _, g in best]) * weight
            worth = np.flatnonzero(gain > 8.0 * share.sum() / self.width**2)
            worth = worth[np.argsort(-gain[worth], kind="stable")][:spare]
            if not len(worth):
                return
            updated = self._ask([self.columns[k] for k in worth], [best[k][0] for k in worth])
            for k, column in zip(worth, updated, strict=True):
                self.columns[k] = column
            spare -= len(worth)

    def look_for_bias(self, extra: int) -> Float[Array, " d"]:
        """Compares a further anchor with what the others predict for it. A key bias shows as a
        difference, and the anchor's column is then measured in full; else, its standard error."""
        share = self.tokens[extra] @ self._inverse()
        mean = share @ np.stack([column.estimate for column in self.columns])
        spread = sum(s**2 * c.covariance for s, c in zip(share, self.columns, strict=True))
        test = Column.forecast(self.pairs, extra, mean, 0.0)
        probes = test.first_probes()[:2]
        found = self.pairs.ask(probes, np.full(len(probes), extra), "key bias")
        steps = test.steps(probes)
        lengths = np.linalg.norm(steps, axis=1)
        error = np.sqrt(found.errors**2 + np.einsum("nd,de,ne->n", steps, spread, steps))
        gap = np.abs(found.scores - steps @ mean)
        if (gap > UNSEEN * error).any():
            column = self.predict(extra)
            deviation = max(column.deviation, float(np.max(gap / lengths)))
            column = replace(column, deviation=deviation).add(probes, found)
            fresh = self._ask([column], [column.remaining_probes()], "key bias")
            self.columns += self._complete(fresh, "key bias")
        lever = max(abs(1.0 - float(share.sum())), TINY)
        return np.full(self.width, np.sqrt(np.mean((error / lengths) ** 2)) / lever)

    def assemble(self, bias_error: Float[Array, " d"]) -> Hypothesis:
        """`bias_error` holds where no key bias was found."""
        width, inverse, known = self.width, self._inverse(), self.pairs.known
        solution = inverse @ np.stack([column.estimate for column in self.columns])
        variance = np.stack([np.diag(column.covariance) for column in self.columns])
        errors = np.sqrt(inverse**2 @ variance)
        bias = np.zeros(width)
        if len(self.columns) > width:
            bias, bias_error = solution[width], errors[width]
        score, score_error = (np.ascontiguousarray(x[:width].T) for x in (solution, errors))
        return assemble(
            known.scalar,
            Parameters(score, bias, known.value, known.offset),
            Parameters(score_error, bias_error, known.value_error, known.offset_error),
            unknowns=score.size,
            diagnostics=SingleHeadDiagnostics(precision=known.noise.name),
        )
