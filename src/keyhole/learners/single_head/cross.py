"""A score of low rank behind scalar answers: cross approximation.

Statement.  A score of rank r is measured with 2rd − r² queries and one to three more a column, the
            rank unknown.
Queries.    A column is all probes against one anchor, a row one probe against all anchors. What was
            measured is never measured again: a column needs only the probes orthogonal to the T so
            far, a row only the anchors orthogonal to the Ω so far.
            Columns and rows are taken in blocks. First as many probes look at as many anchors (one
            at two): the pilot. Pivots of this square that can be seen are crosses that are there,
            and its answers are part of the columns. Where the last pivot is unusually small, one
            more anchor is looked at: anchors nearly orthogonal to what is left of the score would
            cost digits. A pilot that shows less than it has room for was asked in part for nothing:
            a block is only as large as that may cost, and a single probe looks next.
Algebra.    With Y = score·Ω the columns and B = T·score the rows, score = Y (T Y)⁻¹ B. Ω is random
            but orthogonal to the rows so far, so that score·Ω is what is left of the score and
            nothing else: it is measured to full relative precision, and errors do not grow from
            block to block. T spans the columns: the largest pivots.
            With a key bias, probes are shorter along it than across. The score seen by unit
            directions is then scale · score, and that is what the crosses are of; the scale is
            taken out at the end. Probes cannot be made long then, so that the value and the key
            bias of an anchor cost digits: columns, whose errors count most, are taken on anchors
            without either, and only where these show nothing (more) on the two that are left out.
Fails.      Singular values below the box's precision cannot be seen: what lies outside the rank
            found is measured and added to the standard errors.
Source.     Goreinov, Tyrtyshnikov, Zamarashkin, "A theory of pseudoskeleton approximations" (1997).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import lu_factor, lu_solve, qr

from keyhole.arrays import Array, Float, Int
from keyhole.learners.single_head.calibration import Calibration
from keyhole.learners.single_head.hypothesis import Score
from keyhole.learners.single_head.score_table import OddsTable, measure_table
from keyhole.linalg.bases import Basis, complement_rows, reflect_rows
from keyhole.linalg.low_rank import RangeFinder
from keyhole.linalg.low_rank_fit import count_unknowns
from keyhole.measurement.log_odds import TARGET_SPREAD
from keyhole.oracles.queries import ArrayBank

PILOT_ANCHORS = 2  # that a single probe looks at: both bad by chance is rare enough
SAMPLE_SAFETY = 2.0  # factor for what a few entries say of all: they may be small by chance
SAME_SPACE = 1e-6  # share of a row outside a space below which the row adds nothing to it
AVOIDED_SHARE = 0.4  # of the width: rank up to which anchors avoid the rows so far


@dataclass(frozen=True)
class RankSearch:
    """How the rank of a score is looked for."""

    rank: int | None = None  # prescribed; None: it is found
    tolerance: float = 0.0  # share of the score that may be left out
    visible: float = 12.0  # standard errors of a test from which there is more
    spare: float = 0.0  # share of the unknowns that may be asked for nothing, to save rounds
    patient: bool = True  # False: every entry is measured where that is hardly dearer

    def count(self, width: int, group: int) -> int:
        """Queries for a score of the prescribed rank, where one tells `group` numbers."""
        rank = width if self.rank is None else self.rank
        return -(-count_unknowns(width, rank) // group) + 2 * rank


def measure_cross(
    calibration: Calibration, anchors: Basis, rng: np.random.Generator, search: RankSearch
) -> Score:
    """Columns and rows of the score until they explain it."""
    return CrossApproximation(calibration, anchors, rng, search).run()


@dataclass(frozen=True, eq=False)
class Pilot:
    """What the first probes see of some anchors, and which of these to take."""

    all: Float[Array, "n d"]  # the anchors
    product: Float[Array, "b n"]
    error: Float[Array, "b n"]
    order: Int[Array, " k"]
    ended: bool  # no more was there than is taken

    @property
    def anchors(self) -> Float[Array, "k d"]:
        return self.all[self.order]


class CrossApproximation:
    """Columns and rows of one score matrix, for scalar boxes."""

    def __init__(
        self,
        calibration: Calibration,
        anchors: Basis,
        rng: np.random.Generator,
        search: RankSearch,
    ) -> None:
        width = calibration.width
        self.calibration, self.width, self.spread = calibration, width, calibration.scale
        self.search, self.rng = search, rng
        everything = np.arange(width)
        self.probes = RowPool(calibration.probes.basis.rows(everything))
        self.anchors = FreshAnchors(
            anchors.rows(everything), calibration.key_bias, calibration.linear.value[:, 0]
        )
        value = calibration.probes.scale(calibration.linear.value.T)[0]
        self.value = value / calibration.probes.across
        self.crosses = Crosses(width)
        self.left_over, self.largest, self.reason = 0.0, calibration.scale, ""
        self.smallest = np.inf  # what the last pilot that saw something saw
        self.pilots: list[float] = []  # and those before every block
        self.ended = False  # whether the last pilot showed no more than was taken

    def run(self) -> Score:
        rank = self.search.rank
        limit = self.width if rank is None else min(rank, self.width)
        while len(self.crosses) < limit and self._add_block(limit - len(self.crosses)):
            pass
        if len(self.crosses) == self.width:
            self.reason, self.left_over = "the score has full rank", 0.0
        elif rank is not None and len(self.crosses) == limit:
            if self._measure_pilot(1, self.anchors.next(PILOT_ANCHORS, limit)) is not None:
                self.left_over = self._sample_rest()
            self.reason = f"rank {limit} was prescribed"
        return self._assemble()

    def _add_block(self, most: int) -> bool:
        """A block of columns and rows, or False if there is nothing left."""
        rank, count = len(self.crosses), min(most, self._choose_block())
        seen = self._measure_pilot(count, self.anchors.next(max(count, PILOT_ANCHORS), rank))
        self.ended = seen is None or seen.ended
        if seen is None and len(self.anchors.avoided):
            seen = self._measure_pilot(1, self.anchors.choose_left_out(self.crosses))
        elif seen is not None and not self.ended and self._shows_little():
            more = self.anchors.next(1, rank, len(seen.all))
            seen = self._measure_pilot(count, more, seen) or seen
        if seen is None or (rank and self._within_tolerance()):
            return False
        self.pilots.append(self.smallest)
        columns, errors = self._measure_columns(seen)
        directions = self._choose_probes(seen.anchors, columns)
        self._add_columns(seen.anchors, columns, errors)
        self._measure_rows(directions, directions @ columns)
        return True

    def _choose_block(self) -> int:
        """Crosses to look for at once: where there are none, the square of their number is asked
        for nothing, two queries per rank at most or what may be spared. (A tolerance is compared
        with one cross after the other.)"""
        rank = len(self.crosses)
        most = np.sqrt(max(2 * rank, self.search.spare * count_unknowns(self.width, rank)))
        return 1 if self.search.tolerance or self.ended else max(1, int(most))

    def _shows_little(self) -> bool:
        """Whether the pilot just taken shows less than a quarter of what the last eight did."""
        recent = self.pilots[-8:]
        return bool(recent) and self.smallest < 0.25 * float(np.median(recent))

    # -- columns ---------------------------------------------------------------------------

    def _ask(
        self, probes: Array, anchors: Array, spread: float, seen: int = 1, certain: bool = False
    ) -> OddsTable:
        """Unit probes against unit anchors; products in units of the probes' length."""
        calibration, linear = self.calibration, self.calibration.linear
        return measure_table(
            calibration.meter_of(calibration.probes.scale(probes), 1),
            ArrayBank(anchors),
            linear.at(anchors),
            spread,
            calibration.longest,
            certain,
            anchors @ calibration.key_bias,
            seen,
        )

    def _measure_pilot(
        self, count: int, anchors: Float[Array, "n d"], before: Pilot | None = None
    ) -> Pilot | None:
        """The anchors on which `count` probes see most, at most as many, and what they see; None
        where that is nothing."""
        if not len(anchors):
            return None
        probes, length = self.probes.left[:count], self.calibration.probes.across
        # what the rows so far say of these anchors is known; the rest must be new
        known = length * (probes @ self.crosses.explain(anchors))
        expected = float(np.hypot(self.spread, np.sqrt(np.mean(known**2))))
        table = self._ask(probes, anchors, expected, certain=True)
        product, error = table.product, table.error
        if before is not None:
            anchors = np.vstack([before.all, anchors])
            product = np.hstack([before.product, product])
            error = np.hstack([before.error, error])
            known = length * (probes @ self.crosses.explain(anchors))
        rest = product - known
        self.left_over = float(np.sqrt(np.mean(rest**2))) / length
        doubt = length * self.crosses.explain_error(probes, anchors)
        visible = self.search.visible * (float(error.max()) + self._rounding(table) + doubt)
        self.reason = (
            f"nothing was seen outside rank {len(self.crosses)}, down to "
            f"{visible / self.largest:.1e} of the score"
        )
        triangle, order = qr(rest, mode="r", pivoting=True)
        pivots = np.abs(np.diag(triangle))
        # Noise in a column of the block adds up. Pivots far below the first are left for the next
        # block; where all there is left was asked, nothing waits.
        waits = 0.0 if count == len(self.probes.left) <= len(anchors) else 2.0**-6 * pivots[0]
        there = np.sqrt(count) * visible
        taken = int(np.sum(pivots > max(there, waits)))
        if taken == 0:
            if (
                self.smallest < 1e3 * visible
            ):  # the spectrum decays: the next may be just out of sight
                self.left_over = SAMPLE_SAFETY * visible / length
            return None
        self.smallest = float(pivots[taken - 1])
        return Pilot(anchors, product, error, order[:taken], bool(pivots[-1] <= there))

    def _measure_columns(self, seen: Pilot) -> tuple[Float[Array, "d k"], Float[Array, " k"]]:
        """score · anchors and standard errors: measured on the probes but those that looked, known
        there and on the t so far."""
        length, anchors = self.calibration.probes.across, seen.anchors
        known = self.crosses.rows @ anchors.T
        products, errors = seen.product[:, seen.order], seen.error[:, seen.order]
        if len(self.probes.left) > len(products):
            others, seen_so_far = self.probes.left[len(products) :], products.size
            spread = float(np.sqrt(np.mean(products**2)))
            # Sixteen answers tell the scale of others well enough.
            table = self._ask(others, anchors, spread, seen_so_far, certain=seen_so_far >= 16)
            products = np.vstack([products, table.product])
            errors = np.hypot(np.vstack([errors, table.error]), self._rounding(table))
        self.spread = float(np.sqrt(np.mean(products**2)))
        self.largest = max(self.largest, float(np.sqrt(np.mean(products**2, axis=0)).max()))
        error = np.sqrt(np.mean(errors**2, axis=0)) / length
        return self.probes.left.T @ products / length + self.crosses.t.T @ known, error

    def _rounding(self, table: OddsTable, row: bool = False) -> float:
        """A product that is small because its terms cancel is rounded at the size of the terms:
        those of the score, of the anchor's product with a key bias, and, where long anchors are
        not orthogonal to the rows so far, of the anchor's score with itself. The factors are
        measured: so many roundoffs of the terms are left of a sum that is zero."""
        terms = 4.0 * self.largest
        if len(self.anchors.avoided):
            size = float(np.linalg.norm(self.calibration.key_bias)) / np.sqrt(self.width)
            terms += 12.0 * size
        if row:
            length = self.calibration.probes.across
            terms += self.largest * TARGET_SPREAD / (table.spread * length)
        return table.noise.relative * terms

    def _choose_probes(self, anchors: Array, columns: Array) -> Float[Array, "k d"]:
        """Directions of what the columns add, leaning towards the value map where they would see
        little of it, and away from it where little would be left for the other probes (no more
        than that: every lean makes the errors of the crosses before count a little more). Takes
        the directions out of the probes. Both keep equal overlap with the value map."""
        new = self.probes.left @ (columns - self.crosses.explain(anchors))
        weights = np.ascontiguousarray(np.linalg.qr(new)[0].T)
        level = self.probes.left @ self.value
        level = level / np.linalg.norm(level)
        share = np.sqrt(len(weights) / len(new))  # of the value map that as many probes have
        weights = reflect_rows(weights, weights @ level, np.eye(len(weights))[0])
        overlap = float(weights[0] @ level)  # that of all others is zero
        if abs(overlap) < share:
            weights[0] += (share if overlap >= 0 else -share) * level
        elif abs(overlap) > max(0.9, share) and len(weights) < len(new):
            aside = self.rng.standard_normal(len(new))
            aside -= (aside @ level) * level
            aside -= (weights[1:] @ aside) @ weights[1:]
            weights[0] += aside / np.linalg.norm(aside)
        weights[0] /= np.linalg.norm(weights[0])
        weights = reflect_rows(weights, weights @ level, np.ones(len(weights)))
        directions, left = self.probes.take(weights), self.probes.left
        reflect_rows(left, left @ self.value, np.ones(len(left)))
        return directions

    def _add_columns(self, anchors: Array, columns: Array, errors: Array) -> None:
        """Adds the anchors, made orthogonal to each other and those before, and their columns."""
        weights, triangle = np.linalg.qr(self.anchors.left @ anchors.T)
        back = np.linalg.inv(triangle)
        columns = (columns - self.crosses.columns @ (self.crosses.omega @ anchors.T)) @ back
        self.anchors.take(weights.T)
        self.crosses.add_columns(self.anchors.taken, columns, np.sqrt(errors**2 @ back**2))

    def _within_tolerance(self) -> bool:
        """Whether what is left, and was seen by the last pilot, may be left out."""
        length = self.calibration.probes.across
        limit = self.search.tolerance * self.largest / length
        if self.left_over > limit or (rest := self._sample_rest()) > limit:
            return False
        self.left_over = rest
        self.reason = (
            f"what is left outside rank {len(self.crosses)}, {rest * length / self.largest:.1e} of "
            "the score, is within the tolerance"
        )
        return True

    def _sample_rest(self) -> float:
        """What a search that is stopped early leaves out, from a few entries of it. (The anchors
        of a pilot are orthogonal to the rows so far, and see less of it than others.)"""
        probes, anchors = self.probes.left[:3], self.anchors.left[:3]
        table = self._ask(probes, anchors, max(self.spread, self.largest))
        explained = probes @ self.crosses.explain(anchors)
        rest = table.product / self.calibration.probes.across - explained
        return SAMPLE_SAFETY * float(np.sqrt(np.mean(rest**2)))

    # -- rows ------------------------------------------------------------------------------

    def _measure_rows(self, directions: Float[Array, "k d"], pivots: Float[Array, "k k"]) -> None:
        """directions · score: measured on the anchors, known on the ω so far. The pivots, their
        products with a few random anchors, tell what to expect of the others."""
        rows = (directions @ self.crosses.columns) @ self.crosses.omega
        errors = np.zeros(len(directions))
        if len(self.anchors.left):
            length = self.calibration.probes.across
            expected = length * float(np.sqrt(np.mean(pivots**2)))
            table = self._ask(directions, self.anchors.left, expected, len(directions))
            rows += table.product / length @ self.anchors.left
            self.largest = max(self.largest, table.spread)
            rounding = self._rounding(table, row=True)
            errors = np.hypot(np.sqrt(np.mean(table.error**2, axis=1)), rounding) / length
        self.crosses.add_rows(self.probes.taken, rows, errors)
        self.anchors.avoid(rows, len(self.crosses))

    # -- the result ------------------------------------------------------------------------

    def _assemble(self) -> Score:
        rank, width = len(self.crosses), self.width
        if rank == 0:
            rest = self.left_over
            return Score.zero(width, rest, rank=0, rank_reason=self.reason, truncation=rest)
        score: Any
        crosses, probes = self.crosses, self.calibration.probes
        through, lifted = crosses.weights()
        if rank == width:
            score = right = probes.unscale(crosses.rows.T @ crosses.t).T
            crosses.forget()  # the memory is needed
        else:
            left, upper = np.linalg.qr(probes.unscale(crosses.columns.T).T)
            right = upper @ through
            score = (left, right)
        # what is left out is part of every column and row, as if it were an error of theirs
        hidden = (self.left_over / SAMPLE_SAFETY) ** 2
        column_part = np.einsum("r,rd,rd->d", crosses.column_errors**2 + hidden, through, through)
        column_part = np.sqrt(column_part + self.left_over**2)
        row_part = np.sqrt(np.einsum("dr,dr,r->d", lifted, lifted, crosses.row_errors**2 + hidden))
        looser = np.sqrt(1.0 + ((probes.across / probes.along) ** 2 - 1.0) * probes.axis**2)
        error: Any = (
            np.column_stack([looser, looser * row_part]),
            np.vstack([column_part, np.ones(width)]),
        )
        return Score.of_rank(
            rank,
            score,
            error if rank < width else np.hypot(np.outer(looser, column_part), error[0][:, 1:]),
            reason=self.reason,
            singular=np.linalg.svd(right, compute_uv=False),
            truncation=self.left_over,
        )


