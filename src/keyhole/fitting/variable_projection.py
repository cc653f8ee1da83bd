"""Variable projection: given the scores, the best values are a linear least-squares problem.

With Z = [A_1 ... A_m (1)] from the scores and B = [W_1; ...; W_m (offset)], B = argmin |Y - Z B|
by QR, and only the scores remain as unknowns. The Jacobian of the projected residual is taken in
Kaufman's form, (I - Q Q^t) dY/dTheta, exact to first order at a zero residual.

Source: Golub, Pereyra (1973); Kaufman (1975).
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr, solve_triangular

from keyhole.arrays import Array, Float
from keyhole.fitting.attention_rows import (
    Rows,
    average_tokens,
    compute_patterns,
    compute_responses,
    pull,
    push,
)
from keyhole.linalg.rank import count_above_share

DENSE_LIMIT = 1100  # score entries up to which forming the normal matrix is worth its time


@dataclass(frozen=True, eq=False)
class ProjectedFit:
    """The fit at one theta: best values, residual, and what its derivatives need."""

    theta: Float[Array, "p m d"]
    pattern: Float[Array, "n am L"]
    basis: Float[Array, "na rank"]  # orthonormal columns spanning Z
    values: Float[Array, "md D"]
    offset: Float[Array, " D"]
    residual: Float[Array, "na D"]
    cost: float  # squared residual

    def astype(self, dtype: type) -> "ProjectedFit":
        return ProjectedFit(
            self.theta.astype(dtype),
            self.pattern.astype(dtype),
            self.basis.astype(dtype),
            self.values.astype(dtype),
            self.offset.astype(dtype),
            self.residual.astype(dtype),
            self.cost,
        )


def project(rows: Rows, theta: Float[Array, "p m d"]) -> ProjectedFit:
    """Best values for these scores."""
    pattern = compute_patterns(rows, theta)
    design = average_tokens(rows, pattern)
    if rows.offset:
        design = np.hstack([design, rows.weights.reshape(-1, 1)])
    targets = rows.targets.reshape(len(design), -1) * rows.weights.reshape(-1, 1)
    basis, order, upper = factor_columns(design)
    inside = basis.T @ targets
    values = np.zeros((design.shape[1], targets.shape[1]))
    values[order] = solve_triangular(upper, inside, check_finite=False)
    residual = targets - basis @ inside
    wide = theta.shape[1] * theta.shape[2]
    offset = values[wide] if rows.offset else np.zeros(targets.shape[1])
    cost = float(np.einsum("ij,ij->", residual, residual))
    return ProjectedFit(theta, pattern, basis, values[:wide], offset, residual, cost)


def factor_columns(design: Array) -> tuple[Array, Array, Array]:
    """Orthonormal basis, the columns it was made of, and the triangle between them."""
    basis, upper = qr(design, mode="economic", check_finite=False)
    sizes = np.abs(np.diagonal(upper))
    rank_tolerance = 1e-12  # size of a column of Z, beside the others, that carries no information
    if len(design) >= design.shape[1] and sizes.min() > rank_tolerance * sizes.max():
        return basis, np.arange(len(upper)), upper
    basis, upper, order = qr(design, mode="economic", pivoting=True, check_finite=False)
    sizes = np.abs(np.diagonal(upper))
    rank = max(count_above_share(sizes, rank_tolerance), 1)
    return basis[:, :rank], order[:rank], upper[:rank, :rank]


def compute_gradient(rows: Rows, at: ProjectedFit) -> Float[Array, "p m d"]:
    """Half the descent direction of the cost: J^t residual (exact, the projection drops out)."""
    return pull(rows, at.pattern, at.values, at.residual)


def multiply_normal(rows: Rows, at: ProjectedFit, direction: Array) -> Array:
    """J^t J direction."""
    change = push(rows, at.pattern, at.values, direction)
    change -= at.basis @ (at.basis.T @ change)
    return pull(rows, at.pattern, at.values, change)


def form_normal(rows: Rows, at: ProjectedFit) -> Float[Array, "pmd pmd"]:
    """J^t J of the projected residual, from the rows' Kronecker structure.

    A row's derivative is anchor x G: the sum over rows of (q q^t) x (G G^t) is one matrix product
    of the anchors' outer products with the responses'; the projection takes away the part of J
    inside the span of Z.
    """
    n, a, p = rows.anchors.shape
    anchors = rows.anchors.reshape(n * a, p)
    response = compute_responses(rows, at.pattern, at.values)
    wide = response.shape[1] * response.shape[2]
    response = response.reshape(n * a, wide, -1)
    total = np.zeros((p * p, wide * wide), dtype=response.dtype)
    step = max(1, 8_000_000 // (wide * wide))  # 64 MB are held at a time
    for first in range(0, n * a, step):
        some, part = anchors[first : first + step], response[first : first + step]
        pairs = (some[:, :, None] * some[:, None, :]).reshape(len(some), p * p)
        moments = (part @ part.transpose(0, 2, 1)).reshape(len(some), wide * wide)
        total += pairs.T @ moments
    normal = total.reshape(p, p, wide, wide).transpose(0, 2, 1, 3).reshape(p * wide, p * wide)
    inside = _inside(rows, at, response).reshape(-1, p * wide)
    return np.asarray(normal - inside.T @ inside)


def project_derivative(rows: Rows, at: ProjectedFit) -> Float[Array, "rank D pmd"]:
    """Q^t dY/dTheta: the part of the Jacobian that the values can absorb."""
    response = compute_responses(rows, at.pattern, at.values)
    return _inside(rows, at, response.reshape(len(response), -1, response.shape[3]))


def _inside(rows: Rows, at: ProjectedFit, response: Float[Array, "na md D"]) -> Array:
    n, a, p = rows.anchors.shape
    wide, outputs = response.shape[1:]
    spread = at.basis[:, :, None] * rows.anchors.reshape(n * a, 1, p)
    inside = spread.reshape(n * a, -1).T @ response.reshape(n * a, -1)
    inside = inside.reshape(-1, p, wide, outputs).transpose(0, 3, 1, 2)
    return np.asarray(inside.reshape(-1, outputs, p * wide))
