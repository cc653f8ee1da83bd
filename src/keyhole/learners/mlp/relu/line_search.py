"""Breakpoints and slopes of a piecewise affine box along a line.

Statement.  A line x(t) = origin + t * direction crosses every hyperplane that is not parallel to
            it once; between two crossings the answers are affine in t. All crossings (breakpoints)
            and slopes are found.
Queries.    Three affine pieces (two or more points known to lie on one affine stretch) to begin
            with; then the intervals between neighbouring pieces, all at once, one batch per level:
            1. The two lines agree at both ends: no breakpoint.
            2. They cross at t* well inside: a single breakpoint would sit at t*. One answer on
               either side of t* settles it. A one-sided check does not: two breakpoints of opposite
               sign can move t* to the left of both, where the left line holds trivially. An answer
               that refutes the guess starts a new piece.
            3. Otherwise the interval is split, in the middle as seen by a Cauchy law, which is how
               crossings of a random line are spread.
            About four and a half per breakpoint, two with vector answers.
Algebra.    With vector answers the lines live in R^k: two lines that meet are themselves the proof
            of a single breakpoint, and one value between two breakpoints fixes both. This is
            trusted only where the jumps seen span at least three dimensions. In the end every
            piece's line is fitted to all its answers; neighbours cross at the breakpoints.
Fails.      Answers that jump, or bend everywhere, are no piecewise affine function
            (NotPiecewiseAffine). Two breakpoints closer than about 1e-6 of their distance to the
            next ones pass for one.
Source.     Binary search as in Jagielski et al. 2020 and Carlini et al. 2020; the two-sided check
            and the shortcuts for vectors are ours.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np

from keyhole.arrays import TINY, Array, Float

NEAR, FAR = 1e3, 1e8  # ends of a free line, in units of the input scale: a random hyperplane is
# crossed beyond NEAR with p < 1e-3 (found at a few queries more), beyond FAR with p < 1e-8 (missed)
TOLERANCE = 40.0  # allowed distance from a line, in rounding errors of one answer
PROOF = 1e-6  # a coincidence is proof where the tolerance is this small a part of the effect
POINT_WIDTH = 1e-11  # relative width at which an interval is a point

Ask = Callable[[Float[Array, " n"]], Float[Array, "n k"]]


@dataclass(frozen=True)
class LineSearchOptions:
    """How a line is searched: defaults for answers in double precision."""

    step: float = 3e-4
    """Length of a tangent, relative to the free distance: short enough to hold no breakpoint."""
    side: float = 1e-6
    """Distance of the two checks from a supposed breakpoint, relative to the free distance."""
    reliable: float = 0.0
    """How far a line is trusted, in its lengths (0: as far as it goes)."""
    trusting: bool = True
    """Whether lines of vectors that meet prove a breakpoint, which parallel jumps can feign."""
    patience: int = 18
    """Batches in which answers are asked one at a time to save queries."""
    crowd: int = 50
    """Intervals at once from which on batches are saved instead."""
    late: int = 22
    """Batches after which the last few intervals are settled without counting queries."""
    smooth_queries: int = 2000
    """Queries granted before breakpoints must appear; 50 more per breakpoint found."""


@dataclass(frozen=True, eq=False)
class LineFit:
    """The answers along one line: breakpoints with their jumps of slope, and the affine pieces."""

    breakpoints: Float[Array, " n"]
    jumps: Float[Array, "n k"]
    slopes: Float[Array, "pieces k"]
    anchors: Float[Array, " pieces"]  # a time in each piece at which its value is known best
    values: Float[Array, "pieces k"]
    spans: Float[Array, " pieces"]  # length over which each piece's slope was measured
    unit: float  # rounding error of one answer, per 1 + |t|
    scale: float  # how much the answers vary, per 1 + |t|
    reach: tuple[float, float]
    batches: int

    def at(self, piece: Array, t: Array) -> Float[Array, "n k"]:
        """Values of the given pieces' lines at the given times."""
        rise = self.slopes[piece] * (t - self.anchors[piece])[:, None]
        return np.asarray(self.values[piece] + rise)


