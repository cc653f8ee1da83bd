"""Which kind of box is this? What about twenty queries say before anything is learned.

One token: are the answers labels; is f([x]) affine along a chord (attention), bent at places (a
ReLU network) or everywhere (something else)? A sequence, the same in another order, and the same
several times over: does the rest matter, does its order, are tokens more than a set? Pairs
[x + u; x] at three x on a line: the log-odds of one head are affine in x, and a vector answer lies
on the line between those of x and x + u; with several heads neither holds.
"""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample
from keyhole.linalg.softmax import logit
from keyhole.measurement.families import Kind
from keyhole.measurement.noise import estimate_noise, inside
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import REJECTION, ROUNDINGS, NoiseModel
from keyhole.oracles.queries import QueryBatch

PURPOSE = "family"
EXACTLY = 1e3  # roundoffs within which two answers are the same
TOKENS = 8, 12  # fewest and most tokens of the sequence


@dataclass(frozen=True, eq=False)
class Facts:
    """What was found out about a box."""

    noise: NoiseModel
    looked: tuple[QueryBatch, Array]  # the first queries, for whoever can use them again
    outputs: int | None
    labels: bool = False
    bent: bool = False  # f([x]) is not affine
    smooth: bool = False  # and bent wherever one looks
    sequence: bool = True  # the rest of the sequence matters
    order: bool = False  # and so does its order
    copies: bool = False  # a sequence repeated is answered differently
    several: bool | None = None  # not one head; None: the pairs say nothing
    lone: bool = False  # f is affine in the last token, and no other token is seen
    half: bool = False  # the box computes in a format of 16 bits, and does not only answer in it
    against: Counterexample | None = field(default=None)
    singles: tuple[Array, Array] | None = None  # tokens and answers, where f([x]) is affine
    far: float | None = None  # size of an entry at which f([x]) bends, where smaller ones do not

    @property
    def kind(self) -> Kind:
        """What tokens and sequences say: labels, attention, a network, or both in a layer."""
        if self.labels:
            return Kind.LABELS
        if not self.bent:
            return Kind.ATTENTION
        return Kind.LAYER if self.sequence else Kind.NETWORK

    def still(self, oracle: Oracle) -> bool:
        """Whether the box answers its first query as it did."""
        queries, answers = self.looked
        now = _rows(oracle.ask(QueryBatch(queries.bank, queries.index[:1], PURPOSE)))
        first = _rows(answers)[:1]
        return not differs(now - first, float(np.max(np.abs(first))), self.noise)

    @property
    def sentences(self) -> tuple[str, ...]:
        """The facts for a reader."""
        kind = "one number" if self.outputs is None else f"a vector of {self.outputs}"
        found = [f"Answers are {kind}, {self.noise.name}."]
        if self.labels:
            return (*found, "Every answer is a label.")
        if self.smooth:
            found.append("Single tokens act nonlinearly, and smoothly so.")
        elif self.bent:
            found.append("Single tokens act piecewise linearly.")
        else:
            found.append("Single tokens act linearly.")
        if not self.sequence:
            found.append("The rest of a sequence does not matter.")
        elif self.order:
            found.append("The order of the earlier tokens matters.")
        elif self.copies:
            found.append("A sequence and the same sequence repeated are answered differently.")
        else:
            found.append("The rest of a sequence matters as a set.")
        if self.several:
            found.append("Pairs are not answered as one head would.")
        return tuple(found)


def examine_family(oracle: Oracle, rng: np.random.Generator) -> Facts:
    """Asks about twenty queries; for domains with room around zero."""
    return _Examination(oracle, rng).run()


