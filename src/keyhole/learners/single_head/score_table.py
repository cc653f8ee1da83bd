"""Every probe against every anchor: a table of log-odds, filled block by block.

Statement.  probe_i · score · anchor_j for all i and j, with standard errors.
Queries.    First a few from all over the table, in blocks that grow with what is known of the
            scale; then the rest. The anchors' length follows from the scale so far. What came out
            saturated or steep is asked again with shorter anchors, what was asked with needlessly
            short anchors with longer ones.
Algebra.    With orthonormal probes T and anchors Ω, score = Tᵀ (T score Ωᵀ) Ω.
Fails.      Scores that span more decades than the box's precision can show (IllConditioned).
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import IllConditioned
from keyhole.learners.single_head.calibration import Calibration
from keyhole.learners.single_head.hypothesis import Score
from keyhole.linalg.bases import Basis
from keyhole.measurement.linear_response import answer_noise
from keyhole.measurement.log_odds import (
    LOOSE,
    ROUNDS,
    SHRINK,
    STEEPEST,
    TARGET_SPREAD,
    LogOddsMeter,
)
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ArrayBank, ScaledBank, TokenBank

BLOCK_GROWTH = 4  # times the answers so far that are asked next, while the scale is being learned


@dataclass(frozen=True, eq=False)
class OddsTable:
    """Measured probe_i · score · anchor_j."""

    product: Float[Array, "n m"]
    error: Float[Array, "n m"]  # standard errors
    inverse_length: Float[Array, " m"]  # of the anchors: an error of probe · key_bias times this
    noise: NoiseModel
    spread: float  # root mean square of the products: the next table starts from here


def measure_table(
    meter: LogOddsMeter,
    anchors: TokenBank,
    anchor_values: Float[Array, "m D"],
    spread: float,
    longest: float = np.inf,
    certain: bool = False,
    anchor_bias: Float[Array, " m"] | None = None,
    seen: int = 1,
) -> OddsTable:
    """Every probe of the meter against every anchor; `anchors` has unit rows.

    `spread` is the expected root mean square of probe · score · anchor, known from so many
    answers as `seen` says; it is refined from those that come in unless `certain`.
    `anchor_bias` is anchor · key_bias, which the box rounds.
    """
    bias = np.zeros(len(anchor_values)) if anchor_bias is None else anchor_bias
    table = _Filling(meter, anchors, anchor_values, bias, spread, longest, seen)
    groups, size, count = table.product.shape
    block_numbers = 6 * 2**10  # measurements handled at once: bounds the memory beside the results
    limit = max(1, block_numbers // size)

    # 1. All queries once. The first come from all over the table, so that the scale learned from
    #    them is not that of a single anchor.
    block = limit if certain else BLOCK_GROWTH * seen
    trial = 0 if certain else 340 if seen == 1 else block
    scattered = _scatter_places(groups * count, trial)
    waiting, start, again = scattered, 0, [np.zeros(0, dtype=np.int64)]
    while len(waiting) or start < groups * count:
        step = min(block, limit)
        if len(waiting):
            places, waiting = waiting[:step], waiting[step:]
        else:
            places = np.arange(start, min(start + step, groups * count))
            places, start = np.setdiff1d(places, scattered, assume_unique=True), start + step
        numbers = _order_queries(places, groups, count)
        # Few measurements may all be small by chance: two standard errors of the scale are added.
        caution = 1.0 if certain else 1.0 + 2.0 / np.sqrt(table.seen)
        length = min(TARGET_SPREAD / (caution * table.spread), longest)
        again.append(table.ask(numbers, np.full(len(numbers), length)))
        if not certain:
            table.learn_scale()
        block = block * BLOCK_GROWTH if len(waiting) else limit  # the scale is known by then
        anchor, group = np.divmod(numbers, groups)
        if (table.length[group, anchor] < 0).sum() > 0.1 * len(numbers):
            # Where a tenth of the answers saturates, the scale is far off.
            table.spread, block = 16.0 * table.spread, BLOCK_GROWTH

    # 2. Again what was saturated or steep, and what was asked with too short anchors.
    weakest = 2.0**-5  # share of its best length below which an anchor is worth another query
    short = weakest * TARGET_SPREAD / table.spread / table.unit
    group, anchor = np.nonzero((table.length > 0) & (table.length < short))
    weak = table.unit * table.length[group, anchor] < weakest * table.best_lengths(group, anchor)
    numbers = np.union1d(np.concatenate(again), (anchor * groups + group)[weak])
    for _ in range(ROUNDS):
        if not len(numbers):
            return table.finish()
        anchor, group = np.divmod(numbers, groups)
        old = table.unit * table.length[group, anchor].astype(np.float64)
        lengths = np.where(old < 0, -old * SHRINK, table.best_lengths(group, anchor))
        better = np.abs(lengths - old) > 2.0**-10 * lengths  # the same length says nothing new
        numbers, old, lengths = numbers[better], old[better], lengths[better]
        anchor, group = anchor[better], group[better]
        rest = table.ask(numbers, lengths)
        weak = (old < 0) & (lengths < weakest * table.best_lengths(group, anchor))
        numbers = np.union1d(rest, numbers[weak])
    raise IllConditioned("the scores span more decades than the box's precision can show")


def solve_table(calibration: Calibration, anchors: Basis, table: OddsTable) -> Score:
    """The score from a table of all probes against a whole basis."""
    probes = calibration.probes
    score = anchors.combine(probes.solve(table.product.T).T)
    variance = anchors.combine_squared(probes.solve_variance(table.error.T**2).T)
    # an error of the key bias is in all answers alike, divided by the length of the anchor
    common = anchors.combine(table.inverse_length[None])[0]
    variance += np.outer(calibration.key_bias_error**2, common**2)
    return Score(score, np.sqrt(variance, out=variance), score.size)


class _Filling:
    """One table while it is being filled. Arrays are (groups, members of a group, anchors); seven
    digits do for all but the products."""

    def __init__(
        self,
        meter: LogOddsMeter,
        anchors: TokenBank,
        anchor_values: Array,
        anchor_bias: Array,
        spread: float,
        longest: float,
        seen: int,
    ) -> None:
        self.meter, self.anchors, self.longest = meter, anchors, longest
        self.values, self.anchor_bias = anchor_values, anchor_bias
        probes = meter.probes
        shape = (probes.groups, probes.group, len(anchor_values))
        self.product = np.zeros(shape)
        self.error = np.zeros(shape, dtype=np.float32)  # of the log-odds
        # lengths of the anchors in units of `unit`, negative where the answer was saturated
        self.length = np.zeros((shape[0], shape[2]), dtype=np.float32)
        self.unit = min(TARGET_SPREAD / spread, longest)
        self.bias = np.zeros(shape[:2])
        self.bias.flat[: probes.count] = probes.bias
        self.spread, self.seen = spread, seen
        self.power, self.noise, self.counted = 0.0, 0.0, 0  # sums over what was not saturated

    def ask(self, numbers: Int[Array, " n"], lengths: Float[Array, " n"]) -> Int[Array, " m"]:
        """Asks queries (anchor · groups + group); returns those that must be asked again."""
        if not len(numbers):
            return numbers
        anchor, group = np.divmod(numbers, self.length.shape[0])
        if (lengths == lengths[0]).all():
            bank: TokenBank = ScaledBank(self.anchors, float(lengths[0]))
            rows, count = anchor, len(self.values)
        else:
            bank = ArrayBank(lengths[:, None] * self.anchors.rows(anchor))
            rows, count = np.arange(len(numbers)), len(numbers)
        values = lengths[:, None] * self.values[anchor]
        found = self.meter.ask(bank, count, rows, group, values, lengths)
        scores = found.scores - self.bias[group]
        self.product[group, :, anchor] = products = scores / lengths[:, None]
        rounding = self.meter.noise.relative * lengths * self.anchor_bias[anchor]
        errors = np.hypot(found.errors, np.hypot(self.meter.probes.bias_error, rounding[:, None]))
        self.error[group, :, anchor] = errors
        relative = np.maximum(lengths / self.unit, np.finfo(np.float32).tiny)
        self.length[group, anchor] = np.where(found.saturated, -relative, relative)
        good = ~found.saturated
        self.counted += int(good.sum()) * products.shape[1]
        self.power += float(np.sum(products[good] ** 2))
        self.noise += float(np.sum((errors[good] / lengths[good, None]) ** 2))
        # what a shorter anchor can mend: a steep logistic, or a weight too small for its noise
        noise = LOOSE * answer_noise(self.meter.noise, self.anchors.width)
        loose = (np.abs(scores) > STEEPEST) & (found.errors > noise)
        steep = ((scores > STEEPEST) | loose).any(axis=1)
        return numbers[found.saturated | steep]

    def learn_scale(self) -> None:
        """Root mean square over everything asked so far that was not saturated, unless it is
        within four standard errors: products that are all zero have no scale."""
        self.seen = max(1, self.counted)
        if self.power > 4.0**2 * self.noise:
            self.spread = float(np.sqrt(self.power / self.seen))

    def best_lengths(self, group: Int[Array, " n"], anchor: Int[Array, " n"]) -> Float[Array, " n"]:
        """The target, or, for a score of large size, what puts its log-odds at two."""
        goal = min(TARGET_SPREAD / self.spread, self.longest)
        top = np.abs(self.product[group, :, anchor]).max(axis=1)
        with np.errstate(divide="ignore"):
            return np.where(top * goal > STEEPEST, 2.0 / top, goal)

    def finish(self) -> OddsTable:
        count, n = len(self.values), self.meter.probes.count
        inverse = 1.0 / (self.unit * self.length.astype(np.float64))
        return OddsTable(
            self.product.reshape(-1, count)[:n],
            (self.error * inverse[:, None]).reshape(-1, count)[:n],
            np.sqrt(np.mean(inverse**2, axis=0)),
            self.meter.noise,
            self.spread,
        )


def _order_queries(places: Int[Array, " n"], groups: int, count: int) -> Int[Array, " n"]:
    """Queries (anchor · groups + group) by their place in the order in which they are asked: one
    side stays while the other runs, the anchor where there are many groups of probes."""
    if groups >= min(64, count):
        return places
    group, anchor = np.divmod(places, count)
    return anchor * groups + group


def _scatter_places(total: int, count: int) -> Int[Array, " n"]:
    """Places from all over a table, neighbours far apart in time."""
    places = np.unique(np.linspace(0, total - 1, min(total, count)).astype(np.int64))
    stride = 29
    return np.concatenate([places[k::stride] for k in range(stride)])
