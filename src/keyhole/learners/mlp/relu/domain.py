"""Where points may be asked: the whole space, a ball or a box; random points and lines in it."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import NotIdentifiable
from keyhole.learners.mlp.relu.gradients import Frame
from keyhole.learners.mlp.relu.line_search import FAR
from keyhole.oracles.base import Domain

OFF_CENTRE = 0.3  # how far from the centre of a bounded domain lines pass, relative to its size


@dataclass(frozen=True, eq=False)
class InputRegion:
    """`scale` is the typical size of an entry; `radius` bounds the norm around `centre`, `reach`
    the entries around `centre` (infinite where they are free)."""

    centre: Float[Array, " d"]
    scale: float
    radius: float
    reach: float

    @classmethod
    def of(cls, domain: Domain, width: int, scale: float | None) -> "InputRegion":
        if domain.vocabulary is not None:
            raise NotIdentifiable(
                "a finite vocabulary does not determine where a network bends; a ReLU network "
                "needs inputs that can be moved freely"
            )
        inside = 0.98  # share of a bounded domain that is used: rounding must not leave it
        radius = np.inf if domain.max_norm is None else inside * domain.max_norm
        low, high = domain.low, domain.high
        if low is None and high is None:
            middle, reach = 0.0, np.inf
        elif low is not None and high is not None:
            middle, reach = (low + high) / 2, inside * (high - low) / 2
        else:
            bound = low if low is not None else high
            reach = 10 * (1 + abs(bound or 0.0))
            middle = (bound or 0.0) + (reach if low is not None else -reach)
            reach *= inside
        typical = min(1.0, radius / np.sqrt(width) / 2, reach / 2) if scale is None else scale
        return cls(np.full(width, middle), typical, radius, reach)

    @property
    def unbounded(self) -> bool:
        return not (self.radius < np.inf or self.reach < np.inf)

    def points(self, rng: np.random.Generator, count: int, size: float = 1.0) -> Array:
        """Normal points of the typical size, drawn into the domain where they fall outside."""
        offsets = size * self.scale * rng.standard_normal((count, len(self.centre)))
        if self.reach < np.inf:
            offsets = np.clip(offsets, -self.reach, self.reach)
        points = self.centre + offsets
        if self.radius < np.inf:
            norms = np.linalg.norm(points, axis=1, keepdims=True)
            points = points * np.minimum(1.0, self.radius / np.maximum(norms, TINY))
        return np.asarray(points)

    @property
    def size(self) -> float:
        """Typical length of a point, measured from the centre."""
        return float(self.scale * np.sqrt(len(self.centre)))

    def inner_point(self, rng: np.random.Generator) -> Float[Array, " d"]:
        """A random point near the middle: hyperplanes often run through the middle itself."""
        offset = rng.standard_normal(len(self.centre))
        return np.asarray(self.centre + OFF_CENTRE * self.scale * offset / 2)

    def edge_points(self, rng: np.random.Generator, count: int) -> Float[Array, "n d"]:
        """Random points at the edge of a bounded domain: on the sphere, or corners and sides."""
        offsets = rng.standard_normal((count, len(self.centre)))
        offsets /= np.linalg.norm(offsets, axis=1, keepdims=True)
        if self.reach == np.inf:
            return np.asarray(self.radius * offsets)
        corners = rng.integers(0, 2, offsets.shape) * 2.0 - 1
        corners = np.where(rng.random((count, 1)) < 0.7, corners, offsets)
        points = self.centre + self.reach * corners / np.abs(corners).max(axis=1, keepdims=True)
        norms = np.linalg.norm(points, axis=1, keepdims=True)
        return np.asarray(points * np.minimum(1.0, self.radius / np.maximum(norms, TINY)))

    def line_through(self, start: Array, other: Array) -> tuple[Frame, tuple[float, float]]:
        """The line from one point through another, and the stretch of it that may be asked."""
        direction = other - start
        direction = direction * (self.size / float(np.linalg.norm(direction)))
        return Frame.random(start, direction), self.stretch(start, direction)

    def line(self, rng: np.random.Generator) -> tuple[Frame, tuple[float, float]]:
        """A random line and the stretch of it that may be asked."""
        direction = self.scale * rng.standard_normal(len(self.centre))
        if self.unbounded:
            origin = self.centre + self.scale * rng.standard_normal(len(self.centre))
            return Frame.random(origin, direction), (-FAR, FAR)
        origin = self.points(rng, 1, OFF_CENTRE)[0]
        return Frame.random(origin, direction), self.stretch(origin, direction)

    def stretch(self, origin: Array, direction: Array) -> tuple[float, float]:
        """Between which times the line from `origin` stays inside."""
        low, high = -np.inf, np.inf
        if self.reach < np.inf:
            ends = (self.centre - origin)[:, None] + np.array([-self.reach, self.reach])
            with np.errstate(divide="ignore", invalid="ignore"):  # along a reach of the box
                ends = np.sort(ends / direction[:, None], axis=1)
            low, high = float(ends[:, 0].max()), float(ends[:, 1].min())
        if self.radius < np.inf:
            along = float(origin @ direction) / float(direction @ direction)
            inner = (self.radius**2 - float(origin @ origin)) / float(direction @ direction)
            root = float(np.sqrt(along**2 + max(inner, 0.0)))
            low, high = max(low, -along - root), min(high, -along + root)
        return low, high

    def holds(self, points: Float[Array, "n d"]) -> Array:
        """Which points may be asked."""
        if self.unbounded:
            return np.ones(len(points), dtype=bool)
        return np.asarray(self.room(points, 1.0) > 0)

    def room(self, points: Float[Array, "n d"], length: float) -> Float[Array, " n"]:
        """How many steps of the given length are safe in every direction."""
        free = np.full(len(points), np.inf)
        if self.reach < np.inf:
            free = self.reach - np.abs(points - self.centre).max(axis=1)
        if self.radius < np.inf:
            free = np.minimum(free, self.radius - np.linalg.norm(points, axis=1))
        return np.asarray(np.maximum(free, 0.0) / length)