class NotPiecewiseAffine(Exception):
    """The answers along the line have a jump, or bend everywhere: `t` is where, `value` the
    answer there, `expected` what a continuous piecewise affine function would have answered."""

    def __init__(self, message: str, t: float, value: Array, expected: Array) -> None:
        super().__init__(message)
        self.t, self.value, self.expected = t, value, expected


class BendsEverywhere(NotPiecewiseAffine):
    """The answers bend at more places than a network of ReLUs would."""


class LessExact(Exception):
    """The answers have an error of `noise`, more than was assumed."""

    def __init__(self, noise: float) -> None:
        super().__init__(f"the answers are exact to {noise:.2g} only")
        self.noise = noise


def search_line(
    ask: Ask,
    relative: float,
    floor: float,
    reach: tuple[float, float],
    *,
    bends: float = 0.0,
    options: LineSearchOptions | None = None,
) -> LineFit:
    """Finds all breakpoints between the ends of `reach`.

    `relative` is the stated (or best possible) rounding error of an answer relative to the scale
    of the answers, `floor` an absolute error per 1 + |t| below which nothing is a breakpoint.
    Changes of slope up to `bends` are errors of what was taken off the answers."""
    options = options or LineSearchOptions()
    low, high = reach
    near = min(1.0, NEAR / FAR if max(-low, high) >= FAR else 1 - options.step)
    inner = options.step * min(1.0, -low, high)
    times = np.array([low, low * near, -inner, 0.0, inner, high * near, high])
    values = ask(times)
    scale = float((np.abs(values).max(axis=1) / (1 + np.abs(times))).max())
    moves = np.linalg.norm(values - values[3], axis=1) / (1 + np.abs(times))
    bend = float(np.abs(values[2] - 2 * values[3] + values[4]).max())
    if bend > 6 * max(relative * scale, floor):  # more than rounding, if it is no breakpoint
        relative = max(relative, measure_rounding(ask, inner) / max(scale, TINY))
    noise = max(relative * scale, floor, TINY)
    try:
        search = LineSearch(ask, LineEvidence(noise, bends), reach, options)
        search.begin(times, values)
    except LessExact as seen:
        search = LineSearch(ask, LineEvidence(seen.noise, bends), reach, options, measured=True)
        search.begin(times, values)
    fit = fit_line(search, float(moves.max()), reach)
    if search.trusted and search.lengthen(fit):
        fit = fit_line(search, float(moves.max()), reach)
    return fit


def measure_rounding(ask: Ask, step: float) -> float:
    """The error of one answer, from second differences of eight answers that lie close together
    (a thousandth of the given step)."""
    values = ask(1e-3 * step * np.arange(8))
    second = np.abs(values[:-2] - 2 * values[1:-1] + values[2:])
    return float(np.median(second.max(axis=1)) / np.sqrt(6.0))


# -- affine pieces and what lies between them ---------------------------------------------------


