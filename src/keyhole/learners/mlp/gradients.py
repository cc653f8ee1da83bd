"""Queries beside a line: how the pieces of a piecewise affine box continue across it.

Piece p of the line lies in one cell of the box, with gradient J_p. Crossing kink j changes it by
jump_j times the normal a_j (scaled so that a_j . direction = 1). One answer a step beside the line
gives J_p . u; every gradient is shared by the two kinks at its ends.

The steps are as large as the planes allow: a plane that crosses the line at t_k cuts the ray from
t in direction u at |t - t_k| / |a_k . u|, and a_k . u is predicted from the directions measured
before. An answer that did cross a plane shows in the solved normals, at no cost, and is asked
again with a shorter step.

With answers in R^k only *anchor* pieces are measured: the difference of two gradients holds up to
k normals with known independent jumps, and least squares takes them apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.line_search import Line
from keyhole.learners.mlp.pieces import middle

STAGES = ((4, 0.12), (16, 0.18), (None, 0.22))  # directions, and step in units of the room
NEEDLESS = 0.3  # of what is possible in the end: a needlessly short step
CAUTION = 0.05  # step in a bounded domain relative to its edge: planes may be near that no line met
SHORTEST_STEP = 1e-12  # beside kinks that coincide there is no room; the result is worthless
CROSSED = 0.9  # a predicted distance to a plane, in steps, that means: the plane was crossed
CROSSED_SAFETY = 3.0  # errors of a normal that are no evidence of that
LEAST_STEEP = 0.1  # size of a normal beside the line, at least, where steps are chosen
SHORTER = 0.15  # the next step after a crossing
REPAIRS = 6  # rounds of repair; more means that the planes are not where the line shows them
FILL = 0.75  # share of k jumps that one difference of gradients has to take apart
NARROW_COST = 0.05  # of a piece ten times narrower, in pieces to be measured
NARROWEST = 1e-12  # width, as a share of the line, that costs no more if it is smaller still
INDEPENDENT = 0.05  # smallest sine between a jump and the ones before it in a group
END_ROOM = (0.5, 1.0, 2.0, 5.0, 20.0)  # places to try beyond the outermost kinks
INNER_ROOM = (0.2, 0.35, 0.5, 0.65, 0.8)  # and within an inner piece

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


@dataclass(eq=False)
class Gradients:
    """Gradients of the anchor pieces and the normals that follow, across the line."""

    anchors: Array  # indices of the measured pieces, first and last included
    table: Float[Array, "a e k"]  # J_p . u_i
    steps: Float[Array, "a e"]
    bases: Float[Array, "a e"]
    across: Float[Array, "n e"]  # a_j . u_i


def measure(
    ask: AskPoints, line: Line, frame: Frame, room: Room, *, thorough: bool = False
) -> Gradients:
    """Asks the gradients stage by stage. `room` says how many steps of the direction's length a
    point is away from the edge of the domain. If `thorough`, steps that turn out to have been
    needlessly short are repeated: where answers have few digits, they say nothing."""
    anchors = chosen_anchors(line)
    count, width = len(anchors), len(frame.across)
    length = float(np.linalg.norm(frame.direction))
    found = Gradients(
        anchors,
        table=np.zeros((count, width, line.slopes.shape[1])),
        steps=np.zeros((count, width)),
        bases=np.zeros((count, width)),
        across=np.zeros((len(line.kinks), width)),
    )
    sizes = np.linalg.norm(line.jumps, axis=1)
    typical = np.median(sizes) if len(sizes) else 1.0
    # a weak jump predicts a plane that is nearly parallel to the line
    steep = np.maximum(1.0, typical / np.maximum(sizes, jump_errors(line)))
    done = 0

    def longest(share: float) -> tuple[Array, Array]:
        base, free = best_bases(line, anchors, steep)
        step = np.minimum(share * free, CAUTION * room(frame.points(base), length))
        return base, np.maximum(step, SHORTEST_STEP * (1 + np.abs(base)))

    for directions, share in STAGES:
        end = width if directions is None else min(width, directions)
        if end <= done:
            continue
        base, step = longest(share)
        found.steps[:, done:end], found.bases[:, done:end] = step[:, None], base[:, None]
        rows, columns = np.meshgrid(np.arange(count), np.arange(done, end), indexing="ij")
        fill(ask, line, frame, found, rows.ravel(), columns.ravel())
        done = end
        found.across[:, :done] = solved(line, anchors, found.table[:, :done])
        off = across_errors(line, anchors, found.steps[:, :done], found.bases[:, :done])
        square = np.mean(found.across[:, :done] ** 2 - off**2, axis=1)
        steep = np.sqrt(np.maximum(square, LEAST_STEEP**2))
    if thorough:
        base, step = longest(STAGES[-1][1])
        short = np.nonzero(found.steps < NEEDLESS * step[:, None])
        if len(short[0]):
            found.steps[short], found.bases[short] = step[short[0]], base[short[0]]
            fill(ask, line, frame, found, *short)
            found.across = solved(line, anchors, found.table)
    repair(ask, line, frame, found)
    return found


def repair(ask: AskPoints, line: Line, frame: Frame, found: Gradients) -> None:
    """Asks again, with shorter steps, what crossed a plane."""
    anchors, steps, bases = found.anchors, found.steps, found.bases
    for _ in range(REPAIRS):
        off = across_errors(line, anchors, steps, bases)
        sure = np.abs(found.across) - CROSSED_SAFETY * off
        rows, columns = crossed(line, steps, bases, np.maximum(sure, 0.0))
        if len(rows) == 0:
            break
        steps[rows, columns] *= SHORTER
        fill(ask, line, frame, found, rows, columns)
        found.across = solved(line, anchors, found.table)


def fill(
    ask: AskPoints, line: Line, frame: Frame, found: Gradients, rows: Array, columns: Array
) -> None:
    """One batch: the answers a step beside the line, as derivatives."""
    base, step = found.bases[rows, columns], found.steps[rows, columns]
    answers = ask(frame.points(base) + step[:, None] * frame.across[columns])
    known = line.at(found.anchors[rows], base)
    found.table[rows, columns] = (answers - known) / step[:, None]


def crossed(line: Line, steps: Array, bases: Array, across: Array) -> tuple[Array, Array]:
    """Entries whose step reaches a plane, by the sizes of the normals they themselves led to."""
    hit = np.zeros(steps.shape, dtype=bool)
    for row in range(len(steps)):
        distance = np.abs(bases[row][None, :] - line.kinks[:, None])
        hit[row] = (across * steps[row] >= CROSSED * distance).any(axis=0)
    rows, columns = np.nonzero(hit)
    return rows, columns


def jump_errors(line: Line) -> Float[Array, " n"]:
    """Of the jumps along the line, by the lengths over which its slopes were measured."""
    slopes = line.unit * (1 + np.abs(line.anchors)) / line.spans
    return np.asarray(slopes[:-1] + slopes[1:])


def across_errors(line: Line, anchors: Array, steps: Array, bases: Array) -> Float[Array, "n e"]:
    """Of a_j . u_i, by the rounding of the answers."""
    slopes = line.unit * (1 + np.abs(bases)) / steps
    by_anchor = slopes[:-1] + slopes[1:]
    group = np.searchsorted(anchors, np.arange(len(line.kinks)), side="right") - 1
    return np.asarray(by_anchor[group] / np.linalg.norm(line.jumps, axis=1)[:, None])


def best_bases(line: Line, anchors: Array, steep: Array) -> tuple[Array, Array]:
    """For each anchor piece the time with the most room relative to the rounding there."""
    low, high = line.reach
    bases, rooms = np.zeros(len(anchors)), np.zeros(len(anchors))
    for i, piece in enumerate(anchors):
        times = places(line, int(piece))
        times = times[(times >= low) & (times <= high)]
        if len(line.kinks) == 0:
            bases[i], rooms[i] = 0.0, 1.0
            continue
        free = (np.abs(times[:, None] - line.kinks) / steep).min(axis=1)
        best = int(np.argmax(free / (1 + np.abs(times) + free)))
        bases[i], rooms[i] = times[best], free[best]
    return bases, rooms


def places(line: Line, piece: int) -> Array:
    """Times inside a piece at which its gradient could be measured."""
    if len(line.kinks) == 0:
        return np.zeros(1)
    low, high = line.reach
    if piece == 0:
        first = line.kinks[0]
        outside = first - (1 + abs(first)) * np.array(END_ROOM)
        return np.append(outside, first + (low - first) * np.array(INNER_ROOM))
    if piece == len(line.kinks):
        last = line.kinks[-1]
        outside = last + (1 + abs(last)) * np.array(END_ROOM)
        return np.append(outside, last + (high - last) * np.array(INNER_ROOM))
    a, b = line.kinks[piece - 1], line.kinks[piece]
    return np.append(a + (b - a) * np.array(INNER_ROOM), middle(float(a), float(b)))


def chosen_anchors(line: Line) -> Array:
    """Pieces to measure: the fewest, and the widest of these, such that the jumps between two
    neighbours are independent and fewer than the answer has numbers."""
    count, answer = line.jumps.shape
    if answer == 1 or count == 0:
        return np.arange(count + 1)
    most = answer if count <= answer else max(1, int(FILL * answer))
    edges = np.concatenate([[-np.inf], line.kinks, [np.inf]])
    ends = np.arctan(edges)
    narrow = -np.log10(np.maximum(np.diff(ends) / np.pi, NARROWEST)) * NARROW_COST
    reachable = [independent_jumps(line.jumps[p : p + most]) for p in range(count)]
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


def independent_jumps(jumps: Array) -> int:
    """How many of the first jumps are safely independent (at least one)."""
    lengths = np.maximum(np.linalg.norm(jumps, axis=1), TINY)
    sines = np.abs(np.diag(np.linalg.qr((jumps / lengths[:, None]).T, mode="r")))
    weak = np.nonzero(sines < INDEPENDENT)[0]
    return max(1, int(weak[0])) if len(weak) else len(jumps)


def solved(line: Line, anchors: Array, table: Array) -> Float[Array, "n e"]:
    """a_j . u_i from the differences of neighbouring gradients."""
    differences = np.diff(table, axis=0)
    if line.jumps.shape[1] == 1:
        return np.asarray(differences[:, :, 0] / line.jumps)
    across = np.zeros((len(line.kinks), table.shape[1]))
    for i, (start, stop) in enumerate(pairwise(anchors)):
        jumps = line.jumps[start:stop]
        across[start:stop] = np.linalg.lstsq(jumps.T, differences[i].T)[0]
    return across
