"""Single hyperplanes around the breakpoints of a line, each measured by itself and checked.

Statement.  Where hyperplanes may be near that the line does not meet (a bounded domain), or where
            answers have few digits, gradients shared along the line are not safe. Here every
            breakpoint is measured by itself; those that fail their checks are left out.
Queries.    Two patches for each breakpoint, one on either side, well within its two affine pieces:
            d + 1 answers each give value and gradient. More answers check them: within the two
            patches, and on and around the supposed hyperplane in random directions, where two
            hyperplanes that passed for one come apart.
Algebra.    The difference of the gradients is output_j weight_j; the hyperplane is where the two
            affine pieces meet.
Fails.      A breakpoint that fails is measured again closer by, four times at most, and left to
            another line in the end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.relu.gradients import CROSSED, AskPoints, Frame, Room
from keyhole.learners.mlp.relu.line_search import LineFit

CLOSER = 0.15  # size of a patch after a failed check, relative to the one before
ATTEMPTS = 4  # sizes tried


@dataclass(frozen=True, eq=False)
class Hyperplanes:
    """The neurons that were measured and checked: unit normals, offsets and outputs, turned so
    that they are off where the line begins; `error` is that of output_j weight_j, times the length
    of the line's direction."""

    weight: Float[Array, "n d"]
    bias: Float[Array, " n"]
    output: Float[Array, "n k"]
    error: Float[Array, " n"]


def measure_hyperplanes(
    ask: AskPoints,
    line: LineFit,
    frame: Frame,
    room: Room,
    rng: np.random.Generator,
    rounding: float,
    slopes: float,
) -> Hyperplanes:
    """All breakpoints of a line, each by itself; those that fail their checks are left out.
    `rounding` is the error of an answer, `slopes` that of the network taken off, per length of the
    line's direction: it changes slopes where a known hyperplane is crossed, however small the
    patch."""
    count = len(line.breakpoints)
    unit = rounding * (1 + np.abs(line.breakpoints))
    side = 0.45 * clearance(line)  # bases stay within the two affine pieces
    length = float(np.linalg.norm(frame.direction))
    edge = room(frame.points(line.breakpoints), length) if count else side
    size = np.minimum(0.35 * side, 0.5 * edge)
    left = np.flatnonzero(size > TINY)
    parts = [Hyperplanes(np.zeros((0, frame.width)), np.zeros(0), line.jumps[:0], np.zeros(0))]
    for _ in range(ATTEMPTS):
        if len(left) == 0:
            break
        around = PatchPairs(ask, frame, line.breakpoints[left], side[left], size[left])
        pair = around.measure()
        off = unit[left], 10 * slopes * (side + size)[left]
        passed = around.check(pair, *off, rng)
        error = off[0] * np.sqrt(2.0 * np.mean(pair.steps**-2.0, axis=1))
        parts.append(around.build_neurons(pair, error, passed))
        left = left[~passed]
        size[left] *= CLOSER
    names = ("weight", "bias", "output", "error")
    return Hyperplanes(*(np.concatenate([getattr(part, n) for part in parts]) for n in names))


def clearance(line: LineFit) -> Array:
    """Distance of each breakpoint to its neighbours on the line and to the ends."""
    ends = np.concatenate([line.reach[:1], line.breakpoints, line.reach[1:]])
    gaps = np.diff(ends)
    return np.asarray(np.minimum(gaps[:-1], gaps[1:]))


class Pair(NamedTuple):
    """Values and gradients on both sides of some breakpoints, and the hyperplanes that follow. All
    directions, the line's own first, have the same length, and gradients are per that length."""

    values: Float[Array, "2 n k"]
    slopes: Float[Array, "2 n d k"]
    steps: Float[Array, "n d"]
    jump: Float[Array, "n k"]  # the gradient changes by jump times normal
    normal: Float[Array, "n d"]  # 1 in the direction of the line
    breakpoint: Float[Array, " n"]  # when the line meets the hyperplane