@dataclass(eq=False)
class AffinePiece:
    """A stretch of the line on which the answers are affine, known by its points."""

    times: list[float]
    values: list[Array]
    implied: Array | None = None  # slope that follows from the neighbours (a single point)
    low: int = 0  # where the leftmost and rightmost points are in the lists
    high: int = 0
    before: "AffinePiece | None" = None  # a neighbour whose line runs through the leftmost point
    after: "AffinePiece | None" = None  # a neighbour whose line runs through the rightmost point

    def __post_init__(self) -> None:
        self.times = [float(t) for t in self.times]
        order = np.argsort(self.times)
        self.low, self.high = int(order[0]), int(order[-1])

    @property
    def left(self) -> float:
        return self.times[self.low]

    @property
    def right(self) -> float:
        return self.times[self.high]

    @property
    def span(self) -> float:
        return self.right - self.left

    @property
    def checked(self) -> bool:
        """Whether more than two answers (or the neighbours) speak for the line."""
        return len(self.times) > 2 or self.implied is not None

    @property
    def slope(self) -> Array:
        if self.implied is not None:
            return self.implied
        return np.asarray((self.values[self.high] - self.values[self.low]) / self.span)

    def at(self, t: float) -> Array:
        near = self.low if abs(t - self.left) < abs(t - self.right) else self.high
        return self.values[near] + self.slope * (t - self.times[near])

    def add(self, t: float, value: Array) -> None:
        """A further point on the line; it replaces what the neighbours imply."""
        if self.implied is not None:
            self.times, self.values, self.implied = self.times[:1], self.values[:1], None
            self.low = self.high = 0
        self.times.append(float(t))
        self.values.append(value)
        if t < self.left:
            self.low = len(self.times) - 1
        if t > self.right:
            self.high = len(self.times) - 1


def middle(a: float, b: float) -> float:
    """The middle of an interval as a Cauchy law sees it."""
    if b - a < 1:
        return (a + b) / 2
    return float(np.tan((np.arctan(a) + np.arctan(b)) / 2))


def is_dense(jump: Array) -> bool:
    """Whether at most one entry vanishes. Two neurons that reach the same few outputs only can
    have parallel jumps, and then lines that meet prove nothing."""
    sizes = np.abs(jump)
    return int((sizes <= 1e-7 * sizes.max()).sum()) <= 1


def split_beside(a: float, b: float, t: float | None) -> float:
    """Where to split an interval whose lines do not cross well inside.

    Two close breakpoints of opposite sign have the crossing beside them, not between them: a
    crossing near an end says that they are near that end, within eight times its distance. At least
    a hundredth of half the interval is cut off."""
    centre = middle(a, b)
    if t is None:
        return centre
    if abs(t - a) < abs(t - b):
        return min(centre, a + max(8 * abs(t - a), 0.01 * (centre - a)))
    return max(centre, b - max(8 * abs(t - b), 0.01 * (b - centre)))


def lies_inside(a: float, b: float, t: float | None) -> bool:
    return t is not None and well_inside(a, b, t)


def well_inside(a: float, b: float, t: float) -> bool:
    """Whether t lies between a and b, and not within 1% (in arctan t) of either: an end of a piece
    that hides a breakpoint is where its false line crosses the true one."""
    if not a < t < b:
        return False
    low, high, angle = np.arctan([a, b, t])
    margin = 0.01 * (high - low)
    return bool(angle - low > margin and high - angle > margin)


# -- what two pieces prove ----------------------------------------------------------------------


