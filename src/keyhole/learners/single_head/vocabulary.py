"""One softmax head through a finite vocabulary: only known tokens may be asked.

Statement.  A head over R^d is recovered exactly from d + 1 + d² queries of one and two tokens of
            a vocabulary whose tokens are d + 1 affinely independent ones at least (an offset costs
            nothing more, a key bias d more). A few per cent more replace saturated answers.
Queries.  [t_a]: value and offset (token_values). [t_a; t_b] (token_pairs): for d
            anchors t_b, d tokens t_a each. One or two queries at a (d+1)-th anchor, predicted by
            the others, tell whether there is a key bias.
Algebra.    Each anchor's column k = score t_b + key_bias from d differences t_a − t_b; then
            score = K X⁻¹ (with a key bias: [score key_bias] = K [X; 1]⁻¹).
Fails.      Tokens in a flat of lower dimension: only the score between directions of the flat is
            determined (NotIdentifiable). Scores too large for the box's precision between all
            tokens, and no scale to turn: IllConditioned.
Source.     Theorem 4.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Anchors" (2026), whose queries are differences of two tokens; the design is ours.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import qr

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import IllConditioned, InvalidArgument, NotIdentifiable
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head.one_head import floor, shaped_head
from keyhole.learners.single_head.token_pairs import CAUTION, OVERFLOW, Column, TokenPairs
from keyhole.learners.single_head.token_sets import token_pool
from keyhole.learners.single_head.token_values import UNSEEN, TokenValues, measure_token_values
from keyhole.oracles.base import Oracle

PILOT = 8  # queries from which the scale of the score is learned
PILOT_ROUNDS = 12
TOO_LARGE = 8.0  # step of the scale where every pilot answer was saturated
RESCALE = 3.0  # a scale off by more is worth a new plan
SATURATED_SCORE = 36.0  # about what float64 can show: a saturated answer says "at least this"
QUARTILE = 0.6745  # median of |s| over its root mean square, s normal
SPARE = 0.03  # of the queries, for replacing imprecise ones
WORTH = 8.0  # a replacement is worth it if it removes this many average shares of the variance
ROUNDS = 12  # of replacements
GROWTH = 1.5  # of the blocks of anchors: each block is forecast by those before
BIAS_QUERIES = 2
BIAS_SPARE = 0.25  # of the width: replacements once a key bias was measured


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
    pool = token_pool(np.asarray(table, dtype=np.float64), rng)
    return _Run(oracle, pool).run()


@dataclass(eq=False)
class _Run:
    """The state of one recovery."""

    oracle: Oracle
    tokens: Float[Array, "m d"]
    columns: list[Column] = field(default_factory=list)
    scale: float = 0.0  # root mean square of an entry of the score

    @property
    def width(self) -> int:
        return int(self.tokens.shape[1])

    def run(self) -> Hypothesis:
        self.scale = 1.0 / np.sqrt(self.width)  # the natural guess, as for unbounded tokens
        lengths = np.linalg.norm(self.tokens, axis=1)
        # an entry for the key bias, of the size of the others, to forecast with
        one = max(float(np.median(lengths)) / np.sqrt(self.width), TINY)
        self.anchors = np.hstack([self.tokens, np.full((len(self.tokens), 1), one)])
        anchors = self._spanning(1.0 / self._costs())
        self.known = measure_token_values(self.oracle, self.tokens, anchors)
        if not self.known.value.any():
            raise NotIdentifiable(
                "the value map is zero: the box answers the same to every sequence, so nothing of "
                "its score matrix can be seen"
            )
        self.pairs = TokenPairs(self.oracle, self.tokens, self.known)
        anchors = self._calibrate(anchors)
        self._measure(anchors[: self.width])
        self._improve(int(SPARE * self.width**2))
        bias_error = self._look_for_bias(int(anchors[self.width]))
        if len(self.columns) > self.width:
            self._improve(int(BIAS_SPARE * self.width))
        return self._hypothesis(bias_error)

    def _spanning(self, weights: Float[Array, " m"]) -> Int[Array, " n"]:
        """d independent tokens of large weight, and one that is affinely independent of them."""
        order = qr((self.tokens * weights[:, None]).T, mode="r", pivoting=True)[1]
        first = order[: self.width]
        share = self.tokens @ np.linalg.inv(self.tokens[first])
        lever = np.abs(1.0 - share.sum(axis=1)) / np.sqrt(1.0 + np.sum(share**2, axis=1))
        lever[first] = 0.0
        return np.append(first, np.argmax(lever)).astype(np.int64)

    def _prior(self, number: int) -> Column:
        """A column as the columns known so far predict it."""
        anchor = self.anchors[number]
        done = [column for column in self.columns if not column.missing]
        if not done:
            size = self.scale * float(np.linalg.norm(anchor))
            return Column(self.pairs, number, np.zeros(self.width), size)
        rows = self.anchors[[column.anchor for column in done]]
        share = np.linalg.lstsq(rows.T, anchor, rcond=None)[0]
        rest = anchor - share @ rows
        mean = share @ np.stack([column.estimate for column in done])
        noise = np.sqrt(
            sum(s**2 * np.trace(c.covariance) for s, c in zip(share, done, strict=True))
        )
        size = self.scale * float(np.linalg.norm(rest)) + float(noise) / np.sqrt(self.width)
        return Column(self.pairs, number, mean, size)

    def _calibrate(self, anchors: Int[Array, " n"]) -> Int[Array, " n"]:
        """The scale of the score from a few answers at the first anchor, and a plan that fits."""
        for _ in range(PILOT_ROUNDS):
            column = self._prior(int(anchors[0]))
            probes = column.first_probes()[:PILOT]
            found = self.pairs.ask(probes, np.full(len(probes), anchors[0]), "score")
            column.add(probes, found)
            size = np.where(found.saturated, SATURATED_SCORE, np.abs(found.scores))
            steps = np.linalg.norm(column.steps(probes), axis=1)
            ratio = size / (steps * np.linalg.norm(self.anchors[anchors[0]]))
            scale = max(float(np.median(ratio)) / QUARTILE, TINY)
            old, self.scale = self.scale, scale
            if found.saturated.mean() > 0.5:
                self.scale = max(scale, TOO_LARGE * old)
            elif old / RESCALE < scale < old * RESCALE:
                self.columns.append(column)
                return anchors
            anchors = self._spanning(1.0 / self._costs())
            if found.saturated.mean() <= 0.5:
                return anchors
        raise IllConditioned(
            "in every pair of tokens one takes all the attention: the scores between the tokens "
            "of the vocabulary are too large for the box's precision"
        )

    def _costs(self) -> Float[Array, " m"]:
        """For each token as an anchor, the error of its column: by how much the logistic of the
        scores with the tokens around it loses, over how far these are."""
        count = len(self.tokens)
        enough = min(2 * self.width, count - 1)  # the anchor itself is the nearest
        square = np.sum(self.tokens**2, axis=1)
        distance = square[:, None] + square - 2.0 * self.tokens @ self.tokens.T
        near = np.sqrt(np.maximum(np.partition(distance, enough, axis=1)[:, enough], 0.0))
        reach = CAUTION * self.scale * near * np.linalg.norm(self.anchors, axis=1)
        return np.exp(np.minimum(reach - reach.min(), OVERFLOW)) / np.maximum(near, TINY)

    def _measure(self, anchors: Int[Array, " d"]) -> None:
        """Columns in blocks that double: each block is forecast by those before."""
        started = {column.anchor: column for column in self.columns}
        self.columns, start, block = [], 0, 1
        while start < len(anchors):
            fresh = [
                started.get(int(anchor)) or self._prior(int(anchor))
                for anchor in anchors[start : start + block]
            ]
            self._ask([(c, self._remaining(c)) for c in fresh])
            self._complete(fresh)
            self.columns += fresh
            self._learn_scale()
            start, block = start + len(fresh), max(1, round(GROWTH * block))

    def _remaining(self, column: Column) -> Int[Array, " n"]:
        """The first choice of tokens, less what was asked already."""
        first = column.first_probes()
        return first[~np.isin(first, column.spent)][: self.width - len(column.probes)]

    def _ask(self, wanted: list[tuple[Column, Array]], purpose: str = "score") -> None:
        """One batch; every column gets its own answers."""
        wanted = [(column, probes) for column, probes in wanted if len(probes)]
        if not wanted:
            return
        first = np.concatenate([probes for _, probes in wanted])
        anchor = np.concatenate([np.full(len(probes), c.anchor) for c, probes in wanted])
        found = self.pairs.ask(first, anchor, purpose)
        start = 0
        for column, probes in wanted:
            part = slice(start, start + len(probes))
            column.add(
                probes,
                type(found)(found.scores[part], found.errors[part], found.saturated[part]),
            )
            start += len(probes)

    def _complete(self, columns: list[Column], purpose: str = "score") -> None:
        """Replaces saturated answers until every column is determined."""
        for _ in range(ROUNDS):
            open_ones = [column for column in columns if column.missing]
            if not open_ones:
                return
            self._ask([(c, c.best_probes(c.missing)[0]) for c in open_ones], purpose)
        if any(column.missing for column in columns):
            raise IllConditioned(
                "the scores of an anchor with the tokens of the vocabulary are saturated in too "
                "many directions for the box's precision"
            )

    def _learn_scale(self) -> None:
        sizes = [
            float(np.sum(c.estimate**2)) / float(np.sum(self.anchors[c.anchor] ** 2))
            for c in self.columns
        ]
        self.scale = max(float(np.sqrt(np.mean(sizes) / self.width)), TINY)

    def _inverse(self) -> Float[Array, "n n"]:
        """Takes the columns (as rows) to the score, and with one column more to the key bias."""
        table = self.tokens[[column.anchor for column in self.columns]]
        if len(table) > self.width:
            table = np.hstack([table, np.ones((len(table), 1))])
        return np.linalg.inv(table)

    def _improve(self, spare: int) -> None:
        """Replaces the measurements that carry most of the score's variance."""
        weight = np.sum(self._inverse() ** 2, axis=0)
        for _ in range(ROUNDS):
            share = np.array([np.trace(c.covariance) for c in self.columns]) * weight
            best = [column.best_probes(1) for column in self.columns]
            gain = np.array([g for _, g in best]) * weight
            worth = np.flatnonzero(gain > WORTH * share.sum() / self.width**2)
            worth = worth[np.argsort(-gain[worth], kind="stable")][:spare]
            if not len(worth):
                return
            self._ask([(self.columns[k], best[k][0]) for k in worth])
            spare -= len(worth)

    def _look_for_bias(self, extra: int) -> Float[Array, " d"]:
        """Compares a further anchor with what the others predict for it. A key bias shows as a
        difference, and the anchor's column is then measured in full; else, its standard error."""
        share = self.tokens[extra] @ self._inverse()
        mean = share @ np.stack([column.estimate for column in self.columns])
        spread = sum(s**2 * c.covariance for s, c in zip(share, self.columns, strict=True))
        test = Column(self.pairs, extra, mean, 0.0)
        probes = test.first_probes()[:BIAS_QUERIES]
        found = self.pairs.ask(probes, np.full(len(probes), extra), "key bias")
        steps = test.steps(probes)
        lengths = np.linalg.norm(steps, axis=1)
        error = np.sqrt(found.errors**2 + np.einsum("nd,de,ne->n", steps, spread, steps))
        gap = np.abs(found.scores - steps @ mean)
        if (gap > UNSEEN * error).any():
            column = self._prior(extra)
            column.deviation = max(column.deviation, float(np.max(gap / lengths)))
            column.add(probes, found)
            self._ask([(column, self._remaining(column))], "key bias")
            self._complete([column], "key bias")
            self.columns.append(column)
        lever = max(abs(1.0 - float(share.sum())), TINY)
        return np.full(self.width, np.sqrt(np.mean((error / lengths) ** 2)) / lever)

    def _hypothesis(self, bias_error: Float[Array, " d"]) -> Hypothesis:
        """`bias_error` holds where no key bias was found."""
        width, inverse = self.width, self._inverse()
        solution = inverse @ np.stack([column.estimate for column in self.columns])
        variance = np.stack([np.diag(column.covariance) for column in self.columns])
        errors = np.sqrt(inverse**2 @ variance)
        bias = np.zeros(width)
        if len(self.columns) > width:
            bias, bias_error = solution[width], errors[width]
        score, score_error = solution[:width].T, errors[:width].T
        return assemble(
            self.known,
            np.ascontiguousarray(score),
            np.ascontiguousarray(score_error),
            bias,
            bias_error,
        )


def assemble(
    known: TokenValues, score: Array, score_error: Array, bias: Array, bias_error: Array
) -> Hypothesis:
    """The hypothesis in the shape of the box's answers."""
    model = shaped_head(known.scalar, score, bias, known.value, known.offset)
    return Hypothesis(
        model,
        shaped_head(known.scalar, score_error, bias_error, known.value_error, known.offset_error),
        floor(model, score.size),
        details={"precision": known.kind.name},
    )
