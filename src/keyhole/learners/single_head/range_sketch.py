"""A score of low rank behind vector answers, or of large width: a range sketch.

Statement.  A score of rank r is measured with about r⌈d/k⌉ + (d − r)⌈r/k⌉ + 4r queries, the rank
            unknown, where k probes share a query. No d × d array is formed.
Queries.    All columns of the range first (all probes against one anchor each), then all rows.
            Before each column, random probes orthogonal to the range found so far look for more on
            two anchors, and the column is taken on the better of them. Where a column is cheap, as
            with long vector answers, a few more than the rank are taken.
Algebra.    With Q an orthonormal basis of the columns, score = Q (Qᵀ score). The columns are those
            of a random matrix times the score, whose inverse carries their errors into the range.
Fails.      Singular values below the box's precision cannot be seen: what lies outside the rank
            found is measured and added to the standard errors.
Source.     A randomised range finder (Halko, Martinsson, Tropp 2011), exact because the rank is.
"""

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.learners.single_head.calibration import Calibration
from keyhole.learners.single_head.cross import PILOT_ANCHORS, RankSearch
from keyhole.learners.single_head.hypothesis import Score
from keyhole.learners.single_head.score_table import measure_table
from keyhole.linalg.bases import Basis, equal_overlap, random_rotation
from keyhole.linalg.low_rank import RangeFinder
from keyhole.oracles.queries import ArrayBank, SubsetBank


def sketch_range(
    calibration: Calibration,
    anchors: Basis,
    rng: np.random.Generator,
    search: RankSearch,
    patience: int | None = None,
) -> Score:
    """Columns until they span the score, then rows. From rank `patience` on, all columns are taken
    without looking for the last."""
    return RangeSketch(calibration, anchors, rng, search, patience).run()