@dataclass(frozen=True)
class LineEvidence:
    """`unit` is the error of an answer at t, divided by 1 + |t|."""

    unit: float
    bends: float = 0.0  # changes of slope below this are no breakpoints

    def tolerance(self, t: float) -> float:
        return TOLERANCE * self.unit * (1 + abs(t))

    def slack(self, piece: AffinePiece, t: float) -> float:
        """Allowed distance of an answer at t from the line of a piece."""
        near, far = self.tolerance(piece.left), self.tolerance(piece.right)
        if t > piece.right:
            near, far = far, near
        beyond = max(piece.left - t, t - piece.right, 0.0)
        rounding = self.tolerance(t) + near + beyond / piece.span * (near + far)
        return rounding + self.bends * beyond

    def on(self, piece: AffinePiece, t: float, value: Array) -> bool:
        return bool(np.linalg.norm(value - piece.at(t)) <= self.slack(piece, t))

    def agree(self, left: AffinePiece, right: AffinePiece) -> bool:
        """Whether both lines run through the other's nearest point: no breakpoint between them."""
        return self.on(right, left.right, left.values[left.high]) and self.on(
            left, right.left, right.values[right.low]
        )

    def meet(self, left: AffinePiece, right: AffinePiece, t: float) -> bool:
        """Whether the two lines meet at t; numbers always do."""
        gap = float(np.linalg.norm(left.at(t) - right.at(t)))
        return bool(gap <= self.slack(left, t) + self.slack(right, t))

    def find_jump(self, left: AffinePiece, right: AffinePiece) -> float | None:
        """By how much the answers jump between two pieces that are next to a point, if they do:
        where they move ten times faster than on both sides together."""
        gap = float(np.linalg.norm(left.at(right.left) - right.values[right.low]))
        steep = float(np.linalg.norm(left.slope) + np.linalg.norm(right.slope))
        allowed = self.slack(left, right.left) + 10 * steep * (right.left - left.right)
        return gap if gap > allowed else None

    def proves_one(self, left: AffinePiece, right: AffinePiece, t: float) -> bool:
        """Whether lines of vectors that meet at t leave no room for more than one breakpoint."""
        room = min(t - left.right, right.left - t)
        effect = float(np.linalg.norm(right.slope - left.slope)) * room
        allowed = self.slack(left, t) + self.slack(right, t)
        return bool(allowed <= PROOF * effect) and is_dense(right.slope - left.slope)

    def proves_two(
        self, left: AffinePiece, right: AffinePiece, s: float, value: Array
    ) -> AffinePiece | None:
        """The piece through one vector answer between two breakpoints, if two explain it.

        The distances from the two lines point along the two jumps, and the jumps add up to the
        difference of the slopes: two unknown factors against k equations."""
        rise, fall = value - left.at(s), value - right.at(s)
        bend = right.slope - left.slope
        basis = np.stack([rise, fall], axis=1)
        factors, *_ = np.linalg.lstsq(basis, bend)
        if not (factors > 0).all():
            return None
        first, second = s - 1 / factors[0], s + 1 / factors[1]
        if not (well_inside(left.right, s, first) and well_inside(s, right.left, second)):
            return None
        off = float(np.linalg.norm(basis @ factors - bend))
        allowed = factors[0] * self.slack(left, s) + factors[1] * self.slack(right, s)
        for piece in (left, right):
            allowed += (self.tolerance(piece.left) + self.tolerance(piece.right)) / piece.span
        effect = min(np.linalg.norm(rise) * factors[0], np.linalg.norm(fall) * factors[1])
        if not off <= allowed <= PROOF * effect or not (is_dense(rise) and is_dense(fall)):
            return None
        slope = left.slope + factors[0] * rise
        step = 0.3 * min(s - first, second - s)
        return AffinePiece([s, s + step], [value, value + step * slope], implied=slope)


def find_crossing(left: AffinePiece, right: AffinePiece) -> float | None:
    """Where the two lines come closest; None where they are parallel."""
    bend = right.slope - left.slope
    size = float(bend @ bend)
    if size == 0:
        return None
    a = left.right
    return a + float((left.values[left.high] - right.at(a)) @ bend) / size


def is_generic(pieces: list[AffinePiece]) -> bool:
    """Whether the jumps span enough dimensions for a meeting of two lines to be a proof."""
    rows = []
    for left, right in pairwise(pieces):
        rows += [right.slope - left.slope, left.at(0.0) - right.at(0.0)]
    table = np.array(rows)
    if table.shape[1] < 3:
        return False
    norms = np.linalg.norm(table, axis=1)
    if not norms.all():
        return False
    values = np.linalg.svd(table / norms[:, None], compute_uv=False)
    return bool((values > PROOF).sum() >= 3)


# -- the search ---------------------------------------------------------------------------------

Pair = tuple[AffinePiece, AffinePiece]
Request = Generator[list[float], list[Array], list[Pair]]
Answer = Generator[list[float], list[Array], "AffinePiece | Step"]


class Step(Enum):
    """What a query about an interval led to, where it did not lead to a new piece."""

    SETTLED = "the breakpoints inside are known"
    SHRUNK = "one of the two pieces has grown into the interval"


