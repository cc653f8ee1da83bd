"""Affine stretches of a line through a box, and the geometry of what lies between two of them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float

MARGIN = 0.01  # a crossing this close to an end (in arctan t) is no evidence of a single kink
BESIDE = 8.0  # how far from a crossing near an end a pair of kinks is looked for, in its distance
SHORTEST = 1e-2  # least part of half an interval that a split may cut off
VANISHING = 1e-7  # entry of a jump, relative to its largest, that counts as zero
CLUSTER = 1e-3  # spacing of the answers that measure rounding, relative to the first tangent
CLUSTER_SIZE = 8  # answers in that cluster
SECOND_DIFFERENCE = np.sqrt(6.0)  # standard deviation of a second difference of unit noise

Ask = Callable[[Float[Array, " n"]], Float[Array, "n k"]]


@dataclass(eq=False)
class Piece:
    """A stretch of the line on which the answers are affine, known by its points."""

    times: list[float]
    values: list[Array]
    implied: Array | None = None  # slope that follows from the neighbours (a single point)
    low: int = 0  # where the leftmost and rightmost points are in the lists
    high: int = 0
    before: "Piece | None" = None  # a neighbour whose line runs through the leftmost point
    after: "Piece | None" = None  # a neighbour whose line runs through the rightmost point

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
        self.times.append(float(t))
        self.values.append(value)
        if t < self.left:
            self.low = len(self.times) - 1
        if t > self.right:
            self.high = len(self.times) - 1


class Rougher(Exception):
    """The answers have an error of `noise`, more than was assumed."""

    def __init__(self, noise: float) -> None:
        super().__init__(f"the answers are exact to {noise:.2g} only")
        self.noise = noise


class NotPiecewiseAffine(Exception):
    """The answers along the line have a jump, or bend everywhere: `t` is where, `value` the
    answer there, `expected` what a continuous piecewise affine function would have answered."""

    def __init__(self, message: str, t: float, value: Array, expected: Array) -> None:
        super().__init__(message)
        self.t, self.value, self.expected = t, value, expected


def middle(a: float, b: float) -> float:
    """The middle of an interval as a Cauchy law sees it."""
    if b - a < 1:
        return (a + b) / 2
    return float(np.tan((np.arctan(a) + np.arctan(b)) / 2))


def dense(jump: Array) -> bool:
    """Whether at most one entry vanishes. Two neurons that reach the same few outputs only can
    have parallel jumps, and then lines that meet prove nothing."""
    sizes = np.abs(jump)
    return int((sizes <= VANISHING * sizes.max()).sum()) <= 1


def beside(a: float, b: float, t: float | None) -> float:
    """Where to split an interval whose lines do not cross well inside.

    Two close kinks of opposite sign have the crossing beside them, not between them: a crossing
    near an end says that they are near that end, within a few times its distance."""
    centre = middle(a, b)
    if t is None:
        return centre
    if abs(t - a) < abs(t - b):
        return min(centre, a + max(BESIDE * abs(t - a), SHORTEST * (centre - a)))
    return max(centre, b - max(BESIDE * abs(t - b), SHORTEST * (b - centre)))


def well_inside(a: float, b: float, t: float) -> bool:
    """Whether t lies between a and b, and not too close to either: an end of a piece that hides
    a kink is where its false line crosses the true one."""
    if not a < t < b:
        return False
    low, high, angle = np.arctan([a, b, t])
    margin = MARGIN * (high - low)
    return bool(angle - low > margin and high - angle > margin)


def measured_rounding(ask: Ask, step: float) -> float:
    """The error of one answer, from second differences of answers that lie close together."""
    times = CLUSTER * step * np.arange(CLUSTER_SIZE)
    values = ask(times)
    second = np.abs(values[:-2] - 2 * values[1:-1] + values[2:])
    return float(np.median(second.max(axis=1)) / SECOND_DIFFERENCE)