class RangeSketch:
    """The columns and rows of one score matrix."""

    def __init__(
        self,
        calibration: Calibration,
        anchors: Basis,
        rng: np.random.Generator,
        search: RankSearch,
        patience: int | None,
    ) -> None:
        self.search = search
        self.patience = calibration.width if patience is None else patience
        self.calibration, self.anchors, self.rng = calibration, anchors, rng
        self.width, self.spread = calibration.width, calibration.scale
        # an anchor along a key bias is measured less exactly: it comes last
        order = np.roll(np.arange(self.width), -1 if calibration.key_bias.any() else 0)
        self.rest = [int(number) for number in order]  # anchors without a column
        self.done: list[int] = []
        self.meter = calibration.meter(bias_error=calibration.bias_error)
        self.found = RangeFinder(self.width)
        self.columns: list[Array] = []
        self.noise = 0.0  # standard error of an entry of a column, as a product with a probe
        self.left_over = 0.0  # root mean square of unit direction · score · anchor outside
        self.visible = 0.0  # what the last test could have seen, in the same units
        self.reason = ""

    def run(self) -> Score:
        rank = self.search.rank
        limit = self.width if rank is None else min(rank, self.width)
        while self.found.rank < limit and (self.found.rank >= self.patience or self._find_more()):
            self.found.add(self._measure_column())
        if self.found.rank == self.width:
            self.reason, self.left_over = "the score has full rank", 0.0
        elif rank is not None and self.found.rank == limit:
            self._find_more()
            self.reason = f"rank {limit} was prescribed"
        if self.left_over > self.visible:
            self._test_outside(6)  # for the errors: what was seen is left out on purpose
        self._oversample()
        return self._assemble()

    # -- columns: the range ----------------------------------------------------------------

    def _measure_column(self) -> Float[Array, " d"]:
        """The score on the next anchor."""
        number = self.rest.pop(0)
        token = self.anchors.rows(np.array([number]))
        table = measure_table(
            self.meter,
            ArrayBank(token),
            self.calibration.linear.at(token),
            self.spread,
            self.calibration.longest,
        )
        self.spread = table.spread
        self.noise = max(self.noise, float(np.sqrt(np.mean(table.error**2))))
        column = self.calibration.probes.solve(np.ascontiguousarray(table.product.T))[0]
        self.columns.append(column)
        self.done.append(number)
        return column

    def _oversample(self) -> None:
        """Up to four columns beyond the rank, while they cost no more than 2r + 8 queries; the
        range is then their best fit."""
        rank, group = self.found.rank, self.calibration.group
        cost = -(-self.width // group) - -(-rank // group)
        spare = len(self.rest) if cost <= 0 else (2 * rank + 8) // cost
        extra = min(4, spare, len(self.rest))
        for _ in range(extra):
            self._measure_column()
        if extra:
            left, _, _ = np.linalg.svd(np.array(self.columns).T, full_matrices=False)
            self.found.become(left[:, :rank])

    def _find_more(self) -> bool:
        """Whether the next anchors show anything outside the range; the better one moves ahead."""
        if self.found.rank == 0:
            return True
        products, error = self._test_outside(PILOT_ANCHORS)
        seen = np.abs(products).max(axis=0)
        best = int(np.argmax(seen))
        self.rest.insert(0, self.rest.pop(best))
        threshold = self._threshold(error, self.noise * self._leverage())
        if threshold < seen[best] <= 100.0 * threshold:  # is it an error of the range?
            threshold = self._threshold(error, self.noise * self._leverage_here())
        what = (
            "nothing was seen"
            if threshold > self.search.tolerance * self.spread
            else "little is left"
        )
        self.reason = (
            f"{what} outside rank {self.found.rank}, down to {threshold / self.spread:.1e} of the "
            "score"
        )
        return bool(seen[best] > threshold)

    def _test_outside(self, count: int) -> tuple[Float[Array, "n m"], float]:
        """What random probes outside the range see of the next anchors, and its error."""
        tokens, mirrored = self._draw_outside()
        anchors = self.anchors.rows(np.array(self.rest[: 1 if mirrored else count]))
        meter = self.calibration.meter_of(tokens, 1 if mirrored else len(tokens), "rank")
        table = measure_table(
            meter,
            ArrayBank(anchors),
            self.calibration.linear.at(anchors),
            self.spread,
            self.calibration.longest,
            True,
        )
        products, error = table.product, float(np.sqrt(np.sum(table.error**2, axis=0)).max())
        if mirrored:  # q + z and q - z: their difference is what z sees
            products = (products[:1] - products[1:]) / 2.0
        typical = float(np.sqrt(np.mean(products**2)))
        # The few entries seen may all be small by chance: three times their size is stated.
        self.left_over = 3.0 * typical / self.calibration.probes.across
        return products, error

    def _threshold(self, error: float, range_error: float) -> float:
        visible = self.search.visible * max(error, range_error)
        self.visible = visible / self.calibration.probes.across
        return max(visible, self.search.tolerance * self.spread)

    def _leverage(self) -> float:
        """How much larger than a column's error the range's error may look at another anchor,
        which depends on the columns so far through the inverse of a random matrix."""
        columns = np.array(self.columns).T
        inverse = np.linalg.inv(self.found.basis.T @ columns)
        typical = np.linalg.norm(columns) / np.sqrt(len(self.columns))
        return 1.0 + float(np.linalg.norm(inverse) * typical / np.sqrt(len(self.columns)))

    def _leverage_here(self) -> float:
        """The same at the next anchor, whose part inside the range is measured for it."""
        inside, _ = self._measure_inside(np.array(self.rest[:1]), "rank")
        through = self.found.basis.T @ np.array(self.columns).T
        return 1.0 + float(np.linalg.norm(np.linalg.solve(through, inside)))

    def _draw_outside(self) -> tuple[Float[Array, "n d"], bool]:
        """Random probes outside the range that see the value map; mirrored around a direction
        inside where the value map has no part outside."""
        carriers = self._find_carriers(min(2, self.calibration.group))
        tests = max(1, len(carriers))  # each with a carrier of its own
        noise = np.array(
            [self.found.outside(self.rng.standard_normal(self.width)) for _ in range(tests)]
        )
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        scale = self.calibration.probes.scale
        if len(carriers):
            mixed = noise + carriers
            # two directions that happen to cancel see little: turn the random part around then
            mixed = np.where(
                np.linalg.norm(mixed, axis=1, keepdims=True) < 1.0, carriers - noise, mixed
            )
            tokens = scale(mixed / np.linalg.norm(mixed, axis=1, keepdims=True))
            # scaling may have brought the range back in
            return np.array([self.found.outside(token) for token in tokens]), False
        inside = self.calibration.linear.value[:, 0]
        inside = inside / np.linalg.norm(inside)
        return scale(np.array([inside + noise[0], inside - noise[0]]) / np.sqrt(2.0)), True

    def _find_carriers(self, count: int) -> Float[Array, "n d"]:
        """Up to `count` unit vectors outside the range and the key bias that see the value map."""
        rows, axis = self.found.basis, self.calibration.probes.axis
        outside = self.calibration.linear.value
        for _ in range(2):
            outside = outside - rows @ (rows.T @ outside)
            outside = outside - np.outer(axis, axis @ outside)
        for _ in range(2):  # removing the axis may have brought the range back in
            outside = outside - rows @ (rows.T @ outside)
        left, size, _ = np.linalg.svd(outside, full_matrices=False)
        largest = float(np.linalg.norm(self.calibration.linear.value, 2))
        useful = min(count, int(np.sum(size > 1e-3 * largest)))
        return np.ascontiguousarray(left[:, :useful].T)

    def _measure_inside(
        self, numbers: Int[Array, " m"], purpose: str
    ) -> tuple[Float[Array, "r m"], Float[Array, "r m"]]:
        """Qᵀ score on some anchors, in units of the probes' length, and its standard errors."""
        tokens = self.calibration.probes.scale(self._choose_row_probes())
        meter = self.calibration.meter_of(tokens, min(self.calibration.group, len(tokens)), purpose)
        values = self.calibration.values_of(self.anchors)[numbers]
        # the carriers keep the probes' length, but only the part inside the range is scored
        table = measure_table(
            meter, SubsetBank(self.anchors, numbers), values, self.spread, self.calibration.longest
        )
        inverse = np.linalg.inv(tokens @ self.found.basis)
        return inverse @ table.product, np.sqrt(inverse**2 @ table.error**2)

    def _choose_row_probes(self) -> Float[Array, "r d"]:
        """An orthonormal basis of the range, every member lifted by a vector outside it: the best
        conditioned of six ways to do so."""
        rank, basis, value = self.found.rank, self.found.basis, self.calibration.linear.value
        group = min(self.calibration.group, rank)
        left, _, _ = np.linalg.svd(basis.T @ value, full_matrices=False)
        mixed = equal_overlap(self.rng, left[:, :group]).rows(np.arange(rank)) @ basis.T
        carriers = self._find_carriers(group)
        best, best_condition = mixed, _condition(mixed @ value, group)
        for _ in range(6 if len(carriers) else 0):
            rotated = random_rotation(self.rng, len(carriers)) @ carriers
            lifted = mixed.copy()
            for i in range(rank):
                if i % group < len(rotated):
                    lifted[i] += rotated[i % group]
            condition = _condition(lifted @ value, group)
            if condition < best_condition:
                best, best_condition = lifted, condition
        return best

    # -- the result ------------------------------------------------------------------------

    def _assemble(self) -> Score:
        rank, width, basis = self.found.rank, self.width, self.found.basis
        known = basis.T @ np.array(self.columns).T  # Qᵀ score on the anchors with a column
        coefficients, errors = np.zeros((rank, width)), np.zeros((rank, width))
        done, rest = np.array(self.done), np.array(self.rest, dtype=np.int64)
        column_noise = self.noise / self.calibration.probes.across
        if self.calibration.group > 1:
            # Errors of probes that share a query add up along the value map (a measured factor).
            column_noise *= 3.0
        coefficients[:, done], errors[:, done] = known, column_noise
        if len(rest):
            coefficients[:, rest], errors[:, rest] = self._measure_inside(rest, "rows")
        right = self.anchors.combine(coefficients)
        # the error of the range, spread over the anchors by how they depend on those with columns
        leverage = np.linalg.norm(np.linalg.lstsq(known, coefficients)[0], axis=0)
        scatter = np.sqrt(
            self.anchors.combine_squared((leverage * column_noise)[None] ** 2 + self.left_over**2)
        )[0]
        inside = np.sqrt(np.mean(self.anchors.combine_squared(errors**2), axis=0))
        error = (
            np.column_stack([np.ones(width), np.linalg.norm(basis, axis=1)]),
            np.vstack([scatter, inside]),
        )
        return Score.of_rank(
            rank,
            (np.ascontiguousarray(basis), right),
            error,
            reason=self.reason,
            singular=np.linalg.svd(coefficients, compute_uv=False),
            truncation=self.left_over,
        )


def _condition(values: Float[Array, "r D"], group: int) -> float:
    """The worst condition of a group's values, relative to the longest group: 1 is best."""
    longest = float(np.linalg.norm(values, 2))
    if longest == 0.0:
        return np.inf
    weakest = min(
        float(np.linalg.svd(values[i : i + group], compute_uv=False)[-1])
        for i in range(0, len(values), group)
    )
    return longest / weakest if weakest > 0 else np.inf
