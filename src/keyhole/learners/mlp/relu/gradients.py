"""Gradients of a piecewise affine box beside a line, and the normals of the hyperplanes it meets.

Statement.  Affine piece p of the line lies in one cell of the box, with gradient J_p. Crossing
            breakpoint j changes it by jump_j times the normal a_j (scaled so that
            a_j . direction = 1). All normals are found.
Queries.    One answer a step beside the line gives J_p . u: d - 1 per piece, and every gradient is
            shared by the two breakpoints at its ends. The steps are as large as the hyperplanes
            allow: one that crosses the line at t_k cuts the ray from t in direction u at
            |t - t_k| / |a_k . u|, and a_k . u is predicted from the directions measured before. An
            answer that did cross a hyperplane shows in the solved normals, at no cost, and is asked
            again with a shorter step.
Algebra.    With answers in R^k only *anchor* pieces are measured: the difference of two gradients
            holds up to k normals with known independent jumps, and least squares takes them apart.
Fails.      Between breakpoints that nearly coincide there is no room for a step: the error of the
            gradient there is large, and moves from one of the two neurons to the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.learners.mlp.relu.line_search import LineFit, middle

CROSSED = 0.9  # a predicted distance to a hyperplane, in steps, that means: it was crossed

AskPoints = Callable[[Float[Array, "n d"]], Float[Array, "n k"]]
Room = Callable[[Float[Array, "n d"], float], Float[Array, " n"]]


@dataclass(frozen=True, eq=False)
class Frame:
    """A line in input space and directions orthogonal to it, all of the direction's length."""

    origin: Float[Array, " d"]
    direction: Float[Array, " d"]
    across: Float[Array, "e d"]

    @classmethod
    def random(cls, origin: Array, direction: Array) -> "Frame":
        length = float(np.linalg.norm(direction))
        basis, _ = np.linalg.qr(np.column_stack([direction, np.eye(len(direction))]))
        return cls(origin, direction, length * basis[:, 1 : len(direction)].T)

    @property
    def width(self) -> int:
        return len(self.origin)

    def points(self, times: Array) -> Float[Array, "n d"]:
        return np.asarray(self.origin + np.asarray(times)[:, None] * self.direction)


@dataclass(frozen=True, eq=False)
class Gradients:
    """Gradients of the anchor pieces and the normals that follow, across the line."""

    anchors: Int[Array, " a"]  # indices of the measured pieces, first and last included
    table: Float[Array, "a e k"]  # J_p . u_i
    steps: Float[Array, "a e"]
    bases: Float[Array, "a e"]
    across: Float[Array, "n e"]  # a_j . u_i


def measure_gradients(
    ask: AskPoints, line: LineFit, frame: Frame, room: Room, *, thorough: bool = False
) -> Gradients:
    """Asks the gradients stage by stage. `room` says how many steps of the direction's length a
    point is away from the edge of the domain. If `thorough`, steps that turn out to have been
    needlessly short are repeated: where answers have few digits, they say nothing."""
    width = len(frame.across)
    length = float(np.linalg.norm(frame.direction))
    work = GradientTable.empty(ask, line, frame)
    sizes = np.linalg.norm(line.jumps, axis=1)
    typical = np.median(sizes) if len(sizes) else 1.0
    # a weak jump predicts a hyperplane that is nearly parallel to the line
    steep = np.maximum(1.0, typical / np.maximum(sizes, jump_errors(line)))
    done = 0

    def choose_steps(share: float) -> tuple[Array, Array]:
        base, free = choose_bases(line, work.anchors, steep)
        # in a bounded domain, hyperplanes that no line met may be near
        step = np.minimum(share * free, 0.05 * room(frame.points(base), length))
        return base, np.maximum(step, 1e-12 * (1 + np.abs(base)))

    stages = ((4, 0.12), (16, 0.18), (None, 0.22))  # directions, and step in units of the room
    for directions, share in stages:
        end = width if directions is None else min(width, directions)
        if end <= done:
            continue
        base, step = choose_steps(share)
        rows = np.repeat(np.arange(len(base)), end - done)
        columns = np.tile(np.arange(done, end), len(base))
        work.fill(rows, columns, base, step)
        done = end
        across = work.solve(done)
        off = across_errors(line, work.anchors, work.steps[:, :done], work.bases[:, :done])
        square = np.mean(across**2 - off**2, axis=1)
        steep = np.sqrt(np.maximum(square, 0.1**2))  # nearly parallel normals are not known to be
    if thorough:
        base, step = choose_steps(stages[-1][1])
        rows, columns = np.nonzero(work.steps < 0.3 * step[:, None])
        if len(rows):
            work.fill(rows, columns, base, step)
    across = work.repair()
    return Gradients(work.anchors, work.table, work.steps, work.bases, across)


