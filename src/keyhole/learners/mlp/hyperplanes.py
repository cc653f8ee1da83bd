"""Queries around single kinks of a line: each neuron measured by itself, and checked.

Where planes may be near that the line does not meet (a bounded domain), or where answers have few
digits, gradients shared along the line are not safe. Here each kink gets two patches of its own,
one on either side, well within the two pieces: d + 1 answers each give value and gradient. The
difference of the gradients is output_j weight_j, the plane is where the two affine pieces meet.
More answers check them: within the two patches, and on and around the supposed plane in random
directions, where two planes that passed for one come apart. A kink that fails is measured again
closer by, and left to another line in the end.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.gradients import CROSSED, AskPoints, Frame, Room
from keyhole.learners.mlp.line_search import Line

SIDE_SHARE = 0.45  # distance of a patch's base from the kink, relative to the room on the line
PATCH = 0.35  # size of a patch, relative to that distance
EDGE_SHARE = 0.5  # of the distance to the edge of the domain that a patch may take
CLOSER = 0.15  # the next size after a failed check
ATTEMPTS = 4  # sizes tried
OWN_PLANE = 0.5  # part of the distance to the kink's own plane that a step may take
CHECK_SAFETY = 30.0  # tolerance of a check in units of the errors that enter it
CHECKS = 2  # random directions in which a kink is checked
NEAR_PLANE = 0.25  # distance of the checks before and behind a plane, relative to the patch
BENDS = 10.0  # tolerance of a check in units of the known neurons' errors
NAMES = ("weight", "bias", "output", "error")


@dataclass(frozen=True, eq=False)
class Patches:
    """The neurons that were measured and checked: unit normals, offsets and outputs, turned so
    that they are off where the line begins; `error` is that of output_j weight_j, times the length
    of the line's direction."""

    weight: Float[Array, "n d"]
    bias: Float[Array, " n"]
    output: Float[Array, "n k"]
    error: Float[Array, " n"]


def measured_patches(
    ask: AskPoints,
    line: Line,
    frame: Frame,
    room: Room,
    rng: np.random.Generator,
    rounding: float,
    slopes: float,
) -> Patches:
    """All kinks of a line, each by itself; those that fail their checks are left out. `rounding`
    is the error of an answer, `slopes` that of the network taken off, per length of the line's
    direction: it changes slopes where a known plane is crossed, however small the patch."""
    count = len(line.kinks)
    unit = rounding * (1 + np.abs(line.kinks))
    side = SIDE_SHARE * clearance(line)
    length = float(np.linalg.norm(frame.direction))
    edge = room(frame.points(line.kinks), length) if count else side
    size = np.minimum(PATCH * side, EDGE_SHARE * edge)
    open_kinks = np.flatnonzero(size > TINY)
    parts = [Patches(np.zeros((0, frame.width)), np.zeros(0), line.jumps[:0], np.zeros(0))]
    for _ in range(ATTEMPTS):
        if len(open_kinks) == 0:
            break
        around = Around(ask, frame, line.kinks[open_kinks], side[open_kinks], size[open_kinks])
        pair = around.measured()
        off = unit[open_kinks], BENDS * slopes * (side + size)[open_kinks]
        passed = around.checked(pair, *off, rng)
        error = off[0] * np.sqrt(2.0 * np.mean(pair.steps**-2.0, axis=1))
        parts.append(around.neurons(pair, error, passed))
        open_kinks = open_kinks[~passed]
        size[open_kinks] *= CLOSER
    joined = (np.concatenate([getattr(part, name) for part in parts]) for name in NAMES)
    return Patches(*joined)


def clearance(line: Line) -> Array:
    """Distance of each kink to its neighbours on the line and to the ends."""
    ends = np.concatenate([line.reach[:1], line.kinks, line.reach[1:]])
    gaps = np.diff(ends)
    return np.asarray(np.minimum(gaps[:-1], gaps[1:]))


class Pair(NamedTuple):
    """Values and gradients on both sides of some kinks, and what follows for their planes. All
    directions, the line's own first, have the same length, and gradients are per that length."""

    values: Float[Array, "2 n k"]
    slopes: Float[Array, "2 n d k"]
    steps: Float[Array, "n d"]
    jump: Float[Array, "n k"]  # the gradient changes by jump times normal
    normal: Float[Array, "n d"]  # 1 in the direction of the line
    kink: Float[Array, " n"]  # when the line meets the plane


