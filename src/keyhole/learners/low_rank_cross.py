"""Low rank by crosses: a column, then a row, then the next column where the rows so far are zero.

Column k is score·ω_k, row k is t_kᵀ·score; from r of each, score = Y (T Y)⁻¹ B with Y the columns,
B the rows and T the t_k. What was measured is never measured again: a column needs only the probes
orthogonal to the t so far, a row only the anchors orthogonal to the ω so far, which makes exactly
2rd − r² questions. Before each column one probe looks at two anchors: where it sees nothing there
is no further column, else the better of the two is taken, for an anchor that happens to be nearly
orthogonal to what is left of the score would cost digits. One question a column, two at the end.

ω_k is random but orthogonal to the rows so far, so that score·ω_k is what is left of the score and
nothing else: it is measured to full relative precision, and errors do not grow from cross to
cross. t_k is the direction of that column: the largest pivot.

With a key bias, probes are shorter along it than across. The score seen by unit directions is then
stretch · score, and that is what the crosses are of; the stretch is taken out at the end. Probes
cannot be made long then, so that the value and the key bias of an anchor cost digits: columns,
whose errors count most, are taken on anchors without either, and only where these show nothing
(more) on the two that are left out.
"""

import numpy as np

from keyhole.algebra.bases import Basis
from keyhole.algebra.range_finder import RangeFinder
from keyhole.arrays import Array, Float
from keyhole.learners.base import Learned
from keyhole.learners.pairs import Pairs, assemble
from keyhole.oracles.questions import Listed
from keyhole.probes.log_odds import TARGET_SPREAD, LogOdds, ProbeSet, Table

CHOICE = 2  # anchors that are looked at before a column: both bad by chance is rare enough
SHRUNK, RECENT = 0.25, 8  # a look that sees less than this share of what the last ones saw
# (their median) is given a second chance
VISIBLE = 12.0  # standard errors of a test from which there is
CANCELLATION = 4.0  # rounding of a column that is zero because its terms cancel, in roundoffs
BIAS_CANCELLATION = 12.0  # and of a key bias whose terms do
MOST_VALUE = 0.9  # share of the value map that one direction may take away from the probes
DECAYING = 1e3  # a last cross this little above what can be seen: the spectrum goes on below
SAMPLES = 3  # probes and anchors for what a search that was stopped leaves out
SAMPLE_SAFETY = 2.0  # and so few entries may all be small by chance
SAME_SPACE = 1e-6  # a row this little outside the directions avoided adds none to them
AVOIDED_SHARE = 0.4  # anchors avoid the rows so far up to this share of the width