@dataclass(frozen=True, eq=False)
class GradientTable:
    """The accumulator: derivatives J_p . u_i as they come in, with their steps and bases."""

    ask: AskPoints
    line: LineFit
    frame: Frame
    anchors: Int[Array, " a"]
    table: Float[Array, "a e k"]
    steps: Float[Array, "a e"]
    bases: Float[Array, "a e"]

    @classmethod
    def empty(cls, ask: AskPoints, line: LineFit, frame: Frame) -> "GradientTable":
        anchors = choose_anchors(line)
        shape = len(anchors), len(frame.across)
        table = np.zeros((*shape, line.slopes.shape[1]))
        return cls(ask, line, frame, anchors, table, np.zeros(shape), np.zeros(shape))

    def fill(self, rows: Array, columns: Array, base: Array, step: Array) -> None:
        """Asks entries from the given base and step of each anchor."""
        self.bases[rows, columns], self.steps[rows, columns] = base[rows], step[rows]
        self.ask_entries(rows, columns)

    def ask_entries(self, rows: Array, columns: Array) -> None:
        """One batch: the answers a step beside the line, as derivatives."""
        base, step = self.bases[rows, columns], self.steps[rows, columns]
        answers = self.ask(self.frame.points(base) + step[:, None] * self.frame.across[columns])
        known = self.line.at(self.anchors[rows], base)
        self.table[rows, columns] = (answers - known) / step[:, None]

    def solve(self, done: int | None = None) -> Float[Array, "n e"]:
        """Normals in the first directions, from the differences of neighbouring gradients."""
        return solve_normals(self.line, self.anchors, self.table[:, :done])

    def repair(self) -> Float[Array, "n e"]:
        """Asks again, with shorter steps, what crossed a hyperplane; the normals in the end."""
        across = self.solve()
        for _ in range(6):  # more means that hyperplanes are not where the line shows them
            off = across_errors(self.line, self.anchors, self.steps, self.bases)
            sure = np.maximum(np.abs(across) - 3 * off, 0.0)  # no evidence within three errors
            rows, columns = find_crossed(self.line, self.steps, self.bases, sure)
            if len(rows) == 0:
                break
            self.steps[rows, columns] *= 0.15
            self.ask_entries(rows, columns)
            across = self.solve()
        return across


def find_crossed(line: LineFit, steps: Array, bases: Array, across: Array) -> tuple[Array, Array]:
    """Entries whose step reaches a hyperplane, by the sizes of the normals that they led to."""
    hit = np.zeros(steps.shape, dtype=bool)
    for row in range(len(steps)):
        distance = np.abs(bases[row][None, :] - line.breakpoints[:, None])
        hit[row] = (across * steps[row] >= CROSSED * distance).any(axis=0)
    rows, columns = np.nonzero(hit)
    return rows, columns


def jump_errors(line: LineFit) -> Float[Array, " n"]:
    """Of the jumps along the line, by the lengths over which its slopes were measured."""
    slopes = line.unit * (1 + np.abs(line.anchors)) / line.spans
    return np.asarray(slopes[:-1] + slopes[1:])


def across_errors(line: LineFit, anchors: Array, steps: Array, bases: Array) -> Float[Array, "n e"]:
    """Of a_j . u_i, by the rounding of the answers."""
    slopes = line.unit * (1 + np.abs(bases)) / steps
    by_anchor = slopes[:-1] + slopes[1:]
    group = np.searchsorted(anchors, np.arange(len(line.breakpoints)), side="right") - 1
    return np.asarray(by_anchor[group] / np.linalg.norm(line.jumps, axis=1)[:, None])