@dataclass(eq=False)
class LineSearch:
    """The accumulator of one line search."""

    ask: Ask
    evidence: LineEvidence
    reach: tuple[float, float]
    options: LineSearchOptions
    suspicious: bool = False  # something was seen that rounding would explain
    measured: bool = False  # the rounding has been measured
    crowd: int = 0  # intervals that wait for an answer
    trusted: bool = False  # two lines of vectors that meet prove a breakpoint
    batches: int = 0
    queries: int = 0
    found: int = 0
    merged: list[Pair] = field(default_factory=list)
    pieces: list[AffinePiece] = field(default_factory=list)

    @property
    def patient(self) -> bool:
        """Whether to spend a batch in order to save queries."""
        return self.batches < self.options.patience and self.crowd < self.options.crowd

    @property
    def late(self) -> bool:
        """Whether to spend queries in order to be done."""
        return self.batches >= self.options.late and self.crowd < 14

    def begin(self, times: Array, values: Array) -> None:
        """Settles all intervals between the first three pieces."""
        start = AffinePiece(times[3:5].tolist(), list(values[3:5]))
        if self.evidence.on(start, times[2], values[2]):
            start.add(float(times[2]), values[2])
        first, last = (
            AffinePiece(times[i : i + 2].tolist(), list(values[i : i + 2])) for i in (0, 5)
        )
        self.pieces = [first, start, last]
        self.trusted = self.options.trusting and is_generic(self.pieces)
        self.run([(first, start), (start, last)])

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
        """Raises where the answers are less exact than was thought. Far more queries than
        breakpoints explain, or intervals that shrink to points, are a reason to measure that."""
        wasteful = self.queries > 200 + 12 * self.found
        if self.measured or not (wasteful or self.suspicious):
            return
        self.measured = True
        step = self.options.step * min(1.0, -self.reach[0], self.reach[1])
        noise = measure_rounding(self.ask, step)
        if noise > 2 * self.evidence.unit:
            raise LessExact(noise)

    def refuse_smooth(self) -> None:
        """Raises where far more queries were asked than breakpoints can explain, with the answer
        that shows it best: between the two neighbours whose lines lie furthest apart."""
        if self.queries <= self.options.smooth_queries + 50 * self.found:
            return

        def apart(pair: Pair) -> float:
            t = (pair[0].right + pair[1].left) / 2
            return float(np.linalg.norm(pair[0].at(t) - pair[1].at(t))) / (1 + abs(t))

        ordered = sorted(self.pieces, key=lambda piece: piece.left)
        pairs = sorted(pairwise(ordered), key=apart)[-16:]
        times = np.array([(left.right + right.left) / 2 for left, right in pairs])
        seen = []
        for t, value, pair in zip(times, self.ask(times), pairs, strict=True):
            lines = [piece.at(t) for piece in pair]
            gaps = [float(np.linalg.norm(value - line)) for line in lines]
            near = int(np.argmin(gaps))
            seen.append((gaps[near] / (1 + abs(t)), float(t), value, lines[near]))
        _, t, value, expected = max(seen, key=lambda entry: entry[0])
        raise BendsEverywhere(
            f"after {self.queries} answers along a line only {self.found} breakpoints are certain: "
            "the answers bend everywhere (a smooth activation?)",
            t,
            value,
            expected,
        )

    def resolve(self, left: AffinePiece, right: AffinePiece) -> Request:
        """Settles what lies between two pieces; returns the intervals this opens."""
        step: AffinePiece | Step
        while True:
            a, b = left.right, right.left
            if self.too_short(left, right) is not None:
                step = yield from self.grow(left, right)
            elif self.evidence.agree(left, right):
                self.merged.append((left, right))
                return []
            elif b - a <= POINT_WIDTH * (1 + min(abs(a), abs(b))):
                self.accept_point(left, right)
                return []
            elif (false := self.take_point(left, right)) is not None:
                return (yield from self.dissolve(false))
            else:
                t = find_crossing(left, right)
                if self.late and not lies_inside(a, b, t):
                    return (yield from self.scatter(left, right, t))
                step = yield from self.look_between(left, right, t)
            if step is Step.SETTLED:
                return []
            if isinstance(step, AffinePiece):
                self.pieces.append(step)
                return [(left, step), (step, right)]

    def look_between(self, left: AffinePiece, right: AffinePiece, t: float | None) -> Answer:
        """One more answer between two pieces whose lines cross at t."""
        a, b = left.right, right.left
        if t is None or not well_inside(a, b, t):
            s = split_beside(a, b, t) if self.batches >= self.options.patience else middle(a, b)
            return (yield from self.split(left, right, s))
        if not self.evidence.meet(left, right, t):
            return (yield from self.split(left, right, t))
        if self.trusted and self.evidence.proves_one(left, right, t):
            self.found += 1
            return Step.SETTLED
        return (yield from self.check(left, right, t))

    def too_short(self, left: AffinePiece, right: AffinePiece) -> AffinePiece | None:
        """The piece that is known over too short a stretch to say anything across the interval."""
        width = right.left - left.right
        point = width <= POINT_WIDTH * (1 + min(abs(left.right), abs(right.left)))
        if not self.options.reliable or point:
            return None
        short = left if left.span <= right.span else right
        return short if width > self.options.reliable * short.span else None

    def grow(self, left: AffinePiece, right: AffinePiece) -> Answer:
        """One more answer on the shorter of two lines, as far as it can be relied on; where it
        is off the line, a new piece begins."""
        a, b = left.right, right.left
        short = self.too_short(left, right)
        onward = 1.0 if short is left else -1.0
        far = min(self.options.reliable * (left if short is left else right).span, (b - a) / 2)
        s = a + far if short is left else b - far
        (value,) = yield [s]
        grown = left if short is left else right
        if self.evidence.on(grown, s, value):
            grown.add(s, value)
            return Step.SHRUNK
        t = s + onward * self.options.step * far
        (partner,) = yield [t]
        return AffinePiece([s, t], [value, partner])

    def take_point(self, left: AffinePiece, right: AffinePiece) -> AffinePiece | None:
        """A pair of points that a neighbour's line enters has a breakpoint between its two points:
        the neighbour takes the point; the pair is returned."""
        if not right.checked and self.evidence.on(left, right.left, right.values[right.low]):
            left.add(right.left, right.values[right.low])
            right.before = left
            return right
        if not left.checked and self.evidence.on(right, left.right, left.values[left.high]):
            right.add(left.right, left.values[left.high])
            left.after = right
            return left
        return None

    def dissolve(self, false: AffinePiece) -> Request:
        """Once both points of a pair are taken, the interval between the takers is opened in its
        place. At an end of the line the far point gets a tangent of its own."""
        end = self.far_end(false)
        outer = false.after if end == false.left else false.before
        if end is not None and outer is not None:
            inward = end - np.copysign(0.05 * false.span, end)
            (value,) = yield [inward]
            known = false.values[false.times.index(end)]
            fresh = AffinePiece([end, inward], [known, value])
            self.pieces.remove(false)
            self.pieces.append(fresh)
            return [(fresh, outer) if end < 0 else (outer, fresh)]
        if false.before is None or false.after is None:
            return []
        self.pieces.remove(false)
        return [(false.before, false.after)]

    def far_end(self, piece: AffinePiece) -> float | None:
        """The end of the line, if the piece reaches it."""
        low, high = self.reach
        return low if piece.left == low else high if piece.right == high else None

    def accept_point(self, left: AffinePiece, right: AffinePiece) -> None:
        """An interval that is a point holds breakpoints if the lines meet there, else a jump."""
        a, b = left.right, right.left
        if (gap := self.evidence.find_jump(left, right)) is not None:
            raise NotPiecewiseAffine(
                f"the answers jump by {gap:.3g} within a step of {b - a:.1g}",
                b,
                right.values[right.low],
                left.at(b),
            )
        self.found += 1
        self.suspicious = True

    def check(self, left: AffinePiece, right: AffinePiece, t: float) -> Answer:
        """Answers on both sides of a supposed breakpoint; a new piece where they refute it."""
        room = min(t - left.right, right.left - t)
        bend = float(np.linalg.norm(right.slope - left.slope))
        slack = self.evidence.slack(left, t) + self.evidence.slack(right, t)
        # the checks must be where the two lines are eight tolerances apart, and well inside
        side = max(self.options.side * room, 8 * slack / bend)
        if side > room / 4:
            if self.options.reliable and left.checked and right.checked:
                self.found += 1  # as much as the answers' digits can say
                return Step.SETTLED
            return (yield from self.split(left, right, middle(left.right, right.left)))
        one, two = t - side, t + side
        tangent = self.options.step * room
        first, *more = yield ([one] if self.patient else [one, two])
        if self.evidence.on(right, one, first):
            right.add(one, first)
            return Step.SHRUNK
        if not self.evidence.on(left, one, first):
            (partner,) = yield [one - tangent]
            return AffinePiece([one - tangent, one], [partner, first])
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
        return AffinePiece([two, two + tangent], [second, partner])

    def split(self, left: AffinePiece, right: AffinePiece, s: float) -> Answer:
        """An answer inside, at s: which piece does it belong to?"""
        a, b = left.right, right.left
        step = (max(0.02, self.options.step) if self.trusted else self.options.step) * min(
            s - a, b - s, 1 + abs(s)
        )
        first, *more = yield ([s] if self.patient else [s, s + step])
        for piece in (left, right):
            if self.evidence.on(piece, s, first):
                piece.add(s, first)
                return Step.SHRUNK
        between = self.evidence.proves_two(left, right, s, first) if self.trusted else None
        if between is not None:
            self.pieces.append(between)
            self.found += 2
            return Step.SETTLED
        if not more:
            more = yield [s + step]
        return AffinePiece([s, s + step], [first, more[0]])

    def scatter(self, left: AffinePiece, right: AffinePiece, t: float | None) -> Request:
        """Several tangents inside at once: for the last few intervals, which would otherwise take
        one batch after the other."""
        a, b = left.right, right.left
        places = {split_beside(a, b, t), *(a + (b - a) * np.array([0.03, 0.15, 0.5, 0.85, 0.97]))}
        spots = sorted(float(s) for s in places)
        steps = [self.options.step * min(s - a, b - s, 1 + abs(s)) for s in spots]
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
                fresh = AffinePiece([s, s + step], [first, second])
                pieces.append(fresh)
                self.pieces.append(fresh)
        pieces.append(right)
        return list(pairwise(pieces))

    def lengthen(self, fit: LineFit) -> bool:
        """One more answer on each short line, as far from its others as the breakpoints allow;
        whether there were any.

        Breakpoints that are proven by lines that meet leave lines which are known by two answers
        close together; everything that follows would inherit their error."""
        wanted: list[tuple[AffinePiece, float]] = []
        groups = group_pieces(self)
        for i, group in enumerate(groups):
            t = choose_further(fit, i, group, last=len(groups) - 1)
            if t is not None:
                wanted.append((group[0], t))
        if not wanted:
            return False
        answers = self.ask(np.array([t for _, t in wanted]))
        self.batches += 1
        for (piece, t), answer in zip(wanted, answers, strict=True):
            if self.evidence.on(piece, t, answer):
                piece.add(t, answer)
        return True


