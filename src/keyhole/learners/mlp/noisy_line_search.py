"""A line through a piecewise affine box whose answers have few digits: kinks by statistics.

Two answers close together say little where the seventh digit is rounded. Here three or more
neighbouring answers that lie on one line up to rounding make a *run*, fitted by least squares with
its own error; between two neighbouring runs, all gaps at once, one batch per round:

1. The lines cross inside the gap, up to the error of the crossing: a single kink would sit there.
   An answer on either side of it, as near as that error allows, shrinks the gap to nothing.
2. They cross elsewhere: something is hidden in the gap; three answers inside.
3. Answers in the gap that belong to no run: one more beside each.

What is left are kinks closer together than the answers' digits can tell: they pass for one.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.line_search import Line
from keyhole.learners.mlp.pieces import Ask, NotPiecewiseAffine, measured_rounding

GRID = 33  # first answers, spread like the crossings of random planes (a Cauchy law),
FAR_OUT = (30.0, 100.0, 300.0, 1e3, 3e3, 1e4)  # and beyond: a plane is missed with p < 1e-4
CLUSTER_STEP = 0.02  # length of the stretch on which rounding is measured
SUPPORT = 3  # answers that make a run: one more than a line needs
SAFETY = 8.0  # rounding errors within which an answer is on a line
CROSSING_SAFETY = 4.0  # errors of a crossing within which a kink is looked for
SIDE = 1e-3  # nearest answers to a kink, relative to the shorter of its two runs
SETTLED = 3.0  # gap, in units of that distance, which is as good as closed
EDGE = 0.2  # distance from the ends of a gap, in the same units, that makes an answer new
NARROW = 3e-6  # relative width at which a gap is a point: inputs are rounded, too
ROUNDS = 40  # batches; typical are 10 to 20
MOST_KINKS = 500  # more than that bend everywhere, as far as so few digits can tell
QUARTERS = (0.25, 0.5, 0.75)


@dataclass(frozen=True, eq=False)
class Run:
    """Answers `first` to `stop` on one line, by weighted least squares."""

    first: int
    stop: int
    anchor: float
    value: Float[Array, " k"]
    slope: Float[Array, " k"]
    weight: float  # of all answers together
    spread: float  # the same times squared distance from the anchor

    def at(self, t: float) -> Array:
        return np.asarray(self.value + self.slope * (t - self.anchor))

    def error(self, t: float) -> float:
        return float(np.sqrt(1 / self.weight + (t - self.anchor) ** 2 / self.spread))


@dataclass(eq=False)
class RoughSearch:
    """All answers along the line, in order. `unit` is their error, divided by 1 + |t|."""

    ask: Ask
    times: Float[Array, " n"]
    values: Float[Array, "n k"]
    unit: float
    batches: int = 1

    def add(self, fresh: Float[Array, " n"]) -> None:
        values = self.ask(fresh)
        self.batches += 1
        order = np.argsort(np.append(self.times, fresh))
        self.times = np.append(self.times, fresh)[order]
        self.values = np.concatenate([self.values, values])[order]

    def rounding(self, t: Array | float) -> Array:
        return np.asarray(self.unit * (1 + np.abs(t)))

    def fit(self, first: int, stop: int) -> Run:
        times, values = self.times[first:stop], self.values[first:stop]
        weights = self.rounding(times) ** -2.0
        total = float(weights.sum())
        anchor, value = float(weights @ times) / total, weights @ values / total
        offsets = times - anchor
        spread = float(weights @ offsets**2)
        slope = (weights * offsets) @ (values - value) / spread
        return Run(first, stop, anchor, value, slope, total, spread)

    def holds(self, run: Run) -> bool:
        """Whether all answers of a run are on its line."""
        times = self.times[run.first : run.stop]
        lines = run.value + np.outer(times - run.anchor, run.slope)
        off = np.linalg.norm(self.values[run.first : run.stop] - lines, axis=1)
        return bool((off <= SAFETY * self.rounding(times)).all())

    def runs(self) -> list[Run]:
        """From left to right, each as long as it can be."""
        found: list[Run] = []
        first = 0
        while first + SUPPORT <= len(self.times):
            run = self.fit(first, first + SUPPORT)
            if not self.holds(run):
                first += 1
                continue
            while run.stop < len(self.times) and self.continues(run):
                longer = self.fit(run.first, run.stop + 1)
                if not self.holds(longer):
                    break
                run = longer
            found.append(run)
            first = run.stop
        return found

    def continues(self, run: Run) -> bool:
        t = float(self.times[run.stop])
        off = float(np.linalg.norm(self.values[run.stop] - run.at(t)))
        return off <= SAFETY * float(np.hypot(self.rounding(t), run.error(t)))

    def crossing(self, left: Run, right: Run) -> tuple[float, float]:
        """Where two lines come closest, and how far off that may be."""
        bend = right.slope - left.slope
        square = max(float(bend @ bend), TINY)
        t = left.anchor + float((left.value - right.at(left.anchor)) @ bend) / square
        error = float(np.hypot(left.error(t), right.error(t))) / np.sqrt(square)
        return t, CROSSING_SAFETY * error

    def apart(self, left: Run, right: Run, t: float) -> float:
        """Distance of two lines, in their errors."""
        gap = float(np.linalg.norm(left.at(t) - right.at(t)))
        return gap / float(np.hypot(left.error(t), right.error(t)))

    def length(self, run: Run) -> float:
        return float(self.times[run.stop - 1] - self.times[run.first])

    def wanted(self, left: Run, right: Run) -> list[float]:
        """What to ask between two neighbouring runs; nothing if that is settled."""
        low, high = float(self.times[left.stop - 1]), float(self.times[right.first])
        if high - low <= NARROW * (1 + min(abs(low), abs(high))):
            return []
        if right.first > left.stop:
            edges = self.times[left.stop - 1 : right.first + 1]
            return [s for a, b in pairwise(edges) for s in between(float(a), float(b), (0.5,))]
        if max(self.apart(left, right, low), self.apart(left, right, high)) <= SAFETY:
            return []  # the answers' digits do not say more
        t, off = self.crossing(left, right)
        if not low - off <= t <= high + off:
            return between(low, high, QUARTERS)
        room = min(self.length(left), self.length(right), 1 + abs(t))
        side = max(off, SIDE * room)
        spots = [s for s in (t - side, t + side) if low + EDGE * side < s < high - EDGE * side]
        return spots if high - low > SETTLED * side else []

    def resolved(self) -> list[Run]:
        for _ in range(ROUNDS):
            runs = self.runs()
            if len(runs) > MOST_KINKS:
                raise bends_everywhere(self.times, self.values)
            wanted = [s for left, right in pairwise(runs) for s in self.wanted(left, right)]
            fresh = np.setdiff1d(wanted, self.times)
            if len(fresh) == 0:
                break
            self.add(fresh)
        return self.joined(runs)

    def joined(self, runs: list[Run]) -> list[Run]:
        """Neighbours that turned out to lie on one line are one run."""
        found = runs[:1]
        for run in runs[1:]:
            both = self.fit(found[-1].first, run.stop)
            if self.holds(both):
                found[-1] = both
            else:
                found.append(run)
        return found


def rough_trace(ask: Ask, relative: float, floor: float) -> Line:
    """Finds the kinks of a line that the answers' digits can tell. `relative` is the stated
    rounding of an answer relative to the scale of the answers, `floor` an absolute one."""
    inner = np.tan(np.pi * (np.arange(1, GRID + 1) / (GRID + 1) - 0.5))
    times = np.sort(np.concatenate([inner, FAR_OUT, -np.array(FAR_OUT)]))
    values = ask(times)
    sizes = 1 + np.abs(times)
    scale = float((np.abs(values).max(axis=1) / sizes).max())
    unit = max(relative * scale, floor, measured_rounding(ask, CLUSTER_STEP), TINY)
    search = RoughSearch(ask, times, values, unit * np.sqrt(values.shape[1]), 2)
    runs = search.resolved()
    if not runs:
        raise bends_everywhere(search.times, search.values)
    kinks = [search.crossing(left, right)[0] for left, right in pairwise(runs)]
    ends = [search.times[run.stop - 1] for run in runs[:-1]]
    starts = [search.times[run.first] for run in runs[1:]]
    slopes = np.array([run.slope for run in runs])
    anchors = np.array([run.anchor for run in runs])
    return Line(
        np.clip(kinks, ends, starts) if kinks else np.zeros(0),
        np.diff(slopes, axis=0),
        slopes,
        anchors,
        np.array([run.value for run in runs]),
        np.sqrt([run.spread for run in runs]) * search.rounding(anchors),
        search.unit,
        float((np.linalg.norm(values - values[len(values) // 2], axis=1) / sizes).max()),
        (float(times[0]), float(times[-1])),
        search.batches,
    )


def between(low: float, high: float, shares: tuple[float, ...]) -> list[float]:
    """Times within a gap, spread as a Cauchy law has it where the gap is wide."""
    if high - low < 1:
        return [low + share * (high - low) for share in shares]
    ends = np.arctan([low, high])
    return [float(np.tan(ends[0] + share * (ends[1] - ends[0]))) for share in shares]


def bends_everywhere(times: Array, values: Array) -> NotPiecewiseAffine:
    """With the answer furthest from the chord of its neighbours."""
    shares = (times[1:-1] - times[:-2]) / (times[2:] - times[:-2])
    chords = values[:-2] + shares[:, None] * (values[2:] - values[:-2])
    i = int(np.argmax(np.linalg.norm(values[1:-1] - chords, axis=1)))
    message = f"{len(times)} answers along a line bend at more than {MOST_KINKS} places"
    return NotPiecewiseAffine(message, float(times[i + 1]), values[i + 1], chords[i])
