"""The linear problem of one Gauss-Newton step by conjugate gradients, ended by what steps bring.

Statement.  min |J S z + r|^2 + damping |z|^2 by products with J S and its transpose alone; or a
            positive definite system by products with it and with a preconditioner.
Queries.    None.
Algebra.    CGLS: the residual r + J S z is carried along and falls in every step. It ends where it
            is a given share of r, or where the last steps together took less than a share off its
            square: what is left is then not in the range of J S, but noise.
When it fails. Directions that hardly show come last, and are left where they are.
Source.     Hestenes, Stiefel (1952); Paige, Saunders (1982) for least squares.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array
from keyhole.fitting.solver import Step


@dataclass(frozen=True)
class Ending:
    """When the products end.

    share: of the residual's norm at the start that is left. gradient: of that of the gradient,
    which says how exact the solution is, whatever the residual. window, least: ended where so many
    steps took less than this share off the square. most: steps at most. growth: ended where the
    window made |z|^2 grow by less than this share instead: for standard errors, in which weak
    directions weigh most.
    """

    share: float = 0.0
    window: int = 25
    least: float = 0.1
    most: int = 2000
    growth: float | None = None
    gradient: float = 0.0


@dataclass(frozen=True, eq=False)
class Scaled:
    """Products with J S and its transpose."""

    push: Callable[[Array], Array]
    pull: Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Solved:
    """The unknowns, the square of what is left, and the steps it took."""

    z: Array
    left: float
    steps: int


def solve_cgls(at: Scaled, right: Array, ending: Ending, damping: float = 0.0) -> Solved:
    """z with J S z about `right`."""
    residual = right.copy()
    gradient = at.pull(residual)
    z, way = np.zeros_like(gradient), gradient.copy()
    slope = _square(gradient)
    squares, sizes = [_square(residual)], [0.0]
    steps, target = 0, ending.share**2 * squares[0]
    flat = max(ending.gradient**2 * slope, TINY)
    while steps < ending.most and slope > flat and squares[-1] > target:
        moved = at.push(way)
        length = slope / max(_square(moved) + damping * _square(way), TINY)
        z += length * way
        residual -= length * moved
        gradient = at.pull(residual)
        if damping:
            gradient -= damping * z
        before, slope = slope, _square(gradient)
        way *= slope / before
        way += gradient
        steps += 1
        squares.append(_square(residual))
        sizes.append(_square(z))
        if steps >= ending.window and _settled(squares, sizes, ending):
            break
    return Solved(z, squares[-1], steps)


def solve_preconditioned(
    apply: Callable[[Array], Array],
    precondition: Callable[[Array], Array],
    b: Array,
    tolerance: float,
    most: int,
) -> tuple[Array, Array]:
    """The solution of apply(s) = b to a relative tolerance, and apply(s)."""
    s = np.zeros_like(b)
    r = b.copy()
    z = precondition(r)
    direction = z
    rho = float((r * z).sum())
    target = tolerance * float(np.linalg.norm(b))
    for _ in range(most):
        image = apply(direction)
        curvature = float((direction * image).sum())
        if not curvature > 0:
            break
        alpha = rho / curvature
        s = s + alpha * direction
        r = r - alpha * image
        if float(np.linalg.norm(r)) <= target:
            break
        z = precondition(r)
        fresh = float((r * z).sum())
        direction = z + (fresh / rho) * direction
        rho = fresh
    return s, b - r


def _settled(squares: list[float], sizes: list[float], ending: Ending) -> bool:
    if ending.growth is not None:
        return sizes[-1] < (1.0 + ending.growth) * sizes[-1 - ending.window]
    return squares[-1] > (1.0 - ending.least) * squares[-1 - ending.window]


def _square(x: Array) -> float:
    return float(np.dot(x, x))


@dataclass(frozen=True, eq=False)
class ProductSystem:
    """The step of a damped Gauss-Newton loop (`fitting.solver`). `unscale`: z to a step."""

    at: Scaled
    residual: Array
    unscale: Callable[[Array], Array]
    ending: Ending

    def step(self, damping: float) -> Step:
        size = np.sqrt(_square(self.residual)) + TINY
        right = (-self.residual / size).astype(np.float32)
        found = solve_cgls(self.at, right, self.ending, damping)
        return Step(size * self.unscale(found.z), float(size**2 * (1.0 - found.left)))