# -- from answers to lines ----------------------------------------------------------------------


def choose_further(line: LineFit, i: int, group: list[AffinePiece], last: int) -> float | None:
    """Where to ask once more about piece i, if that is worth a query."""
    if i in (0, last) or len(group) > 1:
        return None
    piece, (a, b) = group[0], line.breakpoints[i - 1 : i + 1]
    known = piece.span
    if piece.implied is not None:
        s = piece.times[0]
        known = min(s - a, b - s)
        far = b - 0.05 * (b - a) if b - s > s - a else a + 0.05 * (b - a)
        length = abs(far - s)
    else:
        ends = a + 0.05 * (b - a), b - 0.05 * (b - a)
        far = ends[0] if piece.right - ends[0] > ends[1] - piece.left else ends[1]
        length = max(piece.right - far, far - piece.left)
    worth_it = known < 3e-3 and length > 4 * known  # a short line that would become much longer
    return float(far) if worth_it else None


def fit_line(search: LineSearch, scale: float, reach: tuple[float, float]) -> LineFit:
    """Each piece's line through all its answers, breakpoints where neighbouring lines cross."""
    groups = group_pieces(search)
    lines = [fit_weighted(group) for group in groups]
    for i, group in enumerate(groups):
        if len(group) == 1 and group[0].implied is not None and 0 < i < len(groups) - 1:
            lines[i] = fit_implied(group[0], lines[i - 1], lines[i + 1])
    anchors = np.array([line[0] for line in lines])
    values = np.array([line[1] for line in lines])
    slopes = np.array([line[2] for line in lines])
    spans = np.array([measure_span(group) for group in groups])
    jumps = np.diff(slopes, axis=0)
    breakpoints = np.zeros(len(jumps))
    for i, jump in enumerate(jumps):
        a = max(piece.right for piece in groups[i])
        b = min(piece.left for piece in groups[i + 1])
        gap = values[i] + slopes[i] * (a - anchors[i])
        gap = gap - values[i + 1] - slopes[i + 1] * (a - anchors[i + 1])
        size = float(jump @ jump)
        t = a + float(gap @ jump) / size if size > 0 else a
        breakpoints[i] = min(max(t, a), b)
    return LineFit(
        breakpoints,
        jumps,
        slopes,
        anchors,
        values,
        spans,
        search.evidence.unit,
        scale,
        reach,
        search.batches,
    )


