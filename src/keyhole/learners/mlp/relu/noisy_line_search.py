"""Breakpoints of a piecewise affine box whose answers have few digits, along a line.

Statement.  All breakpoints of a line that the answers' digits can tell are found.
Queries.    A grid like the crossings of random hyperplanes; then, all gaps at once, one batch per
            round. Two answers close together say little where the seventh digit is rounded: three
            or more neighbouring answers that lie on one line up to rounding make a *run*, fitted by
            least squares with its own error. Between two neighbouring runs:
            1. The lines cross inside the gap, up to the error of the crossing: a single breakpoint
               would sit there. An answer on either side of it, as near as that error allows,
               shrinks the gap to nothing.
            2. They cross elsewhere: something is hidden in the gap; three answers inside.
            3. Answers in the gap that belong to no run: one more beside each.
Algebra.    Weighted straight lines; neighbours cross at the breakpoints.
Fails.      Breakpoints closer together than the answers' digits can tell pass for one. Answers that
            bend everywhere are refused (NotPiecewiseAffine).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.relu.line_search import Ask, LineFit, NotPiecewiseAffine, measure_rounding
from keyhole.oracles.noise import REJECTION

SUPPORT = 3  # answers that make a run: one more than a line needs
MOST_BREAKPOINTS = 500  # more than that bend everywhere, as far as so few digits can tell


def search_noisy_line(ask: Ask, relative: float, floor: float) -> LineFit:
    """Finds the breakpoints of a line that the answers' digits can tell. `relative` is the stated
    rounding of an answer relative to the scale of the answers, `floor` an absolute one."""
    inner = np.tan(np.pi * (np.arange(1, 34) / 34 - 0.5))  # a Cauchy law's grid
    # times beyond the grid, so that a hyperplane is missed with a probability below 1e-4
    far_out = (30.0, 100.0, 300.0, 1e3, 3e3, 1e4)
    times = np.sort(np.concatenate([inner, far_out, -np.array(far_out)]))
    values = ask(times)
    sizes = 1 + np.abs(times)
    scale = float((np.abs(values).max(axis=1) / sizes).max())
    unit = max(relative * scale, floor, measure_rounding(ask, 0.02), TINY)
    search = NoisyLineSearch(ask, times, values, unit * np.sqrt(values.shape[1]), 2)
    runs = search.resolve()
    if not runs:
        raise bends_everywhere(search.times, search.values)
    breakpoints = [search.find_crossing(left, right)[0] for left, right in pairwise(runs)]
    ends = [search.times[run.stop - 1] for run in runs[:-1]]
    starts = [search.times[run.first] for run in runs[1:]]
    slopes = np.array([run.slope for run in runs])
    anchors = np.array([run.anchor for run in runs])
    return LineFit(
        np.clip(breakpoints, ends, starts) if breakpoints else np.zeros(0),
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
class NoisyLineSearch:
    """The accumulator: all answers along the line, in order. `unit` is their error, divided by
    1 + |t|."""

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

    def fit_run(self, first: int, stop: int) -> Run:
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
        return bool((off <= REJECTION * self.rounding(times)).all())

    def find_runs(self) -> list[Run]:
        """From left to right, each as long as it can be."""
        found: list[Run] = []
        first = 0
        while first + SUPPORT <= len(self.times):
            run = self.fit_run(first, first + SUPPORT)
            if not self.holds(run):
                first += 1
                continue
            while run.stop < len(self.times) and self.continues(run):
                longer = self.fit_run(run.first, run.stop + 1)
                if not self.holds(longer):
                    break
                run = longer
            found.append(run)
            first = run.stop
        return found

    def continues(self, run: Run) -> bool:
        t = float(self.times[run.stop])
        off = float(np.linalg.norm(self.values[run.stop] - run.at(t)))
        return off <= REJECTION * float(np.hypot(self.rounding(t), run.error(t)))

    def find_crossing(self, left: Run, right: Run) -> tuple[float, float]:
        """Where two lines come closest, and how far off that may be: four errors."""
        bend = right.slope - left.slope
        square = max(float(bend @ bend), TINY)
        t = left.anchor + float((left.value - right.at(left.anchor)) @ bend) / square
        error = float(np.hypot(left.error(t), right.error(t))) / np.sqrt(square)
        return t, 4 * error

    def apart(self, left: Run, right: Run, t: float) -> float:
        """Distance of two lines, in their errors."""
        gap = float(np.linalg.norm(left.at(t) - right.at(t)))
        return gap / float(np.hypot(left.error(t), right.error(t)))

    def length(self, run: Run) -> float:
        return float(self.times[run.stop - 1] - self.times[run.first])

    def choose_times(self, left: Run, right: Run) -> list[float]:
        """What to ask between two neighbouring runs; nothing if that is settled."""
        low, high = float(self.times[left.stop - 1]), float(self.times[right.first])
        if high - low <= 3e-6 * (1 + min(abs(low), abs(high))):
            return []  # inputs are rounded, too: such a gap is a point
        if right.first > left.stop:
            edges = self.times[left.stop - 1 : right.first + 1]
            return [
                s for a, b in pairwise(edges) for s in spread_between(float(a), float(b), (0.5,))
            ]
        if max(self.apart(left, right, low), self.apart(left, right, high)) <= REJECTION:
            return []  # the answers' digits do not say more
        t, off = self.find_crossing(left, right)
        if not low - off <= t <= high + off:
            return spread_between(low, high, (0.25, 0.5, 0.75))
        room = min(self.length(left), self.length(right), 1 + abs(t))
        side = max(off, 1e-3 * room)  # the nearest that answers come to a breakpoint
        spots = [s for s in (t - side, t + side) if low + 0.2 * side < s < high - 0.2 * side]
        return spots if high - low > 3 * side else []

    def resolve(self) -> list[Run]:
        for _ in range(40):  # batches; typical are 10 to 20
            runs = self.find_runs()
            if len(runs) > MOST_BREAKPOINTS:
                raise bends_everywhere(self.times, self.values)
            wanted = [s for left, right in pairwise(runs) for s in self.choose_times(left, right)]
            fresh = np.setdiff1d(wanted, self.times)
            if len(fresh) == 0:
                break
            self.add(fresh)
        return self.join_runs(runs)

    def join_runs(self, runs: list[Run]) -> list[Run]:
        """Neighbours that turned out to lie on one line are one run."""
        found = runs[:1]
        for run in runs[1:]:
            both = self.fit_run(found[-1].first, run.stop)
            if self.holds(both):
                found[-1] = both
            else:
                found.append(run)
        return found


def spread_between(low: float, high: float, shares: tuple[float, ...]) -> list[float]:
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
    message = f"{len(times)} answers along a line bend at more than {MOST_BREAKPOINTS} places"
    return NotPiecewiseAffine(message, float(times[i + 1]), values[i + 1], chords[i])
