"""Low rank by a sweep: all columns of the range first, then all rows.

The probes of a group share a question, so this is the way for boxes with vector answers, for a key
bias, and for widths at which no d × d array is formed. Before each column, two random probes
orthogonal to the range found so far look for more: 2rd − r² + 2r questions.
"""

from dataclasses import replace

import numpy as np

from keyhole.algebra.bases import Basis, KroneckerBasis, equal_overlap, random_rotation
from keyhole.algebra.range_finder import RangeFinder
from keyhole.arrays import Array, Float
from keyhole.learners.base import Learned
from keyhole.learners.pairs import Pairs, assemble
from keyhole.oracles.questions import Listed, Picked
from keyhole.probes.log_odds import LogOdds, ProbeSet

TESTS = 2  # probes outside the range per rank test: both small by chance is out of the question
VISIBLE = 12.0  # standard errors of a test from which a further column is there
FAINT_VALUE = 1e-3  # a part of the value map this small, relative, carries nothing
LIFTS = 6  # ways to lift the row probes that are tried; the best conditioned is taken


class Sweep:
    """The columns and rows of one score matrix."""

    def __init__(
        self,
        pairs: Pairs,
        anchors: Basis,
        rng: np.random.Generator,
        rank: int | None,
        tolerance: float,
    ) -> None:
        self.rank, self.tolerance = rank, tolerance
        self.pairs, self.anchors, self.rng = pairs, anchors, rng
        self.width, self.spread = pairs.probes.width, pairs.scale
        # an anchor along a key bias is measured less exactly: it comes last
        self.order = np.roll(np.arange(self.width), -1 if pairs.key_bias.any() else 0)
        self.meter, self.found = _meter(pairs), RangeFinder(pairs.probes.width)
        self.columns: list[Array] = []
        self.noise = 0.0  # standard error of an entry of a column, as a product with a probe
        self.left_over = 0.0  # root mean square of unit direction · score · anchor outside
        self.reason = ""

    def run(self) -> Learned:
        limit = self.width if self.rank is None else min(self.rank, self.width)
        while self.found.rank < limit and self._more():
            self._column()
        if self.found.rank == self.width:
            self.reason, self.left_over = "the score has full rank", 0.0
        elif self.rank is not None:
            self._more()  # for the error bars: what lies outside a prescribed rank
            self.reason = f"rank {limit} was prescribed"
        return self._assembled()

    # -- columns: the range ----------------------------------------------------------------

    def _column(self) -> None:
        token = self.anchors.rows(self.order[self.found.rank : self.found.rank + 1])
        table = self.meter.table(
            Listed(token), self.pairs.linear.at(token), self.spread, self.pairs.longest
        )
        self.spread = table.spread
        self.noise = float(np.sqrt(np.mean(table.error**2)))
        column = self.pairs.probes.solve(np.ascontiguousarray(table.product.T))[0]
        self.columns.append(column)
        self.found.add(column)

    def _more(self) -> bool:
        """Whether the next anchor shows anything outside the range."""
        if self.found.rank == 0:
            return True
        token = self.anchors.rows(self.order[self.found.rank : self.found.rank + 1])
        directions, mirrored = self._outside()
        tokens = self.pairs.probes.stretched(directions)
        if not mirrored:  # stretching may have brought the range back in
            tokens = np.array([self.found.outside(token) for token in tokens])
        probes = self._probe_set(tokens, 1 if mirrored else min(TESTS, self.pairs.group))
        meter = LogOdds(self.pairs.oracle, self.pairs.linear, probes, "rank")
        table = meter.table(
            Listed(token), self.pairs.linear.at(token), self.spread, self.pairs.longest, True
        )
        products, error = table.product[:, 0], float(np.sqrt(np.sum(table.error**2)))
        if mirrored:  # q + z and q - z: their difference is what z sees
            products = np.array([products[0] - products[1]]) / 2.0
        self.left_over = float(np.sqrt(np.mean(products**2))) / self.pairs.probes.across
        visible = VISIBLE * max(error, self.noise * self._leverage())
        threshold = max(visible, self.tolerance * self.spread)
        self.reason = (
            f"nothing was seen outside rank {self.found.rank}, down to "
            f"{threshold / self.spread:.1e} of the score"
        )
        return bool(np.abs(products).max() > threshold)

    def _leverage(self) -> float:
        """How much larger than a column's error the range's error may look at another anchor,
        which depends on the columns so far through the inverse of a random matrix."""
        columns = np.array(self.columns).T
        inverse = np.linalg.inv(self.found.basis.T @ columns)
        typical = np.linalg.norm(columns) / np.sqrt(len(self.columns))
        return 1.0 + float(np.linalg.norm(inverse) * typical / np.sqrt(len(self.columns)))

    def _outside(self) -> tuple[Float[Array, "n d"], bool]:
        """Random directions outside the range that see the value map; mirrored around a direction
        inside where the value map has no part outside."""
        carriers = self._carriers(TESTS)
        noise = np.array(
            [self.found.outside(self.rng.standard_normal(self.width)) for _ in range(TESTS)]
        )
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        if len(carriers):
            chosen = carriers[np.arange(TESTS) % min(len(carriers), self.pairs.group)]
            mixed = noise + chosen
            # two directions that happen to cancel see little: turn the random part around then
            mixed = np.where(
                np.linalg.norm(mixed, axis=1, keepdims=True) < 1.0, chosen - noise, mixed
            )
            return mixed / np.linalg.norm(mixed, axis=1, keepdims=True), False
        inside = self.pairs.linear.value[:, 0]
        inside = inside / np.linalg.norm(inside)
        return np.array([inside + noise[0], inside - noise[0]]) / np.sqrt(2.0), True

    def _carriers(self, count: int) -> Float[Array, "n d"]:
        """Up to `count` unit vectors outside the range and the key bias that see the value map."""
        rows, axis = self.found.basis, self.pairs.probes.axis
        outside = self.pairs.linear.value
        for _ in range(2):
            outside = outside - rows @ (rows.T @ outside)
            outside = outside - np.outer(axis, axis @ outside)
        for _ in range(2):  # removing the axis may have brought the range back in
            outside = outside - rows @ (rows.T @ outside)
        left, size, _ = np.linalg.svd(outside, full_matrices=False)
        largest = float(np.linalg.norm(self.pairs.linear.value, 2))
        useful = min(count, int(np.sum(size > FAINT_VALUE * largest)))
        return np.ascontiguousarray(left[:, :useful].T)

    def _probe_set(self, tokens: Float[Array, "n d"], group: int) -> ProbeSet:
        return ProbeSet(
            Listed(tokens),
            len(tokens),
            group,
            self.pairs.linear.at(tokens),
            tokens @ self.pairs.key_bias,
            self.pairs.bias_error,
        )

    # -- rows: the rest --------------------------------------------------------------------

    def _rows(self) -> tuple[Float[Array, "r m"], Float[Array, "r m"]]:
        """Qᵀ score on the anchors that have no column, and its standard errors."""
        rank, basis = self.found.rank, self.found.basis
        tokens = self.pairs.probes.stretched(self._row_directions())
        probes = self._probe_set(tokens, min(self.pairs.group, rank))
        meter = LogOdds(self.pairs.oracle, self.pairs.linear, probes, "rows")
        values = self.pairs.values_of(self.anchors)[self.order[rank:]]
        # the carriers keep the probes' length, but only the part inside the range is scored
        rest = Picked(self.anchors, self.order[rank:])
        table = meter.table(rest, values, self.spread, self.pairs.longest)
        inverse = np.linalg.inv(tokens @ basis)
        return inverse @ table.product, np.sqrt(inverse**2 @ table.error**2)

    def _row_directions(self) -> Float[Array, "r d"]:
        """An orthonormal basis of the range, every member lifted by a vector outside it."""
        rank, basis, value = self.found.rank, self.found.basis, self.pairs.linear.value
        group = min(self.pairs.group, rank)
        left, _, _ = np.linalg.svd(basis.T @ value, full_matrices=False)
        mixed = equal_overlap(self.rng, left[:, :group]).rows(np.arange(rank)) @ basis.T
        carriers = self._carriers(group)
        best, best_condition = mixed, _condition(mixed @ value, group)
        for _ in range(LIFTS if len(carriers) else 0):
            turned = random_rotation(self.rng, len(carriers)) @ carriers
            lifted = mixed.copy()
            for i in range(rank):
                if i % group < len(turned):
                    lifted[i] += turned[i % group]
            condition = _condition(lifted @ value, group)
            if condition < best_condition:
                best, best_condition = lifted, condition
        return best

    # -- the result ------------------------------------------------------------------------

    def _assembled(self) -> Learned:
        rank, width, basis = self.found.rank, self.width, self.found.basis
        columns = np.array(self.columns).T
        known = basis.T @ columns  # (r, r): Qᵀ score on the anchors with a column
        coefficients = np.zeros((rank, width))
        done, rest = self.order[:rank], self.order[rank:]
        coefficients[:, done] = known
        errors = np.zeros((rank, width))
        column_noise = self.noise / self.pairs.probes.across
        errors[:, done] = column_noise
        if rank < width:
            coefficients[:, rest], errors[:, rest] = self._rows()
        right = self.anchors.combine(coefficients)
        # the error of the range, spread over the anchors by how they depend on those with columns
        leverage = np.linalg.norm(np.linalg.solve(known, coefficients), axis=0)
        scatter = np.sqrt(
            self.anchors.combine_squared((leverage * column_noise)[None] ** 2 + self.left_over**2)
        )[0]
        inside = np.sqrt(np.mean(self.anchors.combine_squared(errors**2), axis=0))
        error = (
            np.column_stack([np.ones(width), np.linalg.norm(basis, axis=1)]),
            np.vstack([scatter, inside]),
        )
        singular = np.linalg.svd(coefficients, compute_uv=False)
        return assemble(
            self.pairs,
            (np.ascontiguousarray(basis), right),
            error,
            unknowns=2 * rank * width - rank * rank,
            notes=(f"Rank {rank}: {self.reason}.",),
            details={
                "rank": rank,
                "rank_reason": self.reason,
                "singular_values": singular,
                "truncation": self.left_over,
            },
        )


def _meter(pairs: Pairs) -> LogOdds:
    """All probes; where they are many and only scaled, as a bank that writes them in one go."""
    meter, probes = pairs.meter, pairs.probes
    if isinstance(probes.basis, KroneckerBasis) and probes.shape is None and not probes.axis.any():
        meter.probes = replace(meter.probes, bank=probes.basis.scaled(probes.across))
    return meter


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