def measure_span(group: list[AffinePiece]) -> float:
    return max(piece.right for piece in group) - min(piece.left for piece in group)


def group_pieces(search: LineSearch) -> list[list[AffinePiece]]:
    """Pieces in order, those between which no breakpoint was found taken together."""
    ordered = sorted(search.pieces, key=lambda piece: piece.left)
    joined = {(id(a), id(b)) for a, b in search.merged}
    groups: list[list[AffinePiece]] = []
    for piece in ordered:
        if groups and (id(groups[-1][-1]), id(piece)) in joined:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


FittedLine = tuple[float, Array, Array]  # anchor, value there, slope


def fit_weighted(group: list[AffinePiece]) -> FittedLine:
    """Least squares with errors that grow like 1 + |t|."""
    times = np.array([t for piece in group for t in piece.times])
    values = np.array([value for piece in group for value in piece.values])
    weights = 1 / (1 + np.abs(times)) ** 2
    weights /= weights.sum()
    anchor = float(weights @ times)
    centred = times - anchor
    slope = (weights * centred) @ (values - weights @ values) / float(weights @ centred**2)
    return anchor, weights @ values, slope


def fit_implied(piece: AffinePiece, left: FittedLine, right: FittedLine) -> FittedLine:
    """The line through one answer between two breakpoints, from its neighbours' fitted lines."""
    s, value = piece.times[0], piece.values[0]
    rise = value - left[1] - left[2] * (s - left[0])
    fall = value - right[1] - right[2] * (s - right[0])
    factors, *_ = np.linalg.lstsq(np.stack([rise, fall], axis=1), right[2] - left[2])
    ends = left[2] + factors[0] * rise, right[2] - factors[1] * fall
    return s, value, (ends[0] + ends[1]) / 2