@dataclass(frozen=True, eq=False)
class PatchPairs:
    """Patches of given sizes around given breakpoints."""

    ask: AskPoints
    frame: Frame
    breakpoints: Float[Array, " n"]
    side: Float[Array, " n"]
    size: Float[Array, " n"]

    @property
    def basis(self) -> Float[Array, "d d"]:
        return np.concatenate([self.frame.direction[None], self.frame.across])

    def times(self, after: int) -> Array:
        return np.asarray(self.breakpoints + (2 * after - 1) * self.side)

    def measure(self) -> Pair:
        """Asks both sides; steps that crossed the own hyperplane are asked again, shorter."""
        n, width = len(self.breakpoints), self.frame.width
        bases = [self.frame.points(self.times(after)) for after in (0, 1)]
        values = self.ask(np.concatenate(bases)).reshape(2, n, -1)
        slopes = np.zeros((2, n, width, values.shape[2]))
        steps = np.repeat(self.size[:, None], width, axis=1)
        rows, columns = (part.ravel() for part in np.indices((n, width)))
        for _ in range(ATTEMPTS):
            step = steps[rows, columns][:, None]
            beside = [base[rows] + step * self.basis[columns] for base in bases]
            answers = self.ask(np.concatenate(beside)).reshape(2, len(rows), -1)
            slopes[:, rows, columns] = (answers - values[:, rows]) / step
            jump, normal = split_rank_one(slopes[1] - slopes[0])
            own = CROSSED * self.side[:, None] / np.maximum(steps, TINY)
            rows, columns = np.nonzero(np.abs(normal) >= own)
            if len(rows) == 0:
                break
            steps[rows, columns] *= CLOSER
        return Pair(values, slopes, steps, jump, normal, self.find_meeting(values, slopes, jump))

    def find_meeting(self, values: Array, slopes: Array, jump: Array) -> Array:
        """When the affine pieces of the two sides have the same value on the line."""
        before = values[0] - slopes[0, :, 0] * self.times(0)[:, None]
        after = values[1] - slopes[1, :, 0] * self.times(1)[:, None]
        square = np.maximum((jump**2).sum(axis=1), TINY)
        return np.asarray(np.einsum("nk,nk->n", before - after, jump) / square)

    def check(self, pair: Pair, unit: Array, bends: Array, rng: np.random.Generator) -> Array:
        """Which breakpoints explain fresh answers, up to rounding and known bends."""
        passed = np.abs(pair.breakpoint - self.breakpoints) <= self.side
        for _ in range(2):  # random directions
            shift = rng.standard_normal(pair.normal.shape)
            shift *= (pair.steps.min(axis=1) / np.linalg.norm(shift, axis=1))[:, None]
            along = np.einsum("nd,nd->n", pair.normal, shift)
            half = self.side / 2  # of the distance to the own hyperplane is what a step may take
            factor = half / np.maximum(np.abs(along), half)
            shift, along = shift * factor[:, None], along * factor
            passed &= self.explains(pair, shift, along, unit, bends)
        return np.asarray(passed)

    def explains(self, pair: Pair, shift: Array, along: Array, unit: Array, bends: Array) -> Array:
        """Whether answers beside the line agree: within the two patches, on the hyperplane, and a
        little before and behind it, where hyperplanes that passed for one are told apart."""
        n = len(shift)
        crossing = pair.breakpoint - along
        reach = 0.25 * np.linalg.norm(shift, axis=1)
        low, high = (
            self.times(0),
            self.times(1),
        )  # outside, a wrong hyperplane could leave the domain
        near = [np.clip(crossing + side * reach, low, high) for side in (-1, 0, 1)]
        times = [low, *near, high]
        places = [self.frame.points(time) + shift @ self.basis for time in times]
        answers = self.ask(np.concatenate(places)).reshape(len(times), n, -1)
        base = unit * (2 + np.linalg.norm(shift / pair.steps, axis=1))
        passed = np.ones(n, dtype=bool)
        check_tolerance = 30.0  # units of the errors that enter a check
        for time, answer, after in zip(times, answers, (0, 0, 0, 1, 1), strict=True):
            moved = shift.copy()
            moved[:, 0] += time - self.times(after)
            rise = np.einsum("nd,ndk->nk", moved, pair.slopes[after])
            gap = np.linalg.norm(answer - pair.values[after] - rise, axis=1)
            lever = unit * np.abs(moved[:, 0]) / pair.steps[:, 0]
            passed &= gap <= check_tolerance * (base + lever) + bends
        return passed

    def build_neurons(self, pair: Pair, error: Array, chosen: Array) -> Hyperplanes:
        square = float(self.frame.direction @ self.frame.direction)
        normal = pair.normal[chosen] @ self.basis / square
        bias = -np.einsum("nd,nd->n", normal, self.frame.points(pair.breakpoint[chosen]))
        lengths = np.linalg.norm(normal, axis=1)
        return Hyperplanes(
            normal / lengths[:, None],
            bias / lengths,
            pair.jump[chosen] * lengths[:, None],
            error[chosen],
        )


def split_rank_one(
    change: Float[Array, "n d k"],
) -> tuple[Float[Array, "n k"], Float[Array, "n d"]]:
    """The changes of gradients as jump times normal, with a normal of 1 in the first direction."""
    if change.shape[2] == 1:
        direction = np.ones(change.shape[::2])
    else:
        direction = np.linalg.svd(change, full_matrices=False)[2][:, 0]
    product = np.einsum("ndk,nk->nd", change, direction)
    first = product[:, :1]
    first = np.where(np.abs(first) > TINY, first, TINY)
    return np.asarray(first * direction), np.asarray(product / first)
