"""Low rank by crosses: columns, then rows, then the next columns where the rows so far are zero.

Columns are Y = score·Ω, rows B = T·score, and from r of each score = Y (T Y)⁻¹ B. What was
measured is never measured again: a column needs only the probes orthogonal to the T so far, a row
only the anchors orthogonal to the Ω so far, which makes exactly 2rd − r² queries.

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
from scipy.linalg import qr

from keyhole.arrays import Array, Float, Int
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head.low_rank_anchors import FreshAnchors
from keyhole.learners.single_head.pairs import Pairs, assemble_low_rank, without_score
from keyhole.learners.single_head.score_table import Table, measured_table
from keyhole.linalg.bases import Basis
from keyhole.linalg.crosses import Crosses, Parted
from keyhole.linalg.low_rank_fit import unknowns
from keyhole.linalg.reflections import turned
from keyhole.measurement.log_odds import TARGET_SPREAD
from keyhole.oracles.queries import ArrayBank

CHOICE = 2  # anchors that a single probe looks at: both bad by chance is rare enough
SHRUNK, RECENT = 0.25, 8  # share of what the last looks saw, below which there is another
VISIBLE = 12.0  # standard errors of a test from which there is
SPARE = 2  # queries per rank that the last look may cost
STEEP = 2.0**-6  # pivots of a block below this share of its first are left for the next
CANCELLATION = 4.0  # rounding of a column that is zero because its terms cancel, in roundoffs
BIAS_CANCELLATION = 12.0  # and of a key bias whose terms do
MOST_VALUE = 0.9  # share of the value map that one block may take away from the probes
ENOUGH = 16  # answers that tell the scale of others well enough
DECAYING = 1e3  # a last cross this little above what can be seen: the spectrum goes on below
SAMPLES = 3  # probes and anchors for what a search that was stopped leaves out
SAMPLE_SAFETY = 2.0  # and so few entries may all be small by chance


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
        everything = np.arange(width)
        self.probes = Parted(pairs.probes.basis.rows(everything))
        self.anchors = FreshAnchors(
            anchors.rows(everything), pairs.key_bias, pairs.linear.value[:, 0]
        )
        self.value = pairs.probes.stretched(pairs.linear.value.T)[0] / pairs.probes.across
        self.crosses = Crosses(width)
        self.left_over, self.largest, self.reason = 0.0, pairs.scale, ""
        self.smallest = np.inf  # what the last look that saw something saw
        self.looks: list[float] = []  # and those before every block
        self.ended = False  # whether the last look showed no more than was taken

    def run(self) -> Hypothesis:
        limit = self.width if self.rank is None else min(self.rank, self.width)
        while len(self.crosses) < limit and self._cross(limit - len(self.crosses)):
            pass
        if len(self.crosses) == self.width:
            self.reason, self.left_over = "the score has full rank", 0.0
        elif self.rank is not None and len(self.crosses) == limit:
            if self._look(1, self.anchors.next(CHOICE, limit)) is not None:
                self.left_over = self._sampled_rest()
            self.reason = f"rank {limit} was prescribed"
        return self._assembled()

    def _cross(self, most: int) -> bool:
        """A block of columns and rows, or False if there is nothing left."""
        rank, count = len(self.crosses), min(most, self._affordable())
        seen = self._look(count, self.anchors.next(max(count, CHOICE), rank))
        self.ended = seen is None or seen.ended
        if seen is None and len(self.anchors.avoided):
            seen = self._look(1, self.anchors.left_out(self.crosses))
        elif seen is not None and not self.ended and self._little():
            seen = self._look(count, self.anchors.next(1, rank, len(seen.all)), seen) or seen
        if seen is None or (rank and self._within_tolerance()):
            return False
        self.looks.append(self.smallest)
        columns, errors = self._columns(seen)
        directions = self._pivots(seen.anchors, columns)
        self._take_anchors(seen.anchors, columns, errors)
        self._take_rows(directions, directions @ columns)
        return True

    def _affordable(self) -> int:
        """Crosses to look for at once: where there are none, the square of their number is asked
        for nothing. (A tolerance is compared with one cross after the other.)"""
        rank = len(self.crosses)
        most = np.sqrt(max(SPARE * rank, self.spare * unknowns(self.width, rank)))
        return 1 if self.tolerance or self.ended else max(1, int(most))

    def _little(self) -> bool:
        """Whether the look just taken shows unusually little."""
        recent = self.looks[-RECENT:]
        return bool(recent) and self.smallest < SHRUNK * float(np.median(recent))

    # -- columns ---------------------------------------------------------------------------

    def _ask(
        self, probes: Array, anchors: Array, spread: float, seen: int = 1, certain: bool = False
    ) -> Table:
        """Unit probes against unit anchors; products in units of the probes' length."""
        pairs, linear = self.pairs, self.pairs.linear
        return measured_table(
            pairs.meter_of(pairs.probes.stretched(probes), 1),
            ArrayBank(anchors),
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
        probes, length = self.probes.left[:count], self.pairs.probes.across
        # what the rows so far say of these anchors is known; the rest must be new
        known = length * (probes @ self.crosses.explained(anchors))
        expected = float(np.hypot(self.spread, np.sqrt(np.mean(known**2))))
        table = self._ask(probes, anchors, expected, certain=True)
        product, error = table.product, table.error
        if before is not None:
            anchors = np.vstack([before.all, anchors])
            product = np.hstack([before.product, product])
            error = np.hstack([before.error, error])
            known = length * (probes @ self.crosses.explained(anchors))
        rest = product - known
        self.left_over = float(np.sqrt(np.mean(rest**2))) / length
        doubt = length * self.crosses.explained_error(probes, anchors)
        visible = VISIBLE * (float(error.max()) + self._rounding(table) + doubt)
        self.reason = (
            f"nothing was seen outside rank {len(self.crosses)}, down to "
            f"{visible / self.largest:.1e} of the score"
        )
        triangle, order = qr(rest, mode="r", pivoting=True)
        pivots = np.abs(np.diag(triangle))
        # noise in a column of the block adds up; where all there is left was asked, nothing waits
        waits = 0.0 if count == len(self.probes.left) <= len(anchors) else STEEP * pivots[0]
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
        length, anchors = self.pairs.probes.across, seen.anchors
        known = self.crosses.rows @ anchors.T
        products, errors = seen.product[:, seen.order], seen.error[:, seen.order]
        if len(self.probes.left) > len(products):
            others, seen_so_far = self.probes.left[len(products) :], products.size
            spread, enough = float(np.sqrt(np.mean(products**2))), seen_so_far >= ENOUGH
            table = self._ask(others, anchors, spread, seen_so_far, certain=enough)
            products = np.vstack([products, table.product])
            errors = np.hypot(np.vstack([errors, table.error]), self._rounding(table))
        self.spread = float(np.sqrt(np.mean(products**2)))
        self.largest = max(self.largest, float(np.sqrt(np.mean(products**2, axis=0)).max()))
        error = np.sqrt(np.mean(errors**2, axis=0)) / length
        return self.probes.left.T @ products / length + self.crosses.t.T @ known, error

    def _rounding(self, table: Table, row: bool = False) -> float:
        """A product that is small because its terms cancel is rounded at the size of the terms:
        those of the score, of the anchor's product with a key bias, and, where long anchors are
        not orthogonal to the rows so far, of the anchor's score with itself."""
        terms = CANCELLATION * self.largest
        if len(self.anchors.avoided):
            size = float(np.linalg.norm(self.pairs.key_bias)) / np.sqrt(self.width)
            terms += BIAS_CANCELLATION * size
        if row:
            terms += self.largest * TARGET_SPREAD / (table.spread * self.pairs.probes.across)
        return table.noise.relative * terms

    def _pivots(self, anchors: Array, columns: Array) -> Float[Array, "k d"]:
        """What the columns add, leaning towards the value map if it would see little of it, and
        away from it if little would be left for the other probes (no more than that: every lean
        makes the errors of the crosses before count a little more). Takes the directions out of
        the probes. Both keep equal overlap with the value map."""
        new = self.probes.left @ (columns - self.crosses.explained(anchors))
        weights = np.ascontiguousarray(np.linalg.qr(new)[0].T)
        level = self.probes.left @ self.value
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
        directions, left = self.probes.take(weights), self.probes.left
        turned(left, left @ self.value, np.ones(len(left)))
        return directions

    def _take_anchors(self, anchors: Array, columns: Array, errors: Array) -> None:
        """Adds the anchors, made orthogonal to each other and those before, and their columns."""
        weights, triangle = np.linalg.qr(self.anchors.left @ anchors.T)
        back = np.linalg.inv(triangle)
        columns = (columns - self.crosses.columns @ (self.crosses.omega @ anchors.T)) @ back
        self.anchors.take(weights.T)
        self.crosses.add_columns(self.anchors.taken, columns, np.sqrt(errors**2 @ back**2))

    def _within_tolerance(self) -> bool:
        """Whether what is left, and was seen by the last look, may be left out."""
        length = self.pairs.probes.across
        limit = self.tolerance * self.largest / length
        if self.left_over > limit or (rest := self._sampled_rest()) > limit:
            return False
        self.left_over = rest
        self.reason = (
            f"what is left outside rank {len(self.crosses)}, {rest * length / self.largest:.1e} of "
            "the score, is within the tolerance"
        )
        return True

    def _sampled_rest(self) -> float:
        """What a search that is stopped early leaves out, from a few entries of it. (The anchors
        of a look are orthogonal to the rows so far, and see less of it than others.)"""
        probes, anchors = self.probes.left[:SAMPLES], self.anchors.left[:SAMPLES]
        table = self._ask(probes, anchors, max(self.spread, self.largest))
        rest = table.product / self.pairs.probes.across - probes @ self.crosses.explained(anchors)
        return SAMPLE_SAFETY * float(np.sqrt(np.mean(rest**2)))

    # -- rows ------------------------------------------------------------------------------

    def _take_rows(self, directions: Float[Array, "k d"], pivots: Float[Array, "k k"]) -> None:
        """directions · score: measured on the anchors, known on the ω so far. The pivots, their
        products with a few random anchors, tell what to expect of the others."""
        rows = (directions @ self.crosses.columns) @ self.crosses.omega
        errors = np.zeros(len(directions))
        if len(self.anchors.left):
            length = self.pairs.probes.across
            expected = length * float(np.sqrt(np.mean(pivots**2)))
            table = self._ask(directions, self.anchors.left, expected, len(directions))
            rows += table.product / length @ self.anchors.left
            self.largest = max(self.largest, table.spread)
            rounding = self._rounding(table, row=True)
            errors = np.hypot(np.sqrt(np.mean(table.error**2, axis=1)), rounding) / length
        self.crosses.add_rows(self.probes.taken, rows, errors)
        self.anchors.avoid(rows, len(self.crosses))

    # -- the result ------------------------------------------------------------------------

    def _assembled(self) -> Hypothesis:
        rank, width = len(self.crosses), self.width
        if rank == 0:
            details = {"rank": 0, "rank_reason": self.reason, "truncation": self.left_over}
            return without_score(self.pairs, self.left_over, details)
        score: Any
        crosses, probes = self.crosses, self.pairs.probes
        through, lifted = crosses.weights()
        if rank == width:
            score = right = probes.unstretched(crosses.rows.T @ crosses.t).T
            crosses.rows, crosses.columns = np.zeros((2, 0, width))  # no longer needed
        else:
            left, upper = np.linalg.qr(probes.unstretched(crosses.columns.T).T)
            right = upper @ through
            score = (left, right)
        # what is left out is part of every column and row, as if it were an error of theirs
        rest = (self.left_over / SAMPLE_SAFETY) ** 2
        column_part = np.einsum("r,rd,rd->d", crosses.column_errors**2 + rest, through, through)
        column_part = np.sqrt(column_part + self.left_over**2)
        row_part = np.sqrt(np.einsum("dr,dr,r->d", lifted, lifted, crosses.row_errors**2 + rest))
        looser = np.sqrt(1.0 + ((probes.across / probes.along) ** 2 - 1.0) * probes.axis**2)
        error: Any = (
            np.column_stack([looser, looser * row_part]),
            np.vstack([column_part, np.ones(width)]),
        )
        return assemble_low_rank(
            self.pairs,
            score,
            error if rank < width else np.hypot(np.outer(looser, column_part), error[0][:, 1:]),
            rank=rank,
            reason=self.reason,
            singular=np.linalg.svd(right, compute_uv=False),
            truncation=self.left_over,
        )