class Cross:
    """Crosses of one score matrix, for scalar boxes."""

    def __init__(
        self,
        pairs: Pairs,
        anchors: Basis,
        rng: np.random.Generator,
        rank: int | None,
        tolerance: float,
    ) -> None:
        width = pairs.probes.width
        self.pairs, self.width, self.spread = pairs, width, pairs.scale
        self.rank, self.tolerance, self.rng = rank, tolerance, rng
        everything = np.arange(width)
        self.probes = pairs.probes.basis.rows(everything)  # orthogonal to the t so far
        self.anchors = anchors.rows(everything)  # orthogonal to the ω so far
        self.avoided = _span(pairs.key_bias, pairs.linear.value[:, 0])  # none without a key bias
        self.value = pairs.probes.stretched(pairs.linear.value.T)[0] / pairs.probes.across
        self.t = np.zeros((0, width))
        self.omega = np.zeros((0, width))  # orthonormal
        self.rows = np.zeros((0, width))  # t · score
        self.columns = np.zeros((width, 0))  # score · ω
        self.row_space = RangeFinder(width)  # and the anchors that are avoided
        for direction in self.avoided:
            self.row_space.add(direction)
        self.column_errors: list[float] = []
        self.row_errors: list[float] = []
        self.left_over, self.largest, self.reason = 0.0, pairs.scale, ""
        self.smallest = np.inf  # what the last look that saw something saw
        self.looks: list[float] = []  # and those before every column

    def run(self) -> Learned:
        limit = self.width if self.rank is None else min(self.rank, self.width)
        while len(self.t) < limit and self._cross():
            pass
        if len(self.t) == self.width:
            self.reason, self.left_over = "the score has full rank", 0.0
        elif self.rank is not None and len(self.t) == limit:
            if self._look(self._next_anchors()) is not None:
                self.left_over = self._sampled_rest()
            self.reason = f"rank {limit} was prescribed"
        return self._assembled()

    def _cross(self) -> bool:
        """One more column and row, or False if there is nothing left."""
        seen = self._look(self._next_anchors())
        if seen is None and len(self.avoided):
            seen = self._look(self._left_out())
        elif seen is not None and self._little():
            seen = self._second_look(seen)
        if seen is None or (len(self.t) and self._within_tolerance()):
            return False
        self.looks.append(self.smallest)
        anchor, first = seen
        column = self._column(anchor, first)
        direction = self._pivot(anchor, column)
        self._take_anchor(anchor, column)
        self._row(direction, abs(float(direction @ column)))
        return True

    def _little(self) -> bool:
        """Whether the look just taken shows unusually little."""
        recent = self.looks[-RECENT:]
        return bool(recent) and self.smallest < SHRUNK * float(np.median(recent))

    def _second_look(self, first: tuple[Array, float]) -> tuple[Array, float]:
        """Other anchors, if they show more."""
        before = self.smallest
        other = self._look(self._next_anchors(CHOICE))
        if other is not None and self.smallest > before:
            return other
        self.smallest = before
        return first

    # -- columns ---------------------------------------------------------------------------

    def _next_anchors(self, skipped: int = 0) -> Float[Array, "n d"]:
        """Random, and orthogonal to the rows so far while there is room."""
        last = len(self.anchors) - skipped
        anchors = self.anchors[max(last - CHOICE, 0) : max(last, 0)]
        if len(self.t) > AVOIDED_SHARE * self.width or not len(anchors):
            return anchors
        anchors = np.array([self.row_space.outside(a) for a in anchors])
        sizes = np.linalg.norm(anchors, axis=1, keepdims=True)
        return (anchors / sizes)[sizes[:, 0] > SAME_SPACE]

    def _left_out(self) -> Float[Array, "n d"]:
        """A mixture of the anchors that are avoided, orthogonal to those before and, as far as
        they reach, to the rows so far."""
        anchor = self.avoided.sum(axis=0)
        before, _ = np.linalg.qr(np.vstack([self.omega, self.rows]).T)
        anchor = anchor - before @ (before.T @ anchor)
        return anchor[None] / np.linalg.norm(anchor)

    def _ask(self, probes: Array, anchors: Array, spread: float, certain: bool = False) -> Table:
        """Unit probes against unit anchors; products in units of the probes' length."""
        pairs, linear = self.pairs, self.pairs.linear
        tokens = pairs.probes.stretched(probes)
        bias, error = tokens @ pairs.key_bias, pairs.bias_error
        probe_set = ProbeSet(Listed(tokens), len(tokens), 1, linear.at(tokens), bias, error)
        return LogOdds(pairs.oracle, linear, probe_set, "score").table(
            Listed(anchors),
            linear.at(anchors),
            spread,
            pairs.longest,
            certain,
            anchors @ pairs.key_bias,
        )

    def _look(self, anchors: Float[Array, "n d"]) -> tuple[Array, float] | None:
        """The anchor on which a probe sees most, and what it sees; None where that is nothing."""
        if not len(anchors):
            return None
        probe, length = self.probes[:1], self.pairs.probes.across
        table = self._ask(probe, anchors, self.spread, certain=True)
        # what the rows so far say of these anchors is known; the rest must be new
        known = [float(probe[0] @ self._explained(anchor)) for anchor in anchors]
        rest = table.product[0] - length * np.array(known)
        self.left_over = float(np.sqrt(np.mean(rest**2))) / length
        doubt = length * max(self._explained_error(probe, anchor) for anchor in anchors)
        visible = VISIBLE * (float(table.error.max()) + self._rounding(table) + doubt)
        self.reason = (
            f"nothing was seen outside rank {len(self.t)}, down to "
            f"{visible / self.largest:.1e} of the score"
        )
        best = int(np.argmax(np.abs(rest)))
        if abs(rest[best]) <= visible:
            if self.smallest < DECAYING * visible:  # the next one may be just out of sight
                self.left_over = SAMPLE_SAFETY * visible / length
            return None
        self.smallest = abs(float(rest[best]))
        return anchors[best], float(table.product[0, best])

    def _column(self, anchor: Float[Array, " d"], first: float) -> Float[Array, " d"]:
        """score · anchor: measured on the probes but the first, known there and on the t so far."""
        length, known = self.pairs.probes.across, self.rows @ anchor
        products = np.full(len(self.probes), first)
        error = self.column_errors[-1] if self.column_errors else 0.0
        if len(self.probes) > 1:
            table = self._ask(self.probes[1:], anchor[None], abs(first))
            products[1:] = table.product[:, 0]
            self.spread = table.spread
            error = np.hypot(np.sqrt(np.mean(table.error**2)), self._rounding(table)) / length
        self.largest = max(self.largest, float(np.sqrt(np.mean(products**2))))
        self.column_errors.append(float(error))
        return self.probes.T @ products / length + self.t.T @ known

    def _explained(self, anchor: Float[Array, " d"]) -> Float[Array, " d"]:
        """score · anchor as far as the crosses so far explain it."""
        if not len(self.t):
            return np.zeros(self.width)
        return self.columns @ np.linalg.solve(self.t @ self.columns, self.rows @ anchor)

    def _explained_error(self, probes: Array, anchor: Array) -> float:
        """Standard error of that, seen through unit probes."""
        if not len(self.t):
            return 0.0
        core = self.t @ self.columns
        by_columns = np.linalg.solve(core, self.rows @ anchor) * np.array(self.column_errors)
        by_rows = np.linalg.solve(core.T, (probes @ self.columns).T).T * np.array(self.row_errors)
        return float(np.linalg.norm(by_columns) + np.linalg.norm(by_rows, axis=1).max())

    def _rounding(self, table: Table, row: bool = False) -> float:
        """A product that is small because its terms cancel is rounded at the size of the terms:
        those of the score, of the anchor's product with a key bias, and, where long anchors are
        not orthogonal to the rows so far, of the anchor's score with itself."""
        terms = CANCELLATION * self.largest
        if len(self.avoided):
            size = float(np.linalg.norm(self.pairs.key_bias)) / np.sqrt(self.width)
            terms += BIAS_CANCELLATION * size
        if row:
            terms += self.largest * TARGET_SPREAD / (table.spread * self.pairs.probes.across)
        return table.roundoff.relative * terms

    def _pivot(self, anchor: Array, column: Array) -> Float[Array, " d"]:
        """What the column adds, leaning towards the value map if it would see little of it, and
        away from it if little would be left for the other probes (no more than that: every lean
        makes the errors of the crosses before count a little more). Takes the direction out of
        the probes, which keep equal overlap with the value map."""
        new = self.probes @ (column - self._explained(anchor))
        level = self.probes @ self.value
        level = level / np.linalg.norm(level)
        weights = new / np.linalg.norm(new)
        share = 1.0 / np.sqrt(len(new))  # of the value map that every other probe has
        if abs(weights @ level) < share:
            weights = weights + (share if weights @ level >= 0 else -share) * level
            weights /= np.linalg.norm(weights)
        elif abs(weights @ level) > MOST_VALUE and len(new) > 1:
            aside = self.rng.standard_normal(len(new))
            aside -= (aside @ level) * level
            weights = weights + aside / np.linalg.norm(aside)
            weights /= np.linalg.norm(weights)
        direction = weights @ self.probes
        self.probes = _without(self.probes, weights)
        if len(self.probes):
            seen = self.probes @ self.value
            size = float(np.linalg.norm(seen))
            if size > 0:
                even = np.full(len(seen), 1.0 / np.sqrt(len(seen)))
                self.probes = _reflected(self.probes, seen / size, even)
        return direction

    def _take_anchor(self, anchor: Array, column: Array) -> None:
        """Adds the anchor, made orthogonal to those before it, and its column."""
        weights = self.anchors @ anchor
        size = float(np.linalg.norm(weights))
        fresh = weights @ self.anchors / size
        column = (column - self.columns @ (self.omega @ anchor)) / size
        self.column_errors[-1] /= size
        self.anchors = _without(self.anchors, weights / size)
        self.omega = np.vstack([self.omega, fresh])
        self.columns = np.column_stack([self.columns, column])

    def _within_tolerance(self) -> bool:
        """Whether what is left, and was seen by the last look, may be left out."""
        limit, length = self.tolerance * self.largest, self.pairs.probes.across
        if self.left_over * length > limit:
            return False
        rest = self._sampled_rest()
        if rest * length > limit:
            return False
        self.left_over = rest
        self.reason = (
            f"what is left outside rank {len(self.t)}, {rest * length / self.largest:.1e} of the "
            "score, is within the tolerance"
        )
        return True

    def _sampled_rest(self) -> float:
        """What a search that is stopped early leaves out, from a few entries of it. (The anchors
        of a look are orthogonal to the rows so far, and see less of it than others.)"""
        probes, anchors = self.probes[:SAMPLES], self.anchors[:SAMPLES]
        table = self._ask(probes, anchors, max(self.spread, self.largest))
        known = np.column_stack([probes @ self._explained(anchor) for anchor in anchors])
        rest = table.product / self.pairs.probes.across - known
        return SAMPLE_SAFETY * float(np.sqrt(np.mean(rest**2)))

    # -- rows ------------------------------------------------------------------------------

    def _row(self, direction: Float[Array, " d"], pivot: float) -> None:
        """direction · score: measured on the anchors, known on the ω so far. The pivot, its
        product with one random anchor, tells what to expect of the others."""
        row, error = (direction @ self.columns) @ self.omega, 0.0
        if len(self.anchors):
            length = self.pairs.probes.across
            table = self._ask(direction[None], self.anchors, length * pivot)
            row = row + table.product[0] / length @ self.anchors
            self.largest = max(self.largest, table.spread)
            rounding = self._rounding(table, row=True)
            error = np.hypot(np.sqrt(np.mean(table.error**2)), rounding) / length
        self.row_errors.append(float(error))
        self.t = np.vstack([self.t, direction])
        self.rows = np.vstack([self.rows, row])
        new = np.linalg.norm(self.row_space.outside(row)) > SAME_SPACE * np.linalg.norm(row)
        if len(self.t) <= AVOIDED_SHARE * self.width and new:
            self.row_space.add(row)

    # -- the result ------------------------------------------------------------------------

    def _assembled(self) -> Learned:
        rank, width = len(self.t), self.width
        if rank == 0:
            return self._nothing()
        left, upper = np.linalg.qr(self._unstretched(self.columns))
        through = np.linalg.solve(self.t @ self.columns, self.rows)  # the core's inverse times B
        right = upper @ through
        column_part = np.sqrt(np.array(self.column_errors) ** 2 @ through**2 + self.left_over**2)
        spread_left = np.linalg.solve((self.t @ self.columns).T, self.columns.T).T
        row_part = np.sqrt(spread_left**2 @ np.array(self.row_errors) ** 2)
        probes = self.pairs.probes
        looser = np.sqrt(1.0 + ((probes.across / probes.along) ** 2 - 1.0) * probes.axis**2)
        error = (
            np.column_stack([looser, looser * row_part]),
            np.vstack([column_part, np.ones(width)]),
        )
        return assemble(
            self.pairs,
            (left, right),
            error,
            unknowns=2 * rank * width - rank * rank,
            notes=(f"Rank {rank}: {self.reason}.",),
            details={
                "rank": rank,
                "rank_reason": self.reason,
                "singular_values": np.linalg.svd(right, compute_uv=False),
                "truncation": self.left_over,
            },
        )

    def _nothing(self) -> Learned:
        zero = (np.zeros((self.width, 1)), np.zeros((1, self.width)))
        error = (np.ones((self.width, 1)), np.full((1, self.width), self.left_over))
        details = {"rank": 0, "rank_reason": self.reason, "truncation": self.left_over}
        note = "No question showed a score: attention is uniform up to the key bias."
        return assemble(self.pairs, zero, error, unknowns=0, notes=(note,), details=details)

    def _unstretched(self, columns: Float[Array, "d r"]) -> Float[Array, "d r"]:
        """Columns of the score from columns as seen by unit directions."""
        probes = self.pairs.probes
        if not probes.axis.any():
            return columns
        part = (probes.across / probes.along - 1.0) * (probes.axis @ columns)
        return columns + np.outer(probes.axis, part)


def _span(key_bias: Float[Array, " d"], value: Float[Array, " d"]) -> Float[Array, "k d"]:
    """Orthonormal rows spanning a key bias and the value map; none where there is no key bias."""
    if not key_bias.any() or len(value) < 4:
        return np.zeros((0, len(value)))
    q, r = np.linalg.qr(np.column_stack([key_bias, value]))
    kept = np.abs(np.diag(r)) > SAME_SPACE * np.linalg.norm(value)
    return np.ascontiguousarray(q.T[: 2 if kept[1] else 1])


def _reflected(rows: Array, start: Array, goal: Array) -> Array:
    """Rows mixed by the reflection that takes the unit vector `start` to `goal`."""
    gap = start - goal
    size = float(gap @ gap)
    if size == 0.0:
        return rows
    return np.asarray(rows - np.outer(2.0 / size * gap, gap @ rows))


def _without(rows: Float[Array, "m d"], weights: Float[Array, " m"]) -> Float[Array, "k d"]:
    """Orthonormal rows spanning what is left when the combination `weights` is taken out."""
    last = np.zeros(len(weights))
    last[-1] = -1.0 if weights[-1] > 0 else 1.0  # away from the weights: no cancellation
    return _reflected(rows, weights, last)[:-1]