class _Examination:
    """The box, and the answers that later steps use again."""

    def __init__(self, oracle: Oracle, rng: np.random.Generator) -> None:
        self.oracle, self.rng = oracle, rng
        self.noise, queries, answers = estimate_noise(oracle, rng)
        self.looked = (queries, answers)
        self.start = queries.tokens()[0, 0]
        self.at_start = _rows(answers)[0]
        self.size = float(np.max(np.abs(self.at_start)))
        self.outputs = None if answers.ndim == 1 else answers.shape[1]
        other = rng.standard_normal(self.start.shape)
        other *= np.linalg.norm(self.start) / np.linalg.norm(other)
        self.end = inside(oracle, (other - self.start)[None, None], rng)[0, 0]
        self.singles: tuple[Array, Array] | None = None

    def run(self) -> Facts:
        if self._labels_only():
            return Facts(self.noise, self.looked, self.outputs, labels=True)
        line = self._chord()
        bent, smooth, several = self._differ(np.diff(line, 2, axis=0)), False, None
        against = None
        if bent:
            smooth, against = self._smooth(line)
        sequence, order, copies, disorder = self._sequences()
        lone = not (bent or sequence) and self._pairs() and self._differ(np.diff(line, axis=0))
        far = find_far_bend(self.oracle, self.rng, self.noise) if lone else None
        if far is not None:
            bent, lone = True, False
            smooth, against = self._smooth(line)
        if not (bent or order or copies or lone):
            several = self._several(line)
        return Facts(
            self.noise, self.looked, self.outputs, False, bent, smooth,
            sequence, order, copies, several, lone, not bent and self._computes_in_half(line),
            against or disorder, None if bent else self.singles, far,
        )  # fmt: skip

    def _computes_in_half(self, line: Float[Array, "points D"]) -> bool:
        """Whether numbers are off a line by more than their own rounding: then terms that cancel
        were rounded before. (Four roundings enter a second difference.)"""
        if self.outputs is None or not (self.noise.half and self.noise.repeatable):
            return False
        for points in (line, line[::2]):
            largest = np.max([np.abs(points[i : len(points) - 2 + i]) for i in range(3)], axis=0)
            off = np.abs(np.diff(points, 2, axis=0))
            if (off > 4.0 * self.noise.relative * largest).any():
                return True
        return False

    def _pairs(self) -> bool:
        """Whether two tokens may be asked."""
        longest = self.oracle.spec.domain.max_length
        return longest is None or longest >= 2

    def ask(self, tokens: Float[Array, "n length d"]) -> Float[Array, "n D"]:
        answers = _rows(self.oracle.ask(QueryBatch.of(tokens, PURPOSE)))
        self.size = max(self.size, float(np.max(np.abs(answers))))
        return answers

    def tokens(self, count: int) -> Float[Array, "count d"]:
        drawn = self.rng.standard_normal((count, 1, self.oracle.spec.width))
        return inside(self.oracle, drawn, self.rng)[:, 0]

    def _differ(self, gap: Array) -> bool:
        return differs(gap, self.size, self.noise)

    def _labels_only(self) -> bool:
        labels = (-1.0, 0.0, 1.0)  # what label-only boxes answer with
        if self.outputs is not None or not np.isin(self.at_start, labels).all():
            return False
        label_looks = 12  # answers that must all be labels
        return bool(np.isin(self.ask(self.tokens(label_looks)[:, None]), labels).all())

    def _chord(self) -> Float[Array, "points D"]:
        """Single tokens from the start past the middle of the domain to the other side."""
        chord = (0.25, 0.5, 0.75, 1.0)  # points asked on a chord; its start is known
        answers = self.ask(np.stack([self._on_chord(t) for t in chord])[:, None])
        return np.concatenate([self.at_start[None], answers])

    def _on_chord(self, t: float) -> Float[Array, " d"]:
        return np.asarray(self.start + t * (self.end - self.start))

    def _smooth(self, line: Float[Array, "points D"]) -> tuple[bool, Counterexample | None]:
        """Whether f([x]) bends everywhere: neither attention nor ReLUs do."""
        coarse = 2.0**-20  # roundoff above which no step shows a curve
        if self.noise.relative > coarse or self.noise.error_floor > 0:
            return False, None
        if self._bent_evenly(line):
            return True, smooth_at(self._on_chord(0.5), line[1], line[2], line[3])
        fine = self.noise.relative <= 2.0**-40  # above, a step that dodges kinks shows nothing
        return self._bent_everywhere() if fine else self._curved_everywhere()

    def _bent_evenly(self, line: Float[Array, "points D"]) -> bool:
        """Whether second differences along the chord are all alike: those of a function that is
        looked at far below the size at which it bends. No kinks are so evenly spread."""
        bends = np.diff(line, 2, axis=0)
        apart = np.linalg.norm(bends - bends.mean(axis=0), axis=1).max()
        evenly = 0.1  # relative difference of neighbouring bends: a tenth of the way to the next
        return self._differ(bends) and bool(apart < evenly * np.linalg.norm(bends[1]))

    def _bent_everywhere(self) -> tuple[bool, Counterexample | None]:
        """By steps so small that they hold a kink by chance only."""
        smooth_looks = 4  # places that must all be bent: a kink is met by chance at few of them
        places = 0.5 * self.tokens(smooth_looks)
        smooth_step = 2.0**-12  # of the token: planes of a thousand neurons are wider apart
        steps = smooth_step * self.tokens(smooth_looks)
        tokens = np.concatenate([places - steps, places, places + steps])
        before, middle, after = self.ask(tokens[:, None]).reshape(3, smooth_looks, -1)
        bend = np.abs(before + after - 2 * middle).max(axis=1)
        if (bend <= EXACTLY * self.noise.relative * self.size).any():
            return False, None
        return True, smooth_at(places[0], before[0], middle[0], after[0])

    def _curved_everywhere(self) -> tuple[bool, Counterexample | None]:
        """By steps that few digits can see: half the step bends a curve a quarter as much, pieces
        half as much or less. Flat places say nothing."""
        found = []
        curve_step = 2.0**-4  # of the token: kinks lie within it, but do not look like a curve
        # share of a bend by which it may differ from four times that of half the step
        curved = 0.05
        # places that must look like a curve: kinks do by chance, at every twentieth place
        curves = 4
        curve_looks = 24  # places that are looked at, at most
        for _ in range(curve_looks):
            place, step = 0.5 * self.tokens(1)[0], curve_step * self.tokens(1)[0]
            before, middle, after = self.ask((place + np.outer((-1, 0, 1), step))[:, None])
            wide, rounding = before + after - 2 * middle, ROUNDINGS * self._sigma()
            if np.linalg.norm(wide) <= rounding / curved:
                continue
            near = self.ask((place + np.outer((-0.5, 0.5), step))[:, None])
            narrow = near.sum(axis=0) - 2 * middle
            if np.linalg.norm(wide - 4 * narrow) > curved * np.linalg.norm(wide) + rounding:
                return False, None
            found.append(smooth_at(place, before, middle, after))
            if len(found) == curves:
                return True, found[0]
        return False, None

    def _sequences(self) -> tuple[bool, bool, bool, Counterexample | None]:
        """Whether the rest of a sequence matters, its order, and how often it is repeated."""
        lengths = self.rng.spawn(1)[0]  # lengths come from the seed: no length is always avoided
        tokens, repeats = (
            int(lengths.integers(*bounds, endpoint=True)) for bounds in (TOKENS, (9, 12))
        )  # so many repeats reach beyond most windows
        longest = self.oracle.spec.domain.max_length or tokens * repeats
        length = min(tokens, longest)
        if length < 2:
            return False, False, False, None
        rest = self.tokens(TOKENS[1] - 1)[: length - 1]
        plain = np.concatenate([rest, self.start[None]])
        answer = self.ask(plain[None])[0]
        sequence = self._differ(answer - self.at_start) or self._seen_faintly(rest)
        times = min(repeats, longest // length)
        turned = np.concatenate([rest[::-1], self.start[None]])
        # copies are shuffled: a window would see whole copies of a sequence that is merely tiled
        copies = lengths.permutation(np.tile(plain, (times, 1))[:-1])
        repeated = np.concatenate([copies, self.start[None]])
        for changed, asked in ((turned, length > 2), (repeated, times > 1)):
            if not asked:
                continue
            other, order = self.ask(changed[None])[0], changed is turned
            # in another order the same terms are summed: half way between rounding and all
            visible = np.sqrt(self.noise.relative) * self.size + REJECTION * self.noise.error_floor
            apart = order and bool((np.abs(other - answer) > visible).any())
            if apart or self._differ(other - answer):
                reason = "the same tokens in another order" if order else "a repeated sequence"
                box, expected = np.squeeze(other), np.squeeze(answer)
                against = Counterexample(changed, box, expected, reason)
                return True, order, not order, against
        return sequence, False, False, None

    def _seen_faintly(self, rest: Float[Array, "n d"]) -> bool:
        """An anchor that attends to itself for its length alone is told by a short one."""
        faint = 2.0**-6  # length of an anchor for which even large scores are of order one
        anchor = faint * self.start[None]
        other = np.concatenate([self.tokens(TOKENS[1] - 1)[: len(rest)], anchor])
        first, second = self.ask(np.stack([np.concatenate([rest, anchor]), other]))
        return self._differ(first - second)

    def _several(self, line: Float[Array, "points D"]) -> bool | None:
        """Whether pairs contradict one head."""
        domain, width = self.oracle.spec.domain, self.oracle.spec.width
        if not self._pairs():
            return None
        probe = 0.5 * self.tokens(1)[0]
        zero, high = self.ask(np.stack([np.zeros(width), probe])[:, None])
        tokens = np.stack([np.zeros(width), probe, self.start, self.end])
        seen = np.stack([zero, high, line[0], line[-1]]).astype(self.looked[1].dtype)
        self.singles = tokens, seen[:, 0] if self.outputs is None else seen
        swing = high - zero
        strength, noise = float(np.linalg.norm(swing)), self._sigma()
        if strength <= EXACTLY * noise:
            return None
        anchors = (0.25, 0.5, 0.75)  # where on the chord pairs are asked
        at = np.array(anchors)
        x = 0.5 * np.stack([self._on_chord(t) for t in anchors])
        plain = zero + 0.5 * (line[0] - zero + at[:, None] * (line[-1] - line[0]))
        length = 1.0
        tries = 6  # lengths of u at which a usable weight is looked for
        usable = 0.02  # a weight this far from 0 and 1 has a logarithm worth comparing
        affine = 1e-9  # second difference of log-odds that rounding inside a head may cause

        def is_off_line(rest: Float[Array, "n D"]) -> bool:
            """Whether a vector answer is off the line of its two values."""
            off = rest - np.outer(rest @ swing / strength**2, swing)
            allowed = affine * length * strength + ROUNDINGS * noise
            return bool((np.linalg.norm(off, axis=1) > allowed).any())

        for _ in range(tries):
            pairs = np.stack([x + length * probe, x], axis=1)
            rest = self.ask(pairs[:1]) - plain[:1]
            if is_off_line(rest):
                return True
            rest = np.concatenate([rest, self.ask(pairs[1:]) - plain[1:]])
            weight = rest @ swing / (length * strength**2)
            doubt = noise / (length * strength)
            if is_off_line(rest):
                return True
            if (weight < -ROUNDINGS * doubt).any() or (weight > 1 + ROUNDINGS * doubt).any():
                return True
            if (weight > usable).all() and (weight < 1.0 - usable).all():
                odds = logit(weight)
                if np.ptp(odds) > usable or not np.isinf(domain.radius):
                    bend = abs(odds[0] - 2.0 * odds[1] + odds[2])
                    return bool(bend > affine + ROUNDINGS * doubt / usable)
                length *= 4.0
            else:
                length /= 4.0
        return None

    def _sigma(self) -> float:
        return float(self.noise.sigma(self.size))


def find_far_bend(oracle: Oracle, rng: np.random.Generator, noise: NoiseModel) -> float | None:
    """The size of an entry at which single tokens and their opposites show a bend that one chord
    may miss: far from zero every neuron is on for one of the two, wherever its plane lies. None
    where there is no bend. Five queries."""
    width, far = oracle.spec.width, 1e7 if oracle.spec.domain.unbounded else 1.0
    ends = far * inside(oracle, rng.standard_normal((2, 1, width)), rng)
    tokens = np.concatenate([np.zeros((1, 1, width)), ends, -ends])
    zero, *answers = _rows(oracle.ask(QueryBatch.of(tokens, PURPOSE)))
    one, other = np.stack(answers[:2]), np.stack(answers[2:])
    bent = differs(one + other - 2.0 * zero, float(np.max(np.abs(answers))), noise)
    return far if bent else None


def resembles_whole_model(oracle: Oracle, rng: np.random.Generator, noise: NoiseModel) -> bool:
    """Whether a box in which one token acts smoothly may be a model with attention, norms and
    smooth networks: its answers grow at most as fast as its tokens, as these all do, and two tokens
    say something else than their mean twice, as a mean over the tokens would not. Four queries."""
    longest, width = oracle.spec.domain.max_length, oracle.spec.width
    if longest is not None and longest < 3:
        return False
    far = 2.0**7 if oracle.spec.domain.unbounded else 1.0
    ray = far * inside(oracle, rng.standard_normal((1, 1, width)), rng)
    near, twice = _rows(oracle.ask(QueryBatch.of(np.concatenate([ray / 2, ray]), PURPOSE)))
    size = float(np.max(np.abs(near)))
    # twice the token: twice the answer, and a little where an offset or a curve is left
    if oracle.spec.domain.unbounded and float(np.max(np.abs(twice))) > 2.5 * size:
        return False
    one, other, anchor = inside(oracle, rng.standard_normal((3, 1, width)), rng)[:, 0]
    middle = (one + other) / 2
    pairs = np.stack([np.stack([one, other, anchor]), np.stack([middle, middle, anchor])])
    first, second = _rows(oracle.ask(QueryBatch.of(pairs, PURPOSE)))
    return differs(first - second, float(np.max(np.abs([first, second]))), noise)


def smooth_at(place: Array, before: Array, middle: Array, after: Array) -> Counterexample:
    """The answer in the middle of a step, where its ends would have it on a line."""
    box, line = (np.squeeze(a) for a in (middle, (before + after) / 2))
    return Counterexample(place[None], box, line, "a single token: the answer bends everywhere")


def differs(gap: Array, size: float, noise: NoiseModel) -> bool:
    """Whether a difference of answers of this size is more than rounding and noise."""
    allowed = EXACTLY * noise.relative * size + 2.0 * REJECTION * noise.error_floor
    return bool((np.abs(gap) > allowed).any())


def _rows(answers: Array) -> Float[Array, "n D"]:
    return np.asarray(answers, dtype=np.float64).reshape(len(answers), -1)