def choose_bases(line: LineFit, anchors: Array, steep: Array) -> tuple[Array, Array]:
    """For each anchor piece the time with the most room relative to the rounding there."""
    low, high = line.reach
    bases, rooms = np.zeros(len(anchors)), np.zeros(len(anchors))
    for i, piece in enumerate(anchors):
        times = list_places(line, int(piece))
        times = times[(times >= low) & (times <= high)]
        if len(line.breakpoints) == 0:
            bases[i], rooms[i] = 0.0, 1.0
            continue
        free = (np.abs(times[:, None] - line.breakpoints) / steep).min(axis=1)
        best = int(np.argmax(free / (1 + np.abs(times) + free)))
        bases[i], rooms[i] = times[best], free[best]
    return bases, rooms


def list_places(line: LineFit, piece: int) -> Array:
    """Times inside a piece at which its gradient could be measured."""
    if len(line.breakpoints) == 0:
        return np.zeros(1)
    inside, beyond = np.array([0.2, 0.35, 0.5, 0.65, 0.8]), np.array([0.5, 1.0, 2.0, 5.0, 20.0])
    low, high = line.reach
    if piece == 0:
        first = line.breakpoints[0]
        return np.append(first - (1 + abs(first)) * beyond, first + (low - first) * inside)
    if piece == len(line.breakpoints):
        last = line.breakpoints[-1]
        return np.append(last + (1 + abs(last)) * beyond, last + (high - last) * inside)
    a, b = line.breakpoints[piece - 1], line.breakpoints[piece]
    return np.append(a + (b - a) * inside, middle(float(a), float(b)))


def choose_anchors(line: LineFit) -> Array:
    """Pieces to measure: the fewest, and the widest of these, such that the jumps between two
    neighbours are independent and fewer than the answer has numbers."""
    count, answer = line.jumps.shape
    if answer == 1 or count == 0:
        return np.arange(count + 1)
    most = answer if count <= answer else max(1, int(0.75 * answer))
    edges = np.concatenate([[-np.inf], line.breakpoints, [np.inf]])
    ends = np.arctan(edges)
    # a piece ten times narrower costs as much as a twentieth of a piece to be measured
    narrow = -np.log10(np.maximum(np.diff(ends) / np.pi, 1e-12)) * 0.05
    reachable = [count_independent(line.jumps[p : p + most]) for p in range(count)]
    cost = np.full(count + 1, np.inf)
    origin = np.zeros(count + 1, dtype=int)
    cost[0] = 0.0
    for p in range(count):
        stop = p + 1 + reachable[p]
        better = cost[p] + 1 + narrow[p + 1 : stop] < cost[p + 1 : stop]
        targets = np.arange(p + 1, stop)[better]
        cost[targets] = cost[p] + 1 + narrow[targets]
        origin[targets] = p
    path = [count]
    while path[-1] > 0:
        path.append(int(origin[path[-1]]))
    return np.array(path[::-1])


def count_independent(jumps: Array) -> int:
    """How many of the first jumps are safely independent (at least one)."""
    lengths = np.maximum(np.linalg.norm(jumps, axis=1), TINY)
    sines = np.abs(np.diag(np.linalg.qr((jumps / lengths[:, None]).T, mode="r")))
    weak = np.nonzero(sines < 0.05)[0]
    return max(1, int(weak[0])) if len(weak) else len(jumps)


def solve_normals(line: LineFit, anchors: Array, table: Array) -> Float[Array, "n e"]:
    """a_j . u_i from the differences of neighbouring gradients."""
    differences = np.diff(table, axis=0)
    if line.jumps.shape[1] == 1:
        return np.asarray(differences[:, :, 0] / line.jumps)
    across = np.zeros((len(line.breakpoints), table.shape[1]))
    for i, (start, stop) in enumerate(pairwise(anchors)):
        jumps = line.jumps[start:stop]
        across[start:stop] = np.linalg.lstsq(jumps.T, differences[i].T)[0]
    return across
