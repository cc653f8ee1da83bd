"""The ellipsoid on which answers lie, because a norm makes all hidden states equally long.

Statement.  Behind LayerNorm or RMSNorm |n|^2 = h, so the points p = T n + c of an affine space lie
            on an ellipsoid, which tells T up to a rotation, and c.
Queries.    None: points (coordinates of answers). There are r (r + 3) / 2 unknowns; as many points
            interpolate whatever they are, so that a third more are asked for.
Algebra.    Points are whitened. p.S p + b.p = 1 is linear in S and b; solved by least squares,
            directly, or for large r by LSMR, which needs S only as p -> sum((p S) * p), scaled so
            that the features of Gaussian points would be orthonormal. Centre -S^-1 b / 2,
            T = S^-1/2 after the constant is normalised. Where the centre is zero within its error,
            it is zero, and S is solved for alone.
            Standard errors: the same system for random right sides as large as the residuals.
When it fails. S is not positive definite: the points do not determine an ellipsoid. Epsilon of the
            norm shortens states of small variance; it acts as noise here and is in the residuals.
Source.     The floor is a count of unknowns: Carlini et al. (2024), section on symmetries.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr, solve_triangular
from scipy.sparse.linalg import LinearOperator, lsmr

from keyhole.arrays import Array, Float
from keyhole.linalg.symmetric import half_of

DENSE = 64  # dimension up to which the system is formed


@dataclass(frozen=True, eq=False)
class Ellipsoid:
    """Points are centre + shape n / |n|, with standard errors of both; `spread` is the root mean
    square of |n|^2 / mean - 1 and `worst` the largest seen."""

    centre: Float[Array, " r"]
    shape: Float[Array, "r r"]
    centre_errors: Float[Array, " r"]
    shape_draws: Float[Array, "k r r"]  # deviations as large as the errors
    spread: float
    worst: float
    centred: bool  # whether the centre is zero


def count_unknowns(dimension: int) -> int:
    """Of an ellipsoid with a centre."""
    return dimension * (dimension + 3) // 2


def fit_ellipsoid(
    points: Float[Array, "n r"], rng: np.random.Generator, *, centred: bool = False
) -> Ellipsoid | None:
    """The ellipsoid of these points; None where they do not determine one. Where it is `centred`,
    its centre is known to be zero."""
    n, r = points.shape
    unknowns = r * (r + 1) // 2 if centred else count_unknowns(r)
    if n <= unknowns:
        return None
    middle = np.zeros(r) if centred else points.mean(axis=0)
    root = np.linalg.cholesky((points - middle).T @ (points - middle) / n)
    white = np.linalg.solve(root, (points - middle).T).T
    solve = _solver(white, centred)
    target = np.ones(n)
    quadric, linear = solve(target, 1e-15)
    residual = np.einsum("nr,rs,ns->n", white, quadric, white) + white @ linear - target
    found = _read_quadric(quadric, linear)
    if found is None:
        return None
    centre, shape = found
    # the residual in units of the radius: the constant at the centre is more than one
    radius = float(1.0 + centre @ quadric @ centre)
    sigma = float(np.sqrt(np.sum(residual**2) / (n - unknowns)))
    draws, moved = [], []
    # an iteration that ends early would miss the directions that are known worst
    for _ in range(16 if r <= DENSE else 2):
        change, turn = solve(sigma * np.asarray(rng.standard_normal(n)), 1e-5)
        other = _read_quadric(quadric + change, linear + turn)
        if other is None:
            return None
        moved.append(root @ (other[0] - centre))
        draws.append(root @ _align(other[1] - shape, shape))
    return Ellipsoid(
        middle + root @ centre,
        root @ shape,
        np.full(r, np.sqrt(np.mean(np.square(moved)))),
        np.array(draws),
        sigma / radius,
        float(np.max(np.abs(residual))) / radius,
        centred,
    )


def _read_quadric(
    quadric: Float[Array, "r r"], linear: Float[Array, " r"]
) -> tuple[Float[Array, " r"], Float[Array, "r r"]] | None:
    """Centre and symmetric shape of p.S p + b.p = 1; None where S is not positive definite."""
    sizes, axes = np.linalg.eigh(quadric)
    if sizes[0] <= 1e-12 * sizes[-1]:
        return None
    centre = -0.5 * axes @ ((axes.T @ linear) / sizes)
    radius = 1.0 + centre @ quadric @ centre
    return centre, np.asarray((axes * np.sqrt(radius / sizes)) @ axes.T)


def _align(change: Float[Array, "r r"], shape: Float[Array, "r r"]) -> Float[Array, "r r"]:
    """A change of the shape without the rotation in it that would not count: the antisymmetric
    part of shape^-1 change is one."""
    turned = np.linalg.solve(shape, change)
    return np.asarray(shape @ (turned + turned.T) / 2.0)


def _solver(
    points: Float[Array, "n r"], centred: bool
) -> Callable[[Array, float], tuple[Array, Array]]:
    """Least squares for S and b, for a right side and with an accuracy."""
    n, r = points.shape
    if r <= DENSE:
        rows, columns, weight = half_of(r)
        features = points[:, rows] * points[:, columns] * weight
        design = features if centred else np.hstack([features, points])
        turn, upper = qr(design, mode="economic", overwrite_a=True, check_finite=False)

        def solve(target: Array, accuracy: float) -> tuple[Array, Array]:
            found = solve_triangular(upper, turn.T @ target)
            quadric = np.zeros((r, r))
            quadric[rows, columns] = quadric[columns, rows] = found[: len(rows)] / weight
            return quadric, np.zeros(r) if centred else found[len(rows) :]

        return solve

    def scale(matrix: Array) -> Array:
        """Second moments of the features of Gaussian points are 2 S + tr(S) 1: its inverse root."""
        part = np.trace(matrix) / r
        return np.asarray(
            (matrix - part * np.eye(r)) / np.sqrt(2.0) + part * np.eye(r) / np.sqrt(2.0 + r)
        )

    def apply(unknowns: Array) -> Array:
        matrix = unknowns[: r * r].reshape(r, r)
        values = np.sum((points @ scale(matrix + matrix.T)) * points, axis=1) / 2.0
        return values if centred else values + points @ unknowns[r * r :]

    def adjoint(values: Array) -> Array:
        matrix = scale((points * values[:, None]).T @ points)
        return matrix.ravel() if centred else np.append(matrix.ravel(), points.T @ values)

    size = r * r + (0 if centred else r)
    operator = LinearOperator((n, size), matvec=apply, rmatvec=adjoint, dtype=np.float64)

    def iterate(target: Array, accuracy: float) -> tuple[Array, Array]:
        found = lsmr(operator, target, atol=accuracy, btol=accuracy, conlim=0.0, maxiter=1000)[0]
        matrix = found[: r * r].reshape(r, r)
        return scale((matrix + matrix.T) / 2.0), np.zeros(r) if centred else found[r * r :]

    return iterate
