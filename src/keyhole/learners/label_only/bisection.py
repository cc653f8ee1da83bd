"""Many bisections side by side: one batch of threshold queries per round.

Each unknown number has a bracket (which may be open) and a prediction: a centre and a spread. A
query "is it above t?" is asked where the prediction, restricted to the bracket, has its median,
so that its answer is worth a full bit. The prediction has the tails of Student's t with two degrees
of freedom: a bracket that is still open grows by a factor at each round, so a wrong prediction
costs a few queries and nothing else; and both its distribution and the inverse are elementary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import InvalidArgument

Above = Callable[[Int[Array, " n"], Float[Array, " n"]], Float[Array, " n"]]
"""Answers -1, 0 (equal) or 1 for "number i is below, at, above t_i"."""


@dataclass(frozen=True, eq=False)
class Brackets:
    """Where each number lies, and where it is expected."""

    low: Float[Array, " m"]
    high: Float[Array, " m"]
    centre: Float[Array, " m"]
    spread: Float[Array, " m"]

    def __post_init__(self) -> None:
        if not (self.low <= self.high).all():
            raise InvalidArgument("a bracket is upside down: low must not exceed high")
        if not (self.spread > 0).all():
            raise InvalidArgument("the spread of a prediction must be positive")

    @classmethod
    def unknown(cls, count: int, spread: float) -> "Brackets":
        """Nothing known but the order of magnitude."""
        open_end = np.full(count, np.inf)
        return cls(-open_end, open_end, np.zeros(count), np.full(count, spread))

    def __len__(self) -> int:
        return len(self.low)

    @property
    def width(self) -> Float[Array, " m"]:
        return self.high - self.low

    @property
    def middle(self) -> Float[Array, " m"]:
        """The estimate; the prediction where a bracket is open."""
        low = np.where(np.isfinite(self.low), self.low, self.centre)
        high = np.where(np.isfinite(self.high), self.high, self.centre)
        return 0.5 * (low + high)

    def predict(self, spread: float, centre: float | Array = 0.0) -> "Brackets":
        """The same brackets with another prediction."""
        like = np.ones(len(self))
        return replace(self, centre=centre * like, spread=spread * like)

    def narrow(
        self, index: Int[Array, " n"], at: Float[Array, " n"], sign: Float[Array, " n"]
    ) -> "Brackets":
        """The brackets with the answers to "above `at`?". An answer that contradicts its bracket is
        left out."""
        low, high = self.low.copy(), self.high.copy()
        inside = np.clip(at, low[index], high[index])
        np.maximum.at(low, index[sign >= 0], inside[sign >= 0])
        np.minimum.at(high, index[sign <= 0], inside[sign <= 0])
        return replace(self, low=low, high=high)

    def choose_thresholds(self, index: Int[Array, " n"]) -> Float[Array, " n"]:
        """The conditional medians: where to ask next."""
        low, high = self.low[index], self.high[index]
        centre, spread = self.centre[index], self.spread[index]
        level = 0.5 * (_level((low - centre) / spread) + _level((high - centre) / spread))
        median = centre + spread * _quantile(level)
        with np.errstate(invalid="ignore"):
            middle = 0.5 * (low + high)
            # far out in a tail the level has no digits left: double the distance instead
            middle = np.where(np.isinf(high), low + np.maximum(np.abs(low), spread), middle)
            middle = np.where(np.isinf(low), high - np.maximum(np.abs(high), spread), middle)
            # a bracket below a 64th of the spread is halved in the middle: no density to follow
            follow = (high - low > spread / 64.0) & (median > low) & (median < high)
        return np.where(follow, median, middle)


def _level(z: Float[Array, " n"]) -> Float[Array, " n"]:
    """2 F(z) - 1 for Student's t with two degrees of freedom."""
    with np.errstate(invalid="ignore"):
        return np.where(np.isinf(z), np.sign(z), z / np.hypot(np.sqrt(2.0), z))


def _quantile(level: Float[Array, " n"]) -> Float[Array, " n"]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return level * np.sqrt(2.0 / ((1.0 - level) * (1.0 + level)))


def bisect(
    above: Above,
    brackets: Brackets,
    width: float | Float[Array, " m"],
    chosen: Int[Array, " n"] | None = None,
) -> Brackets:
    """Asks until every (chosen) bracket is at most `width` wide; one batch per round."""
    wanted = np.broadcast_to(np.asarray(width, dtype=np.float64), (len(brackets),))
    mine = np.ones(len(brackets), dtype=bool)
    if chosen is not None:
        mine[:] = False
        mine[chosen] = True
    while True:
        with np.errstate(invalid="ignore"):
            size = np.maximum(np.abs(brackets.low), np.abs(brackets.high))
            size = np.where(np.isfinite(size), size, 0.0)
        # below four units in the last place, float64 has no number in between
        needed = np.maximum(wanted, 4.0 * np.finfo(float).eps * size)
        index = np.flatnonzero(mine & (brackets.high - brackets.low > needed))
        if not len(index):
            return brackets
        at = brackets.choose_thresholds(index)
        brackets = brackets.narrow(index, at, above(index, at))


def find_magnitude(
    above: Above,
    brackets: Brackets,
    chosen: Int[Array, " n"],
    start: float,
    *,
    factor: float,
    most: int,
    least: float = 0.0,
) -> tuple[Brackets, float, bool]:
    """The order of magnitude of the largest of some numbers, whatever their signs.

    Asks "above t?" and "above -t?" for t = start, then for larger or smaller t by `factor`, at most
    `most` times and never below `least`. Returns the t with the largest |number| in (t, factor t]
    and True; or, where it is smaller than all t tried, the smallest t and False.
    """
    twice, side = np.concatenate([chosen, chosen]), np.repeat([1.0, -1.0], len(chosen))

    def outside(known: Brackets, t: float) -> tuple[Brackets, bool]:
        signs = above(twice, side * t)
        for part in (side > 0, side < 0):  # one after the other: answers may contradict each other
            known = known.narrow(twice[part], side[part] * t, signs[part])
        return known, bool((signs == side).any())

    brackets, large = outside(brackets, start)
    level = start
    for _ in range(most):
        if not large and level / factor < least:
            break
        level = level * factor if large else level / factor
        brackets, still = outside(brackets, level)
        if still != large:
            return brackets, level / factor if large else level, True
    return brackets, level, large
