"""Questions of probes against an anchor: [u_1 + x; …; u_k + x; x], answered by log-odds.

With the value map known, the answer is a known mixture of known values, so the attention weights
can be solved for; their logarithms against the weight of the anchor's own token are

    s_i = u_i · (score x + key_bias)                             (the x-on-x score cancels)

k = 1 for a scalar box. A box with vector answers reads off up to rank(value) probes at once.

Operating point. An error ε of the answer is an error ε(1 + e^s) of s, so s should be small and
rather negative than large: the anchor's length is set so that s has root mean square TARGET_SPREAD,
from the answers so far, in blocks that grow; only answers outside the useful range are asked again.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import Counterexample, IllConditioned, WrongFamily
from keyhole.oracles.base import Oracle
from keyhole.oracles.questions import Bank, Joined, Listed, Questions, Scaled, Summed
from keyhole.probes.precision import Roundoff, observed
from keyhole.probes.values import SHORT, LinearPart, answer_noise

TARGET_SPREAD = 0.5  # root mean square of s: (1 + e^s)/s is flat around its best value here
STEEPEST = 5.0  # above, the factor 1 + e^s is worth another question
LOOSE = 64.0  # and a score with an error this large, in units of the answer's, too
COMFORTABLE = 2.0  # where that other question puts s
WEAKEST = 2.0**-5  # an anchor this much shorter than it could be is worth another question
BLOCK_GROWTH = 4  # times the answers so far that are asked next: few before the scale is known
SPREAD_OUT, STRIDE = 340, 29  # questions asked first, from all over the table
RUN = 64  # probes from which it is cheaper to go through them anchor by anchor
CAUTION = 2.0  # in standard errors of the scale so far
FAR_OFF, SOME = 16.0, 0.1  # correction of a scale at which some answers saturate
BLOCK_NUMBERS = 2**12  # measurements handled at once: bounds the memory beside the results
SHRINK = 2.0**-7  # step of the anchor's length where the answer is saturated
GROW = 2.0**20  # and where no score is seen at all
SHORT_GROW = 2.0**3  # the same in a short format: numbers of float16 end at 65504
GROWTHS = 3  # beyond GROW**GROWTHS times the natural length, an unseen score is called zero
NARROW = 4.0  # the useful lengths may be few: no point in looking between closer bounds
ROUNDS = 40  # of shrinking; a score that still saturates is no score
OUTSIDE = 1e4  # in units of the rounding error: a weight so far outside [0, 1] is no rounding
SATURATED = 4.0  # in the same units: a weight this close to 0 or 1 carries no digits
OFFSET_ROUNDINGS = 2.0  # of an answer by its offset: in the box, and where it is subtracted
FAINT = 2.0**-200  # an answer of zero is exact; its error, relative to the probes' values, is not
NOISE_ONLY = 4.0  # root mean square in standard errors up to which products are noise
OTHERS = 6  # probes that must show nothing before a score is called zero
HARDLY_SEEN = 3.0  # in the same units: a score below this may be noise
UNSEEN = 16.0  # in the same units: scores this small are zero as far as one can see


@dataclass(frozen=True, eq=False)
class ProbeSet:
    """Probe tokens, by groups of `group` that are asked together, and what is known of them."""

    bank: Bank  # rows are the probes u
    count: int
    group: int
    values: Float[Array, "n D"]  # u · value
    bias: Float[Array, " n"]  # u · key_bias, zero where there is none
    bias_error: float = 0.0  # standard error of that

    @property
    def groups(self) -> int:
        return -(-self.count // self.group)

    def members(self, group: int) -> slice:
        return slice(group * self.group, min((group + 1) * self.group, self.count))


@dataclass(frozen=True, eq=False)
class Table:
    """Measured probe_i · score · anchor_j."""

    product: Float[Array, "n m"]
    error: Float[Array, "n m"]  # standard errors
    inverse_length: Float[Array, " m"]  # of the anchors: an error of probe · key_bias times this
    roundoff: Roundoff
    spread: float  # root mean square of the products: the next table starts from here


@dataclass(frozen=True, eq=False)
class Weights:
    """Log-odds of a batch with their standard errors, and which of them are usable."""

    scores: Float[Array, "n k"]
    errors: Float[Array, "n k"]
    saturated: Array  # (n,) some weight is 0 or 1 as far as one can see


class LogOdds:
    """Measures log-odds with one probe set."""

    def __init__(self, oracle: Oracle, linear: LinearPart, probes: ProbeSet, purpose: str) -> None:
        self.oracle, self.linear, self.probes, self.purpose = oracle, linear, probes, purpose
        self.roundoff = linear.roundoff
        scalar = probes.group == 1 == probes.values.shape[1]  # division does: thousands of groups
        self._inverse = [
            np.linalg.pinv(probes.values[probes.members(g)])
            for g in range(0 if scalar else probes.groups)
        ]

    def ask(
        self,
        anchors: Bank,
        count: int,
        rows: Int[Array, " n"],
        groups: Int[Array, " n"],
        values: Float[Array, "n D"],
    ) -> Weights:
        """Question q: probe group groups[q] against anchor rows[q], of `count`, and its value.

        The last group may be smaller than the others; its missing members read as score 0 with
        error 0.
        """
        probes = self.probes
        tokens = Joined(Summed(probes.bank, anchors, count), anchors, probes.count * count)
        shape = (len(rows), probes.group)
        found = Weights(np.zeros(shape), np.zeros(shape), np.zeros(len(rows), dtype=bool))
        short = probes.count % probes.group
        last = (groups == probes.groups - 1) if short else np.zeros(len(rows), dtype=bool)
        for chosen, size in ((np.flatnonzero(~last), probes.group), (np.flatnonzero(last), short)):
            if not len(chosen):
                continue
            members = groups[chosen, None] * probes.group + np.arange(size)
            anchor = rows[chosen, None]
            index = np.hstack([members * count + anchor, probes.count * count + anchor])
            questions = Questions(tokens, index, self.purpose)
            answers = self.oracle.ask(questions)
            self.roundoff = observed(self.roundoff, answers)
            part = self._invert(
                np.asarray(answers, dtype=np.float64).reshape(len(chosen), -1),
                questions,
                groups[chosen],
                values[chosen],
            )
            found.scores[chosen, :size] = part.scores
            found.errors[chosen, :size] = part.errors
            found.saturated[chosen] = part.saturated
        return found

    def _invert(
        self, answers: Array, questions: Questions, groups: Array, values: Array
    ) -> Weights:
        size = questions.length - 1
        rest = answers - self.linear.offset - values
        if size == 1 == answers.shape[1]:
            swing = self.probes.values[groups]
            weights, gain = rest / swing, 1.0 / np.abs(swing)
            own, own_gain = ((swing - rest) / swing)[:, 0], gain[:, 0]
        else:
            weights, gain = np.empty((len(answers), size)), np.empty((len(answers), size))
            own_gain = np.empty(len(answers))
            for g in np.unique(groups):
                here, inverse = groups == g, self._inverse[g]
                weights[here] = rest[here] @ inverse
                gain[here] = np.linalg.norm(inverse, axis=0)
                own_gain[here] = np.linalg.norm(inverse.sum(axis=1))
            own = 1.0 - weights.sum(axis=1)
        # the offset is added last: it costs the rounding of one sum, not that of all terms
        terms = np.abs(answers - self.linear.offset) + np.abs(values)
        level = answer_noise(self.roundoff, questions.width) * np.linalg.norm(terms, axis=1)
        level += OFFSET_ROUNDINGS * self.roundoff.relative * np.linalg.norm(self.linear.offset)
        level += self.roundoff.additive
        level = np.maximum(level, FAINT * float(np.max(np.abs(self.probes.values))))
        fuzz, own_fuzz = level[:, None] * gain, level * own_gain
        self._refuse_impossible(answers, questions, weights / fuzz, own / own_fuzz)
        saturated = (weights <= SATURATED * fuzz).any(axis=1) | (own <= SATURATED * own_fuzz)
        safe, safe_own = np.maximum(weights, fuzz), np.maximum(own, own_fuzz)[:, None]
        if size == 1:  # the two weights share one error, of opposite sign
            errors = fuzz / (safe * safe_own)
        else:
            errors = np.hypot(fuzz / safe, own_fuzz[:, None] / safe_own)
        return Weights(np.log(safe / safe_own), errors, saturated)

    def _refuse_impossible(
        self, answers: Array, questions: Questions, weights: Array, own: Array
    ) -> None:
        """Weights in units of their rounding error: far below zero is no attention head."""
        low = np.minimum(weights.min(axis=1), own)
        worst = int(np.argmin(low))
        if low[worst] < -OUTSIDE:
            tokens = questions[worst : worst + 1].tokens()[0]
            values = self.linear.offset + self.linear.at(tokens)
            nearest = np.clip(answers[worst], values.min(axis=0), values.max(axis=0))
            raise WrongFamily(
                "an attention head answers with a mean of its tokens' values, and the box's "
                "answer to a question of "
                f"{questions.length} tokens is not such a mean",
                Counterexample(tokens, answers[worst], nearest, "not a mean of the values"),
            )

    def scale(self, anchor: Float[Array, " d"], natural: float, longest: float) -> float | None:
        """|probe · score · anchor| of one probe and one unit anchor, to a digit or better.

        Asks one question after another until a score is seen: None if there is none to see.
        """
        length, value = min(natural, longest), self.linear.at(anchor[None])
        grow = SHORT_GROW if self.roundoff.relative > SHORT else GROW
        unseen, saturated = 0.0, np.inf  # lengths known to be too short, too long
        groups, clearest = np.zeros(1, dtype=np.int64), (-1.0, 0.0, 0.0)
        others = np.arange(1, min(OTHERS, self.probes.count // self.probes.group))
        for _ in range(ROUNDS):
            token, rows = Listed(length * anchor[None]), np.zeros_like(groups)
            found = self.ask(token, 1, rows, groups, np.repeat(length * value, len(groups), axis=0))
            members = groups[:, None] * self.probes.group + np.arange(self.probes.group)
            usable = ~found.saturated
            score = np.abs(found.scores - self.probes.bias[members])[usable]
            errors = found.errors[usable]
            if usable.any():
                size = float(np.sqrt(np.mean(np.maximum(score, errors) ** 2)) / length)
                clearest = max(clearest, (float((score / errors).max()), size, length))
                if clearest[0] > UNSEEN:
                    return clearest[1]
                if saturated < NARROW * length:
                    hardly = clearest[0] < HARDLY_SEEN and usable.all()
                    if not (hardly and np.isinf(longest) and grow == GROW):
                        return clearest[1]  # a bound: a short format may hide one score of many
                    if len(groups) > 1 or not len(others):
                        return None  # nothing at any length
                    # one score of many may be small by chance: look at others
                    groups, length, unseen, saturated = others, clearest[2], 0.0, np.inf
                    continue
                unseen = length
                if length >= longest:  # longer tokens might show it: all that is known is a bound
                    return float(np.max(errors) / length)
                if length >= natural * grow**GROWTHS:
                    return None
            else:
                saturated = length
            if unseen > 0 and np.isfinite(saturated):
                length = float(np.sqrt(unseen * saturated))
            else:
                length = min(length * (SHRINK if unseen == 0 else grow), longest)
        raise IllConditioned("at every length of the tokens, one token takes all the attention")

    def table(
        self,
        anchors: Bank,
        anchor_values: Float[Array, "m D"],
        spread: float,
        longest: float = np.inf,
        certain: bool = False,
        anchor_bias: Float[Array, " m"] | None = None,
        seen: int = 1,
    ) -> Table:
        """Every probe against every anchor; `anchors` has unit rows.

        `spread` is the expected root mean square of probe · score · anchor, known from so many
        answers as `seen` says; it is refined from those that come in unless `certain`.
        `anchor_bias` is anchor · key_bias, which the box rounds.
        """
        filling = _Filling(self, anchors, anchor_values, spread, longest, seen)
        if anchor_bias is not None:
            filling.anchor_bias = anchor_bias
        return filling.run(certain)


class _Filling:
    """One table while it is being filled. Arrays are (groups, members of a group, anchors); seven
    digits do for all but the products."""

    def __init__(
        self,
        meter: LogOdds,
        anchors: Bank,
        anchor_values: Array,
        spread: float,
        longest: float,
        seen: int,
    ) -> None:
        self.meter, self.anchors, self.longest = meter, anchors, longest
        self.values, self.anchor_bias = anchor_values, np.zeros(len(anchor_values))
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
        """Questions (anchor · groups + group) by their place in the order in which they are asked:
        one side stays while the other runs."""
        groups, count = self.length.shape
        if groups >= min(RUN, count):
            return places
        group, anchor = np.divmod(places, count)
        return anchor * groups + group

    def _fill(self, numbers: Int[Array, " n"], lengths: Float[Array, " n"]) -> Array:
        """Asks questions (anchor · groups + group); returns those that must be asked again."""
        if not len(numbers):
            return numbers
        anchor, group = np.divmod(numbers, self.length.shape[0])
        if (lengths == lengths[0]).all():
            bank: Bank = Scaled(self.anchors, float(lengths[0]))
            rows, count = anchor, len(self.values)
        else:
            bank = Listed(lengths[:, None] * self.anchors.rows(anchor))
            rows, count = np.arange(len(numbers)), len(numbers)
        found = self.meter.ask(bank, count, rows, group, lengths[:, None] * self.values[anchor])
        scores = found.scores - self.bias[group]
        self.product[group, :, anchor] = products = scores / lengths[:, None]
        rounding = self.meter.roundoff.relative * lengths * self.anchor_bias[anchor]
        errors = np.hypot(found.errors, np.hypot(self.meter.probes.bias_error, rounding[:, None]))
        self.error[group, :, anchor] = errors
        relative = np.maximum(lengths / self.unit, np.finfo(np.float32).tiny)
        self.length[group, anchor] = np.where(found.saturated, -relative, relative)
        good = ~found.saturated
        self.counted += int(good.sum()) * products.shape[1]
        self.power += float(np.sum(products[good] ** 2))
        self.noise += float(np.sum((errors[good] / lengths[good, None]) ** 2))
        # what a shorter anchor can mend: a steep logistic, or a weight too small for its noise
        noise = LOOSE * answer_noise(self.meter.roundoff, self.anchors.width)
        loose = (np.abs(scores) > STEEPEST) & (found.errors > noise)
        steep = ((scores > STEEPEST) | loose).any(axis=1)
        return numbers[found.saturated | steep]

    def _learn_scale(self) -> None:
        """Root mean square over everything asked so far that was not saturated."""
        self.seen = max(1, self.counted)
        if self.power > NOISE_ONLY**2 * self.noise:  # products that are all zero have no scale
            self.spread = float(np.sqrt(self.power / self.seen))

    def _ideal(self, group: Int[Array, " n"], anchor: Int[Array, " n"]) -> Float[Array, " n"]:
        """The best length for each question: the target, or less for a score of large size."""
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
            self.meter.roundoff,
            self.spread,
        )


def _spread_out(total: int, trial: int) -> Int[Array, " n"]:
    """Places from all over the table, so that the scale learned from them is not that of a single
    anchor."""
    places = np.unique(np.linspace(0, total - 1, min(total, trial)).astype(np.int64))
    return np.concatenate([places[k::STRIDE] for k in range(STRIDE)])