@dataclass(frozen=True, eq=False)
class Around:
    """Patches of given sizes around given kinks."""

    ask: AskPoints
    frame: Frame
    kinks: Float[Array, " n"]
    side: Float[Array, " n"]
    size: Float[Array, " n"]

    @property
    def basis(self) -> Float[Array, "d d"]:
        return np.concatenate([self.frame.direction[None], self.frame.across])

    def times(self, after: int) -> Array:
        return np.asarray(self.kinks + (2 * after - 1) * self.side)

    def measured(self) -> Pair:
        """Asks both sides; steps that crossed the kink's own plane are asked again, shorter."""
        n, width = len(self.kinks), self.frame.width
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
            jump, normal = rank_one(slopes[1] - slopes[0])
            own = CROSSED * self.side[:, None] / np.maximum(steps, TINY)
            rows, columns = np.nonzero(np.abs(normal) >= own)
            if len(rows) == 0:
                break
            steps[rows, columns] *= CLOSER
        return Pair(values, slopes, steps, jump, normal, self.meeting(values, slopes, jump))

    def meeting(self, values: Array, slopes: Array, jump: Array) -> Array:
        """When the affine pieces of the two sides have the same value on the line."""
        before = values[0] - slopes[0, :, 0] * self.times(0)[:, None]
        after = values[1] - slopes[1, :, 0] * self.times(1)[:, None]
        square = np.maximum((jump**2).sum(axis=1), TINY)
        return np.asarray(np.einsum("nk,nk->n", before - after, jump) / square)

    def checked(self, pair: Pair, unit: Array, bends: Array, rng: np.random.Generator) -> Array:
        """Which kinks explain fresh answers, up to rounding and known bends."""
        passed = np.abs(pair.kink - self.kinks) <= self.side
        for _ in range(CHECKS):
            shift = rng.standard_normal(pair.normal.shape)
            shift *= (pair.steps.min(axis=1) / np.linalg.norm(shift, axis=1))[:, None]
            along = np.einsum("nd,nd->n", pair.normal, shift)
            factor = OWN_PLANE * self.side / np.maximum(np.abs(along), OWN_PLANE * self.side)
            shift, along = shift * factor[:, None], along * factor
            passed &= self.explains(pair, shift, along, unit, bends)
        return np.asarray(passed)

    def explains(self, pair: Pair, shift: Array, along: Array, unit: Array, bends: Array) -> Array:
        """Whether answers beside the line agree: within the two patches, on the plane, and a
        little before and behind it, where planes that passed for one are told apart."""
        n = len(shift)
        crossing = pair.kink - along
        reach = NEAR_PLANE * np.linalg.norm(shift, axis=1)
        low, high = self.times(0), self.times(1)  # outside, a wrong plane could leave the domain
        near = [np.clip(crossing + side * reach, low, high) for side in (-1, 0, 1)]
        times = [low, *near, high]
        places = [self.frame.points(time) + shift @ self.basis for time in times]
        answers = self.ask(np.concatenate(places)).reshape(len(times), n, -1)
        base = unit * (2 + np.linalg.norm(shift / pair.steps, axis=1))
        passed = np.ones(n, dtype=bool)
        for time, answer, after in zip(times, answers, (0, 0, 0, 1, 1), strict=True):
            moved = shift.copy()
            moved[:, 0] += time - self.times(after)
            rise = np.einsum("nd,ndk->nk", moved, pair.slopes[after])
            gap = np.linalg.norm(answer - pair.values[after] - rise, axis=1)
            lever = unit * np.abs(moved[:, 0]) / pair.steps[:, 0]
            passed &= gap <= CHECK_SAFETY * (base + lever) + bends
        return passed

    def neurons(self, pair: Pair, error: Array, chosen: Array) -> Patches:
        square = float(self.frame.direction @ self.frame.direction)
        normal = pair.normal[chosen] @ self.basis / square
        bias = -np.einsum("nd,nd->n", normal, self.frame.points(pair.kink[chosen]))
        lengths = np.linalg.norm(normal, axis=1)
        return Patches(
            normal / lengths[:, None],
            bias / lengths,
            pair.jump[chosen] * lengths[:, None],
            error[chosen],
        )


def rank_one(change: Float[Array, "n d k"]) -> tuple[Float[Array, "n k"], Float[Array, "n d"]]:
    """The changes of gradients as jump times normal, with a normal of 1 in the first direction."""
    if change.shape[2] == 1:
        direction = np.ones(change.shape[::2])
    else:
        direction = np.linalg.svd(change, full_matrices=False)[2][:, 0]
    product = np.einsum("ndk,nk->nd", change, direction)
    first = product[:, :1]
    first = np.where(np.abs(first) > TINY, first, TINY)
    return np.asarray(first * direction), np.asarray(product / first)
