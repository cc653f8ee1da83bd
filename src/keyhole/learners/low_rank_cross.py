"""Low rank by crosses: columns, then rows, then the next columns where the rows so far are zero.

Columns are Y = score·Ω, rows B = T·score, and from r of each score = Y (T Y)⁻¹ B. What was
measured is never measured again: a column needs only the probes orthogonal to the T so far, a row
only the anchors orthogonal to the Ω so far, which makes exactly 2rd − r² questions.

Crosses are taken in blocks. First as many probes look at as many anchors (one at two). Pivots of
this square that can be seen are crosses that are there, and its answers are part of the columns.
Where the last pivot is unusually small, one more anchor is looked at: anchors nearly orthogonal to
what is left of the score would cost digits. A square that shows less than it has room for was asked
in part for nothing: a block is only as large as that may cost, and a single probe looks next.

Ω is random but orthogonal to the rows so far, so that score·Ω is what is left of the score and
nothing else: it is measured to full relative precision, and errors do not grow from block to
block. T spans the columns: the largest pivots.

With a key bias, probes are shorter along it than across. The score seen by unit directions is then
stretch · score, and that is what the crosses are of; the stretch is taken out at the end. Probes
cannot be made long then, so that the value and the key bias of an anchor cost digits: columns,
whose errors count most, are taken on anchors without either, and only where these show nothing
(more) on the two that are left out.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import lu_factor, lu_solve, qr

from keyhole.algebra.bases import Basis, spanned
from keyhole.algebra.range_finder import RangeFinder
from keyhole.algebra.reflections import turned, without
from keyhole.arrays import Array, Float, Int
from keyhole.learners.base import Learned
from keyhole.learners.pairs import Pairs, assemble, nothing_seen
from keyhole.oracles.questions import Listed
from keyhole.probes.log_odds import TARGET_SPREAD, LogOdds, ProbeSet
from keyhole.probes.score_table import Table, measured_table

CHOICE = 2  # anchors that a single probe looks at: both bad by chance is rare enough
SHRUNK, RECENT = 0.25, 8  # share of what the last looks saw, below which there is another
VISIBLE = 12.0  # standard errors of a test from which there is
SPARE = 2  # questions per rank that the last look may cost
STEEP = 2.0**-6  # pivots of a block below this share of its first are left for the next
CANCELLATION = 4.0  # rounding of a column that is zero because its terms cancel, in roundoffs
BIAS_CANCELLATION = 12.0  # and of a key bias whose terms do
MOST_VALUE = 0.9  # share of the value map that one block may take away from the probes
ENOUGH = 16  # answers that tell the scale of others well enough
DECAYING = 1e3  # a last cross this little above what can be seen: the spectrum goes on below
SAMPLES = 3  # probes and anchors for what a search that was stopped leaves out
SAMPLE_SAFETY = 2.0  # and so few entries may all be small by chance
SAME_SPACE = 1e-6  # a row this little outside the directions avoided adds none to them
FEWEST = 4  # anchors of which two can be avoided
AVOIDED_SHARE = 0.4  # anchors avoid the rows so far up to this share of the width


@dataclass(frozen=True, eq=False)
class Seen:
    """What the first probes see of some anchors, and which of these to take."""

    all: Float[Array, "n d"]  # the anchors
    product: Float[Array, "b n"]
    error: Float[Array, "b n"]
    order: Int[Array, " k"]
    ended: bool  # no more was there than is taken

    @property
    def anchors(self) -> Float[Array, "k d"]:
        return self.all[self.order]


class Cross:
    """Crosses of one score matrix, for scalar boxes."""

    def __init__(
        self,
        pairs: Pairs,
        anchors: Basis,
        rng: np.random.Generator,
        rank: int | None,
        tolerance: float,
        spare: float = 0.0,
    ) -> None:
        width = pairs.probes.width
        self.pairs, self.width, self.spread = pairs, width, pairs.scale
        self.rank, self.tolerance, self.rng = rank, tolerance, rng
        self.spare = spare  # share of the unknowns that the last look may cost
        # two parts of one array each: what is left to choose from, and what was chosen
        self.probe_space = np.array(pairs.probes.basis.rows(np.arange(width)))
        self.anchor_space = np.array(anchors.rows(np.arange(width)))
        self.probes, self.t = np.split(self.probe_space, [width])
        self.anchors, self.omega = np.split(self.anchor_space, [width])
        avoid = pairs.key_bias.any() and width >= FEWEST
        both = (pairs.key_bias, pairs.linear.value[:, 0]) if avoid else ()
        self.avoided = spanned(both, width, SAME_SPACE)
        self.value = pairs.probes.stretched(pairs.linear.value.T)[0] / pairs.probes.across
        self.rows = np.zeros((0, width))  # t · score
        self.columns = np.zeros((width, 0))  # score · ω
        self.core = lu_factor(np.zeros((0, 0)))  # of t · score · ω
        self.row_space = RangeFinder(width)  # and the anchors that are avoided
        self.row_space.become(self.avoided.T)
        self.column_errors, self.row_errors = np.zeros(0), np.zeros(0)
        self.left_over, self.largest, self.reason = 0.0, pairs.scale, ""
        self.smallest = np.inf  # what the last look that saw something saw
        self.looks: list[float] = []  # and those before every block
        self.ended = False  # whether the last look showed no more than was taken

    def run(self) -> Learned:
        limit = self.width if self.rank is None else min(self.rank, self.width)
        while len(self.t) < limit and self._cross(limit - len(self.t)):
            pass
        if len(self.t) == self.width:
            self.reason, self.left_over = "the score has full rank", 0.0
        elif self.rank is not None and len(self.t) == limit:
            if self._look(1, self._next_anchors(CHOICE)) is not None:
                self.left_over = self._sampled_rest()
            self.reason = f"rank {limit} was prescribed"
        return self._assembled()

    def _cross(self, most: int) -> bool:
        """A block of columns and rows, or False if there is nothing left."""
        count = min(most, self._affordable())
        seen = self._look(count, self._next_anchors(max(count, CHOICE)))
        self.ended = seen is None or seen.ended
        if seen is None and len(self.avoided):
            seen = self._look(1, self._left_out())
        elif seen is not None and not self.ended and self._little():
            seen = self._look(count, self._next_anchors(1, len(seen.all)), seen) or seen
        if seen is None or (len(self.t) and self._within_tolerance()):
            return False
        self.looks.append(self.smallest)
        columns, errors = self._columns(seen)
        directions = self._pivots(seen.anchors, columns)
        self._take_anchors(seen.anchors, columns, errors)
        self._take_rows(directions, directions @ columns)
        if len(self.t) < self.width:
            self.core = lu_factor(self.t @ self.columns, overwrite_a=True)
        return True

    def _affordable(self) -> int:
        """Crosses to look for at once: where there are none, the square of their number is asked
        for nothing. (A tolerance is compared with one cross after the other.)"""
        rank = len(self.t)
        unknowns = 2 * rank * self.width - rank * rank
        most = np.sqrt(max(SPARE * rank, self.spare * unknowns))
        return 1 if self.tolerance or self.ended else max(1, int(most))

    def _little(self) -> bool:
        """Whether the look just taken shows unusually little."""
        recent = self.looks[-RECENT:]
        return bool(recent) and self.smallest < SHRUNK * float(np.median(recent))

    # -- columns ---------------------------------------------------------------------------

    def _next_anchors(self, count: int, skipped: int = 0) -> Float[Array, "n d"]:
        """Random, and orthogonal to the rows so far while there is room."""
        last = len(self.anchors) - skipped
        anchors = self.anchors[max(last - count, 0) : max(last, 0)]
        if len(self.t) > AVOIDED_SHARE * self.width or not len(anchors):
            return anchors
        anchors = self.row_space.outside(anchors)
        sizes = np.linalg.norm(anchors, axis=1)
        there = sizes > SAME_SPACE
        return np.asarray(anchors[there] / sizes[there, None])

    def _left_out(self) -> Float[Array, "n d"]:
        """A mixture of the anchors that are avoided, orthogonal to those before and, as far as
        they reach, to the rows so far."""
        anchor = self.avoided.sum(axis=0)
        before, _ = np.linalg.qr(np.vstack([self.omega, self.rows]).T)
        anchor = anchor - before @ (before.T @ anchor)
        return anchor[None] / np.linalg.norm(anchor)

    def _ask(
        self, probes: Array, anchors: Array, spread: float, seen: int = 1, certain: bool = False
    ) -> Table:
        """Unit probes against unit anchors; products in units of the probes' length."""
        pairs, linear = self.pairs, self.pairs.linear
        tokens = pairs.probes.stretched(probes)
        bias, error = tokens @ pairs.key_bias, pairs.bias_error
        probe_set = ProbeSet(Listed(tokens), len(tokens), 1, linear.at(tokens), bias, error)
        return measured_table(
            LogOdds(pairs.oracle, linear, probe_set, "score"),
            Listed(anchors),
            linear.at(anchors),
            spread,
            pairs.longest,
            certain,
            anchors @ pairs.key_bias,
            seen,
        )

    def _look(
        self, count: int, anchors: Float[Array, "n d"], before: "Seen | None" = None
    ) -> "Seen | None":
        """The anchors on which `count` probes see most, at most as many, and what they see; None
        where that is nothing."""
        if not len(anchors):
            return None
        probes, length = self.probes[:count], self.pairs.probes.across
        # what the rows so far say of these anchors is known; the rest must be new
        known = length * (probes @ self._explained(anchors))
        expected = float(np.hypot(self.spread, np.sqrt(np.mean(known**2))))
        table = self._ask(probes, anchors, expected, certain=True)
        product, error = table.product, table.error
        if before is not None:
            anchors = np.vstack([before.all, anchors])
            product = np.hstack([before.product, product])
            error = np.hstack([before.error, error])
            known = length * (probes @ self._explained(anchors))
        rest = product - known
        self.left_over = float(np.sqrt(np.mean(rest**2))) / length
        doubt = length * self._explained_error(probes, anchors)
        visible = VISIBLE * (float(error.max()) + self._rounding(table) + doubt)
        self.reason = (
            f"nothing was seen outside rank {len(self.t)}, down to "
            f"{visible / self.largest:.1e} of the score"
        )
        triangle, order = qr(rest, mode="r", pivoting=True)
        pivots = np.abs(np.diag(triangle))
        # noise in a column of the block adds up; where all there is left was asked, nothing waits
        waits = 0.0 if count == len(self.probes) <= len(anchors) else STEEP * pivots[0]
        there = np.sqrt(count) * visible
        taken = int(np.sum(pivots > max(there, waits)))
        if taken == 0:
            if self.smallest < DECAYING * visible:  # the next one may be just out of sight
                self.left_over = SAMPLE_SAFETY * visible / length
            return None
        self.smallest = float(pivots[taken - 1])
        return Seen(anchors, product, error, order[:taken], bool(pivots[-1] <= there))

    def _columns(self, seen: "Seen") -> tuple[Float[Array, "d k"], Float[Array, " k"]]:
        """score · anchors and standard errors: measured on the probes but those that looked, known
        there and on the t so far."""
        length, anchors, known = self.pairs.probes.across, seen.anchors, self.rows @ seen.anchors.T
        products, errors = seen.product[:, seen.order], seen.error[:, seen.order]
        if len(self.probes) > len(products):
            others, seen_so_far = self.probes[len(products) :], products.size
            spread, enough = float(np.sqrt(np.mean(products**2))), seen_so_far >= ENOUGH
            table = self._ask(others, anchors, spread, seen_so_far, certain=enough)
            products = np.vstack([products, table.product])
            errors = np.hypot(np.vstack([errors, table.error]), self._rounding(table))
        self.spread = float(np.sqrt(np.mean(products**2)))
        self.largest = max(self.largest, float(np.sqrt(np.mean(products**2, axis=0)).max()))
        error = np.sqrt(np.mean(errors**2, axis=0)) / length
        return self.probes.T @ products / length + self.t.T @ known, error

    def _explained(self, anchors: Float[Array, "n d"]) -> Float[Array, "d n"]:
        """score · anchors as far as the crosses so far explain it."""
        if not len(self.t):
            return np.zeros((self.width, len(anchors)))
        return self.columns @ lu_solve(self.core, self.rows @ anchors.T)

    def _explained_error(self, probes: Array, anchors: Array) -> float:
        """Largest standard error of that, seen through unit probes."""
        if not len(self.t):
            return 0.0
        by_columns = self.column_errors[:, None] * lu_solve(self.core, self.rows @ anchors.T)
        by_rows = self.row_errors[:, None] * lu_solve(self.core, (probes @ self.columns).T, trans=1)
        return float(sum(np.linalg.norm(part, axis=0).max() for part in (by_columns, by_rows)))

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

    def _pivots(self, anchors: Array, columns: Array) -> Float[Array, "k d"]:
        """What the columns add, leaning towards the value map if it would see little of it, and
        away from it if little would be left for the other probes (no more than that: every lean
        makes the errors of the crosses before count a little more). Takes the directions out of
        the probes. Both keep equal overlap with the value map."""
        new = self.probes @ (columns - self._explained(anchors))
        weights = np.ascontiguousarray(np.linalg.qr(new)[0].T)
        level = self.probes @ self.value
        level = level / np.linalg.norm(level)
        share = np.sqrt(len(weights) / len(new))  # of the value map that as many probes have
        weights = turned(weights, weights @ level, np.eye(len(weights))[0])
        overlap = float(weights[0] @ level)  # that of all others is zero
        if abs(overlap) < share:
            weights[0] += (share if overlap >= 0 else -share) * level
        elif abs(overlap) > max(MOST_VALUE, share) and len(weights) < len(new):
            aside = self.rng.standard_normal(len(new))
            aside -= (aside @ level) * level
            aside -= (weights[1:] @ aside) @ weights[1:]
            weights[0] += aside / np.linalg.norm(aside)
        weights[0] /= np.linalg.norm(weights[0])
        weights = turned(weights, weights @ level, np.ones(len(weights)))
        directions = weights @ self.probes
        self.probes = without(self.probes, weights)
        self.probes = turned(self.probes, self.probes @ self.value, np.ones(len(self.probes)))
        return directions

    def _take_anchors(self, anchors: Array, columns: Array, errors: Array) -> None:
        """Adds the anchors, made orthogonal to each other and those before, and their columns."""
        weights, triangle = np.linalg.qr(self.anchors @ anchors.T)
        back = np.linalg.inv(triangle)
        columns = (columns - self.columns @ (self.omega @ anchors.T)) @ back
        self.column_errors = np.append(np.sqrt(errors**2 @ back**2), self.column_errors)
        self.columns = np.column_stack([columns, self.columns])
        chosen = weights.T @ self.anchors
        self.anchors = without(self.anchors, weights.T)
        self.omega = self.anchor_space[len(self.anchors) :]
        self.omega[: len(chosen)] = chosen

    def _within_tolerance(self) -> bool:
        """Whether what is left, and was seen by the last look, may be left out."""
        length = self.pairs.probes.across
        limit = self.tolerance * self.largest / length
        if self.left_over > limit or (rest := self._sampled_rest()) > limit:
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
        rest = table.product / self.pairs.probes.across - probes @ self._explained(anchors)
        return SAMPLE_SAFETY * float(np.sqrt(np.mean(rest**2)))

    # -- rows ------------------------------------------------------------------------------

    def _take_rows(self, directions: Float[Array, "k d"], pivots: Float[Array, "k k"]) -> None:
        """directions · score: measured on the anchors, known on the ω so far. The pivots, their
        products with a few random anchors, tell what to expect of the others."""
        rows, errors = (directions @ self.columns) @ self.omega, np.zeros(len(directions))
        if len(self.anchors):
            length = self.pairs.probes.across
            expected = length * float(np.sqrt(np.mean(pivots**2)))
            table = self._ask(directions, self.anchors, expected, len(directions))
            rows += table.product / length @ self.anchors
            self.largest = max(self.largest, table.spread)
            rounding = self._rounding(table, row=True)
            errors = np.hypot(np.sqrt(np.mean(table.error**2, axis=1)), rounding) / length
        self.row_errors = np.append(errors, self.row_errors)
        self.t = self.probe_space[len(self.probes) :]
        self.t[: len(directions)] = directions
        self.rows = np.vstack([rows, self.rows])
        if len(self.t) > AVOIDED_SHARE * self.width:
            self.row_space = RangeFinder(self.width)  # of no use any more
        else:
            for row in rows:
                if np.linalg.norm(self.row_space.outside(row)) > SAME_SPACE * np.linalg.norm(row):
                    self.row_space.add(row)

    # -- the result ------------------------------------------------------------------------

    def _assembled(self) -> Learned:
        rank, width = len(self.t), self.width
        if rank == 0:
            known = {"rank": 0, "rank_reason": self.reason, "truncation": self.left_over}
            return nothing_seen(self.pairs, self.left_over, known)
        score: Any
        probes = self.pairs.probes
        if rank == width:  # T and Ω are complete: Y (T Y)⁻¹ is Tᵀ, (T Y)⁻¹ B is Ω
            through, lifted = self.omega, self.t.T
            score = right = probes.unstretched(self.rows.T @ self.t).T
            self.rows, self.columns = np.zeros((2, 0, width))  # no longer needed
        else:
            through = lu_solve(self.core, self.rows)
            lifted = lu_solve(self.core, self.columns.T, trans=1).T
            left, upper = np.linalg.qr(probes.unstretched(self.columns.T).T)
            right = upper @ through
            score = (left, right)
        # what is left out is part of every column and row, as if it were an error of theirs
        rest = (self.left_over / SAMPLE_SAFETY) ** 2
        column_part = np.einsum("r,rd,rd->d", self.column_errors**2 + rest, through, through)
        column_part = np.sqrt(column_part + self.left_over**2)
        row_part = np.sqrt(np.einsum("dr,dr,r->d", lifted, lifted, self.row_errors**2 + rest))
        looser = np.sqrt(1.0 + ((probes.across / probes.along) ** 2 - 1.0) * probes.axis**2)
        error: Any = (
            np.column_stack([looser, looser * row_part]),
            np.vstack([column_part, np.ones(width)]),
        )
        return assemble(
            self.pairs,
            score,
            error if rank < width else np.hypot(np.outer(looser, column_part), error[0][:, 1:]),
            unknowns=2 * rank * width - rank * rank,
            notes=(f"Rank {rank}: {self.reason}.",),
            details={
                "rank": rank,
                "rank_reason": self.reason,
                "singular_values": np.linalg.svd(right, compute_uv=False),
                "truncation": self.left_over,
            },
        )