class RowPool:
    """Orthonormal rows in two parts of one array: what is left to choose from, and what was taken,
    the latest first."""

    def __init__(self, rows: Float[Array, "d d"]) -> None:
        self._all = np.array(rows)
        self.left, self.taken = np.split(self._all, [len(rows)])

    def take(self, weights: Float[Array, "k n"]) -> Float[Array, "k d"]:
        """Combinations, orthonormal, of those that are left."""
        taken = weights @ self.left
        self.left = complement_rows(self.left, weights)
        self.taken = self._all[len(self.left) :]
        self.taken[: len(taken)] = taken
        return taken


class Crosses:
    """As many columns as rows, seen along orthonormal directions, with their standard errors; the
    latest first."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.t, self.omega = np.zeros((2, 0, width))  # orthonormal rows
        self.rows = np.zeros((0, width))  # t · A
        self.columns = np.zeros((width, 0))  # A · ω
        self.row_errors, self.column_errors = np.zeros(0), np.zeros(0)
        self.core = lu_factor(np.zeros((0, 0)))  # of t · A · ω, unless complete

    def __len__(self) -> int:
        return len(self.t)

    @property
    def complete(self) -> bool:
        return len(self) == self.width

    def add_columns(
        self, omega: Float[Array, "n d"], columns: Float[Array, "d k"], errors: Float[Array, " k"]
    ) -> None:
        """New columns; `omega` are all directions, the new ones first. Rows must follow."""
        self.omega, self.columns = omega, np.column_stack([columns, self.columns])
        self.column_errors = np.append(errors, self.column_errors)

    def add_rows(
        self, t: Float[Array, "n d"], rows: Float[Array, "k d"], errors: Float[Array, " k"]
    ) -> None:
        """As many as there are new columns: both make new crosses."""
        self.t, self.rows = t, np.vstack([rows, self.rows])
        self.row_errors = np.append(errors, self.row_errors)
        if not self.complete:
            self.core = lu_factor(self.t @ self.columns, overwrite_a=True)

    def by_columns(self, x: Float[Array, "n d"]) -> Float[Array, "r n"]:
        """(T Y)⁻¹ B x, by which the columns count in A · x. Where Ω is complete, that is Ω x."""
        return self.omega @ x.T if self.complete else lu_solve(self.core, self.rows @ x.T)

    def by_rows(self, u: Float[Array, "m d"]) -> Float[Array, "r m"]:
        """u Y (T Y)⁻¹, by which the rows count in u · A. Where T is complete, that is u Tᵀ."""
        if self.complete:
            return np.asarray(self.t @ u.T)
        return np.asarray(lu_solve(self.core, (u @ self.columns).T, trans=1))

    def explain(self, x: Float[Array, "n d"]) -> Float[Array, "d n"]:
        """A · x as far as the crosses explain it."""
        if not len(self):
            return np.zeros((self.width, len(x)))
        return self.columns @ self.by_columns(x)

    def explain_error(self, u: Float[Array, "m d"], x: Float[Array, "n d"]) -> float:
        """Largest standard error of u · A · x, as far as the crosses explain it."""
        if not len(self):
            return 0.0
        by_columns = self.column_errors[:, None] * self.by_columns(x)
        by_rows = self.row_errors[:, None] * self.by_rows(u)
        return float(sum(np.linalg.norm(part, axis=0).max() for part in (by_columns, by_rows)))

    def forget(self) -> None:
        """Lets go of the columns and rows."""
        self.rows, self.columns = np.zeros((2, 0, self.width))

    def weights(self) -> tuple[Float[Array, "r d"], Float[Array, "d r"]]:
        """(T Y)⁻¹ B and Y (T Y)⁻¹."""
        if self.complete:
            return self.omega, self.t.T
        left = lu_solve(self.core, self.columns.T, trans=1).T
        return lu_solve(self.core, self.rows), left


class FreshAnchors(RowPool):
    """Orthonormal anchors without a column; `avoided` are two directions in which a column costs
    digits, a key bias and the value map (none without a key bias)."""

    def __init__(
        self,
        anchors: Float[Array, "d d"],
        key_bias: Float[Array, " d"],
        value: Float[Array, " d"],
    ) -> None:
        super().__init__(anchors)
        self.width = len(value)
        self.avoided = _span_avoided(key_bias, value)
        self.row_space = RangeFinder(self.width)  # and what is avoided
        self.row_space.become(self.avoided.T)

    def next(self, count: int, rank: int, skipped: int = 0) -> Float[Array, "n d"]:
        """Orthogonal to the rows so far while there is room."""
        last = len(self.left) - skipped
        anchors = self.left[max(last - count, 0) : max(last, 0)]
        if rank > AVOIDED_SHARE * self.width or not len(anchors):
            return anchors
        anchors = self.row_space.outside(anchors)
        sizes = np.linalg.norm(anchors, axis=1)
        there = sizes > SAME_SPACE
        return np.asarray(anchors[there] / sizes[there, None])

    def choose_left_out(self, crosses: Crosses) -> Float[Array, "1 d"]:
        """A mixture of the directions that are avoided, orthogonal to the anchors before and, as
        far as they reach, to the rows so far."""
        anchor = self.avoided.sum(axis=0)
        before, _ = np.linalg.qr(np.vstack([crosses.omega, crosses.rows]).T)
        anchor = anchor - before @ (before.T @ anchor)
        return anchor[None] / np.linalg.norm(anchor)

    def avoid(self, rows: Float[Array, "k d"], rank: int) -> None:
        """The rows of the crosses just made."""
        if rank > AVOIDED_SHARE * self.width:
            self.row_space = RangeFinder(self.width)  # of no use any more
            return
        for row in rows:
            if np.linalg.norm(self.row_space.outside(row)) > SAME_SPACE * np.linalg.norm(row):
                self.row_space.add(row)


def _span_avoided(key_bias: Array, value: Array) -> Float[Array, "k d"]:
    """Orthonormal rows spanning a key bias and the value map; none where there is no key bias."""
    if not key_bias.any() or len(value) < 4:  # no anchors would be left besides these two
        return np.zeros((0, len(value)))
    q, r = np.linalg.qr(np.column_stack([key_bias, value]))
    kept = np.abs(np.diag(r)) > SAME_SPACE * np.linalg.norm(value)
    return np.ascontiguousarray(q.T[: 2 if kept[1] else 1])
