"""Every probe against every anchor: a table of log-odds, filled in blocks.

The anchors' length is set from the answers so far; blocks grow with what is known of the scale, and
only answers outside the useful range are asked again.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import IllConditioned
from keyhole.measurement.linear_response import answer_noise
from keyhole.measurement.log_odds import LOOSE, ROUNDS, SHRINK, STEEPEST, TARGET_SPREAD, LogOdds
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ArrayBank, ScaledBank, TokenBank

COMFORTABLE = 2.0  # where that other query puts s
WEAKEST = 2.0**-5  # an anchor this much shorter than it could be is worth another query
SAME_LENGTH = 2.0**-10  # relative: an anchor this little shorter says nothing new
BLOCK_GROWTH = 4  # times the answers so far that are asked next: few before the scale is known
SPREAD_OUT, STRIDE = 340, 29  # queries asked first, from all over the table
RUN = 64  # probes from which it is cheaper to go through them anchor by anchor
CAUTION = 2.0  # in standard errors of the scale so far
FAR_OFF, SOME = 16.0, 0.1  # correction of a scale at which some answers saturate
BLOCK_NUMBERS = 6 * 2**10  # measurements handled at once: bounds the memory beside the results
NOISE_ONLY = 4.0  # root mean square in standard errors up to which products are noise


@dataclass(frozen=True, eq=False)
class Table:
    """Measured probe_i · score · anchor_j."""

    product: Float[Array, "n m"]
    error: Float[Array, "n m"]  # standard errors
    inverse_length: Float[Array, " m"]  # of the anchors: an error of probe · key_bias times this
    noise: NoiseModel
    spread: float  # root mean square of the products: the next table starts from here


def measured_table(
    meter: LogOdds,
    anchors: TokenBank,
    anchor_values: Float[Array, "m D"],
    spread: float,
    longest: float = np.inf,
    certain: bool = False,
    anchor_bias: Float[Array, " m"] | None = None,
    seen: int = 1,
) -> Table:
    """Every probe of the meter against every anchor; `anchors` has unit rows.

    `spread` is the expected root mean square of probe · score · anchor, known from so many
    answers as `seen` says; it is refined from those that come in unless `certain`.
    `anchor_bias` is anchor · key_bias, which the box rounds.
    """
    bias = np.zeros(len(anchor_values)) if anchor_bias is None else anchor_bias
    return _Filling(meter, anchors, anchor_values, bias, spread, longest, seen).run(certain)


class _Filling:
    """One table while it is being filled. Arrays are (groups, members of a group, anchors); seven
    digits do for all but the products."""

    def __init__(
        self,
        meter: LogOdds,
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
        self.length = np.zeros(
            (shape[0], shape[2]), dtype=np.float32
        )  # over `unit`, < 0: saturated
        self.unit = min(TARGET_SPREAD / spread, longest)
        self.bias = np.zeros(shape[:2])
        self.bias.flat[: probes.count] = probes.bias
        self.spread, self.seen = spread, seen
        self.power, self.noise, self.counted = 0.0, 0.0, 0  # sums over what was not saturated

    def run(self, certain: bool) -> Table:
        groups, size, count = self.product.shape
        limit = max(1, BLOCK_NUMBERS // size)
        block = limit if certain else BLOCK_GROWTH * self.seen
        trial = 0 if certain else SPREAD_OUT if self.seen == 1 else block
        first = spread = _spread_out(groups * count, trial)
        start, again = 0, [np.zeros(0, dtype=np.int64)]
        while len(first) or start < groups * count:
            step = min(block, limit)
            if len(first):
                places, first = first[:step], first[step:]
            else:
                places = np.arange(start, min(start + step, groups * count))
                places, start = np.setdiff1d(places, spread, assume_unique=True), start + step
            numbers = self._numbers(places)
            # few measurements may all be small by chance: assume a larger scale than was seen
            caution = 1.0 if certain else 1.0 + CAUTION / np.sqrt(self.seen)
            length = min(TARGET_SPREAD / (caution * self.spread), self.longest)
            again.append(self._fill(numbers, np.full(len(numbers), length)))
            if not certain:
                self._learn_scale()
            block = block * BLOCK_GROWTH if len(first) else limit  # the scale is known by then
            anchor, group = np.divmod(numbers, groups)
            if (self.length[group, anchor] < 0).sum() > SOME * len(numbers):  # far off
                self.spread, block = self.spread * FAR_OFF, BLOCK_GROWTH
        self._repeat(np.concatenate(again))
        return self._finished()

    def _numbers(self, places: Int[Array, " n"]) -> Int[Array, " n"]:
        """Queries (anchor · groups + group) by their place in the order in which they are asked:
        one side stays while the other runs."""
        groups, count = self.length.shape
        if groups >= min(RUN, count):
            return places
        group, anchor = np.divmod(places, count)
        return anchor * groups + group

    def _fill(self, numbers: Int[Array, " n"], lengths: Float[Array, " n"]) -> Array:
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
        found = self.meter.ask(bank, count, rows, group, lengths[:, None] * self.values[anchor])
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

    def _learn_scale(self) -> None:
        """Root mean square over everything asked so far that was not saturated."""
        self.seen = max(1, self.counted)
        if self.power > NOISE_ONLY**2 * self.noise:  # products that are all zero have no scale
            self.spread = float(np.sqrt(self.power / self.seen))

    def _ideal(self, group: Int[Array, " n"], anchor: Int[Array, " n"]) -> Float[Array, " n"]:
        """The best length for each query: the target, or less for a score of large size."""
        goal = min(TARGET_SPREAD / self.spread, self.longest)
        top = np.abs(self.product[group, :, anchor]).max(axis=1)
        with np.errstate(divide="ignore"):
            return np.where(top * goal > STEEPEST, COMFORTABLE / top, goal)

    def _repeat(self, numbers: Array) -> None:
        """Asks again what was saturated or steep, then what was asked with too short anchors."""
        groups, short = self.length.shape[0], WEAKEST * TARGET_SPREAD / self.spread / self.unit
        group, anchor = np.nonzero((self.length > 0) & (self.length < short))
        weak = self.unit * self.length[group, anchor] < WEAKEST * self._ideal(group, anchor)
        numbers = np.union1d(numbers, (anchor * groups + group)[weak])
        for _ in range(ROUNDS):
            if not len(numbers):
                return
            anchor, group = np.divmod(numbers, groups)
            old = self.unit * self.length[group, anchor].astype(np.float64)
            lengths = np.where(old < 0, -old * SHRINK, self._ideal(group, anchor))
            better = np.abs(lengths - old) > SAME_LENGTH * lengths
            numbers, old, lengths = numbers[better], old[better], lengths[better]
            anchor, group = anchor[better], group[better]
            rest = self._fill(numbers, lengths)
            weak = (old < 0) & (lengths < WEAKEST * self._ideal(group, anchor))
            numbers = np.union1d(rest, numbers[weak])
        raise IllConditioned("the scores span more decades than the box's precision can show")

    def _finished(self) -> Table:
        count, n = len(self.values), self.meter.probes.count
        inverse = 1.0 / (self.unit * self.length.astype(np.float64))
        return Table(
            self.product.reshape(-1, count)[:n],
            (self.error * inverse[:, None]).reshape(-1, count)[:n],
            np.sqrt(np.mean(inverse**2, axis=0)),
            self.meter.noise,
            self.spread,
        )


def _spread_out(total: int, trial: int) -> Int[Array, " n"]:
    """Places from all over the table, so that the scale learned from them is not that of a single
    anchor."""
    places = np.unique(np.linspace(0, total - 1, min(total, trial)).astype(np.int64))
    return np.concatenate([places[k::STRIDE] for k in range(STRIDE)])
