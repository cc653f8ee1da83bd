"""Queries along a line through a piecewise affine box: where its kinks are, and its slopes.

A line x(t) = origin + t * direction crosses every hyperplane that is not parallel to it, once.
Between two crossings the answers are affine in t. The search keeps *pieces* (two or more points
known to lie on one affine stretch) and resolves the intervals between neighbouring pieces, all
intervals at once, one batch per level:

1. The two lines agree at both ends: no kink.
2. They cross at t* well inside: a single kink would sit at t*. One answer on either side of t*
   settles it. A one-sided check does not: two kinks of opposite sign can move t* to the left of
   both, where the left line holds trivially. An answer that refutes the guess starts a new piece.
3. Otherwise the interval is split, in the middle as seen by a Cauchy law, which is how crossings
   of a random line are spread.

With vector answers two lines that meet, or one value between two kinks, may be proof enough
(learners/mlp/kink_evidence).
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np

from keyhole.arrays import Array
from keyhole.learners.mlp.kink_evidence import LineEvidence, crossing
from keyhole.learners.mlp.pieces import (
    Ask,
    NotPiecewiseAffine,
    Piece,
    Rougher,
    beside,
    measured_rounding,
    middle,
    well_inside,
)

STEP = 3e-4  # a tangent's length relative to the free distance: rarely holds a kink, keeps digits
LONG_STEP = 0.02  # the same where lines of vectors that meet are never checked: digits first
SIDE = 1e-6  # distance of the two checks from a supposed kink, relative to the free distance:
# two kinks closer than that pass for one
SIDE_SLACK = 8.0  # and at least where the two lines are this many tolerances apart,
WIDEST_SIDE = 0.25  # as long as that is within this part of the free distance
NARROW = 1e-11  # relative width at which an interval is a point
PATIENCE = 18  # batches in which answers are asked one at a time to save queries
CROWD = 50  # intervals at once from which on batches are saved instead
END_STEP = 0.05  # length of a tangent at the far end, relative to the pair that it replaces
LATE, FEW = 22, 14  # batches after which so few intervals are settled without counting queries
SCATTER = (0.03, 0.15, 0.5, 0.85, 0.97)  # where, within such an interval
SUSPECT_QUERIES, SUSPECT_RATE = 200, 12  # beyond that many, and per kink, rounding is measured
ROUGHER = 2.0  # measured rounding, in units of what was assumed, that starts the search again
SMOOTH_QUERIES = 2000  # queries granted before kinks must appear
WITNESSES = 16  # places at which a counterexample is looked for
SMOOTH_RATE = 50  # queries granted per kink found

Pair = tuple[Piece, Piece]
Request = Generator[list[float], list[Array], list[Pair]]
Answer = Generator[list[float], list[Array], "Piece | Step"]


class Step(Enum):
    """What a query about an interval led to, where it did not lead to a new piece."""

    SETTLED = "the kinks inside are known"
    SHRUNK = "one of the two pieces has grown into the interval"


@dataclass(eq=False)
class Search:
    """State of one line search."""

    ask: Ask
    evidence: LineEvidence
    reach: tuple[float, float]
    step: float = STEP
    reliable: float = 0.0  # how far a line is trusted, in its lengths (0: as far as it goes)
    suspicious: bool = False  # something was seen that rounding would explain
    measured: bool = False  # the rounding has been measured
    crowd: int = 0  # intervals that wait for an answer
    trusted: bool = False  # two lines of vectors that meet prove a kink
    batches: int = 0
    queries: int = 0
    found: int = 0
    merged: list[Pair] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def patient(self) -> bool:
        """Whether to spend a batch in order to save queries."""
        return self.batches < PATIENCE and self.crowd < CROWD

    @property
    def late(self) -> bool:
        """Whether to spend queries in order to be done."""
        return self.batches >= LATE and self.crowd < FEW

    def run(self, intervals: list[Pair]) -> None:
        """Resolves all intervals between the given pieces, a batch at a time."""
        waiting: list[tuple[Request, list[float]]] = []

        def enter(pairs: list[Pair]) -> None:
            while pairs:
                task = self.resolve(*pairs.pop())
                try:
                    waiting.append((task, next(task)))
                except StopIteration as stop:
                    pairs.extend(stop.value)

        enter(list(intervals))
        while waiting:
            self.crowd = len(waiting)
            self.suspect_rounding()
            self.refuse_smooth()
            answers = self.ask(np.array([t for _, request in waiting for t in request]))
            self.batches += 1
            self.queries += len(answers)
            served, waiting, position = waiting, [], 0
            for task, request in served:
                part = list(answers[position : position + len(request)])
                position += len(request)
                try:
                    waiting.append((task, task.send(part)))
                except StopIteration as stop:
                    enter(list(stop.value))

    def suspect_rounding(self) -> None:
        """Raises where the answers are less exact than was thought."""
        wasteful = self.queries > SUSPECT_QUERIES + SUSPECT_RATE * self.found
        if self.measured or not (wasteful or self.suspicious):
            return
        self.measured = True
        noise = measured_rounding(self.ask, self.step * min(1.0, -self.reach[0], self.reach[1]))
        if noise > ROUGHER * self.evidence.unit:
            raise Rougher(noise)

    def refuse_smooth(self) -> None:
        """Raises where far more queries were asked than kinks can explain, with the answer that
        shows it best: between the two neighbours whose lines lie furthest apart."""
        if self.queries <= SMOOTH_QUERIES + SMOOTH_RATE * self.found:
            return

        def apart(pair: Pair) -> float:
            t = (pair[0].right + pair[1].left) / 2
            return float(np.linalg.norm(pair[0].at(t) - pair[1].at(t))) / (1 + abs(t))

        ordered = sorted(self.pieces, key=lambda piece: piece.left)
        pairs = sorted(pairwise(ordered), key=apart)[-WITNESSES:]
        times = np.array([(left.right + right.left) / 2 for left, right in pairs])
        seen = []
        for t, value, pair in zip(times, self.ask(times), pairs, strict=True):
            lines = [piece.at(t) for piece in pair]
            gaps = [float(np.linalg.norm(value - line)) for line in lines]
            near = int(np.argmin(gaps))
            seen.append((gaps[near] / (1 + abs(t)), float(t), value, lines[near]))
        _, t, value, expected = max(seen, key=lambda entry: entry[0])
        raise NotPiecewiseAffine(
            f"after {self.queries} answers along a line only {self.found} kinks are certain: "
            "the answers bend everywhere (a smooth activation?)",
            t,
            value,
            expected,
        )

    def resolve(self, left: Piece, right: Piece) -> Request:
        """Settles what lies between two pieces; returns the intervals this opens."""
        step: Piece | Step
        while True:
            a, b = left.right, right.left
            if self.too_short(left, right) is not None:
                step = yield from self.grow(left, right)
                if isinstance(step, Piece):
                    self.pieces.append(step)
                    return [(left, step), (step, right)]
                continue
            if self.evidence.agree(left, right):
                self.merged.append((left, right))
                return []
            if b - a <= NARROW * (1 + min(abs(a), abs(b))):
                self.accept_point(left, right)
                return []
            if (false := self.taken(left, right)) is not None:
                return (yield from self.dissolve(false))
            t = crossing(left, right)
            inside = t is not None and well_inside(a, b, t)
            if self.late and (t is None or not inside):
                return (yield from self.scatter(left, right, t))
            if t is None or not inside:
                s = beside(a, b, t) if self.batches >= PATIENCE else middle(a, b)
                step = yield from self.split(left, right, s)
            elif not self.evidence.meet(left, right, t):
                step = yield from self.split(left, right, t)
            elif self.trusted and self.evidence.one_kink(left, right, t):
                step = Step.SETTLED
                self.found += 1
            else:
                step = yield from self.check(left, right, t)
            if step is Step.SETTLED:
                return []
            if isinstance(step, Piece):
                self.pieces.append(step)
                return [(left, step), (step, right)]

    def too_short(self, left: Piece, right: Piece) -> Piece | None:
        """The piece that is known over too short a stretch to say anything across the interval."""
        width = right.left - left.right
        if not self.reliable or width <= NARROW * (1 + min(abs(left.right), abs(right.left))):
            return None
        short = left if left.span <= right.span else right
        return short if width > self.reliable * short.span else None

    def grow(self, left: Piece, right: Piece) -> Answer:
        """One more answer on the shorter of two lines, as far as it can be relied on; where it
        is off the line, a new piece begins."""
        a, b = left.right, right.left
        short = self.too_short(left, right)
        onward = 1.0 if short is left else -1.0
        far = min(self.reliable * (left if short is left else right).span, (b - a) / 2)
        s = a + far if short is left else b - far
        (value,) = yield [s]
        grown = left if short is left else right
        if self.evidence.on(grown, s, value):
            grown.add(s, value)
            return Step.SHRUNK
        t = s + onward * self.step * far
        (partner,) = yield [t]
        return Piece([s, t], [value, partner])

    def taken(self, left: Piece, right: Piece) -> Piece | None:
        """A pair of points that a neighbour's line enters has a kink between its two points: the
        neighbour takes the point."""
        if not right.checked and self.evidence.on(left, right.left, right.values[right.low]):
            left.add(right.left, right.values[right.low])
            right.before = left
            return right
        if not left.checked and self.evidence.on(right, left.right, left.values[left.high]):
            right.add(left.right, left.values[left.high])
            left.after = right
            return left
        return None

    def dissolve(self, false: Piece) -> Request:
        """Once both points of a pair are taken, the interval between the takers is opened in its
        place. At an end of the line the far point gets a tangent of its own."""
        end = self.far_end(false)
        outer = false.after if end == false.left else false.before
        if end is not None and outer is not None:
            inward = end - np.copysign(END_STEP * false.span, end)
            (value,) = yield [inward]
            known = false.values[false.times.index(end)]
            fresh = Piece([end, inward], [known, value])
            self.pieces.remove(false)
            self.pieces.append(fresh)
            return [(fresh, outer) if end < 0 else (outer, fresh)]
        if false.before is None or false.after is None:
            return []
        self.pieces.remove(false)
        return [(false.before, false.after)]

    def far_end(self, piece: Piece) -> float | None:
        """The end of the line, if the piece reaches it."""
        low, high = self.reach
        return low if piece.left == low else high if piece.right == high else None

    def accept_point(self, left: Piece, right: Piece) -> None:
        """An interval that is a point holds kinks if the lines meet there, else a jump."""
        a, b = left.right, right.left
        if (gap := self.evidence.jump(left, right)) is not None:
            raise NotPiecewiseAffine(
                f"the answers jump by {gap:.3g} within a step of {b - a:.1g}",
                b,
                right.values[right.low],
                left.at(b),
            )
        self.found += 1
        self.suspicious = True

    def check(self, left: Piece, right: Piece, t: float) -> Answer:
        """Answers on both sides of a supposed kink; a new piece where they refute it."""
        room = min(t - left.right, right.left - t)
        bend = float(np.linalg.norm(right.slope - left.slope))
        slack = self.evidence.slack(left, t) + self.evidence.slack(right, t)
        side = max(SIDE * room, SIDE_SLACK * slack / bend)
        if side > WIDEST_SIDE * room:
            if self.reliable and left.checked and right.checked:
                self.found += 1  # as much as the answers' digits can say
                return Step.SETTLED
            return (yield from self.split(left, right, middle(left.right, right.left)))
        one, two = t - side, t + side
        tangent = self.step * room
        first, *more = yield ([one] if self.patient else [one, two])
        if self.evidence.on(right, one, first):
            right.add(one, first)
            return Step.SHRUNK
        if not self.evidence.on(left, one, first):
            (partner,) = yield [one - tangent]
            return Piece([one - tangent, one], [partner, first])
        left.add(one, first)
        if not more:
            more = yield [two]
        second = more[0]
        if self.evidence.on(right, two, second):
            right.add(two, second)
            self.found += 1
            return Step.SETTLED
        if self.evidence.on(left, two, second):
            left.add(two, second)
            return Step.SHRUNK
        (partner,) = yield [two + tangent]
        return Piece([two, two + tangent], [second, partner])

    def split(self, left: Piece, right: Piece, s: float) -> Answer:
        """An answer inside, at s: which piece does it belong to?"""
        a, b = left.right, right.left
        step = (max(LONG_STEP, self.step) if self.trusted else self.step) * min(
            s - a, b - s, 1 + abs(s)
        )
        first, *more = yield ([s] if self.patient else [s, s + step])
        for piece in (left, right):
            if self.evidence.on(piece, s, first):
                piece.add(s, first)
                return Step.SHRUNK
        between = self.evidence.two_kinks(left, right, s, first) if self.trusted else None
        if between is not None:
            self.pieces.append(between)
            self.found += 2
            return Step.SETTLED
        if not more:
            more = yield [s + step]
        return Piece([s, s + step], [first, more[0]])

    def scatter(self, left: Piece, right: Piece, t: float | None) -> Request:
        """Several tangents inside at once: for the last few intervals, which would otherwise take
        one batch after the other."""
        a, b = left.right, right.left
        places = {beside(a, b, t), *(a + (b - a) * np.array(SCATTER))}
        spots = sorted(float(s) for s in places)
        steps = [self.step * min(s - a, b - s, 1 + abs(s)) for s in spots]
        answers = yield [
            time for s, step in zip(spots, steps, strict=True) for time in (s, s + step)
        ]
        pieces = [left]
        for i, (s, step) in enumerate(zip(spots, steps, strict=True)):
            first, second = answers[2 * i : 2 * i + 2]
            if len(pieces) == 1 and self.evidence.on(left, s, first):
                left.add(s, first)
            elif self.evidence.on(right, s, first):
                right.add(s, first)
                break
            else:
                fresh = Piece([s, s + step], [first, second])
                pieces.append(fresh)
                self.pieces.append(fresh)
        pieces.append(right)
        return list(pairwise(pieces))
