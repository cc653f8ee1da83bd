"""A matrix of low rank from rank-one measurements a_k · W b_k: Gauss–Newton on the factors.

At W = U S Vᵀ a step is X Vᵀ + U Yᵀ with Y orthogonal to V: 2rd − r² unknowns, and with U and V
orthonormal their least squares is well conditioned whatever the singular values of W are. The sum
is brought back to rank r by its singular value decomposition. Nothing of size d × d is formed.

The rank is raised step by step from one, each new direction taken from what the fit leaves over,
so that large singular values are settled before small ones are looked for.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import svd
from scipy.sparse.linalg import LinearOperator, lsmr

from keyhole.arrays import Array, Float

ROUGH = 1e-3  # relative accuracy of a step far from the fit


@dataclass(frozen=True, eq=False)
class Measured:
    """products_k = left_k · W right_k, with standard errors."""

    left: Float[Array, "m d"]
    right: Float[Array, "m d"]
    products: Float[Array, " m"]
    errors: Float[Array, " m"]

    def __len__(self) -> int:
        return len(self.products)

    @property
    def width(self) -> int:
        return int(self.left.shape[1])

    @property
    def weights(self) -> Float[Array, " m"]:
        """Of the residuals: one for an ordinary measurement, less for one with a larger error."""
        typical = float(np.median(self.errors)) or 1.0
        return typical / np.maximum(self.errors, typical)

    def part(self, chosen: Any) -> "Measured":
        return Measured(
            self.left[chosen], self.right[chosen], self.products[chosen], self.errors[chosen]
        )


@dataclass(frozen=True, eq=False)
class Factored:
    """W = left · diag(singular) · right, the outer factors orthonormal."""

    left: Float[Array, "d r"]
    singular: Float[Array, " r"]
    right: Float[Array, "r k"]

    @classmethod
    def of(cls, left: Float[Array, "d n"], right: Float[Array, "n k"], rank: int) -> "Factored":
        """The best approximation of rank `rank` to left @ right."""
        q_left, r_left = np.linalg.qr(left)
        q_right, r_right = np.linalg.qr(right.T)
        core = r_left @ r_right.T
        try:
            u, s, vt = np.linalg.svd(core)
        except np.linalg.LinAlgError:  # divide and conquer may give up on a finite matrix
            u, s, vt = svd(core, lapack_driver="gesvd")
        return cls(q_left @ u[:, :rank], s[:rank], vt[:rank] @ q_right.T)

    @classmethod
    def zero(cls, width: int) -> "Factored":
        return cls(np.zeros((width, 0)), np.zeros(0), np.zeros((0, width)))

    @property
    def rank(self) -> int:
        return len(self.singular)

    def cut(self, rank: int) -> "Factored":
        return Factored(self.left[:, :rank], self.singular[:rank], self.right[:rank])

    def predict(self, measured: Measured) -> Float[Array, " m"]:
        seen = (measured.left @ self.left) * self.singular
        return np.einsum("mr,mr->m", seen, measured.right @ self.right.T)


@dataclass(frozen=True, eq=False)
class LowRankFit:
    matrix: Factored
    residual: float  # root mean square of the weighted residuals


def count_unknowns(width: int, rank: int) -> int:
    """Of a square matrix of this width and rank."""
    return 2 * rank * width - rank * rank


def fit(measured: Measured, start: Factored) -> LowRankFit:
    """Gauss–Newton from a matrix of the same rank until the residual settles: a step improves it by
    less than a tenth, or what is left is rounding."""
    weights = measured.weights
    size = _rms(weights * measured.products)
    point, rest = start, weights * (measured.products - start.predict(measured))
    residual = _rms(rest)
    for _ in range(60):
        if residual <= 1e-15 * size:
            break
        accuracy = 1e-14 if residual < 1e-2 * size else ROUGH
        across, along = _solve_step(measured, weights, point, rest, accuracy)
        better = _improve(measured, weights, point, across, along, residual)
        if better is None:
            break
        settled = better.residual > 0.9 * residual
        point, residual = better.matrix, better.residual
        if settled:
            break
        rest = weights * (measured.products - point.predict(measured))
    return LowRankFit(point, residual)


def _improve(
    measured: Measured,
    weights: Array,
    point: Factored,
    across: Array,
    along: Array,
    residual: float,
) -> LowRankFit | None:
    """The step, shortened until it improves the fit; None if it never does."""
    share = 1.0
    for _ in range(8):
        left = np.hstack([point.left * point.singular + share * across, point.left])
        right = np.vstack([point.right, share * along.T])
        trial = Factored.of(left, right, point.rank)
        found = _rms(weights * (measured.products - trial.predict(measured)))
        if found < residual:
            return LowRankFit(trial, found)
        share *= 0.5
    return None


def _solve_step(
    measured: Measured, weights: Array, point: Factored, rest: Array, accuracy: float
) -> tuple[Float[Array, "d r"], Float[Array, "d r"]]:
    """X and Y of the change X·right + left·Yᵀ that explains `rest` best."""
    width, rank = measured.width, point.rank
    seen_left = weights[:, None] * (measured.left @ point.left)
    seen_right = weights[:, None] * (measured.right @ point.right.T)

    def outside(change: Array) -> Array:
        return change - point.right.T @ (point.right @ change)

    def forward(vector: Array) -> Array:
        across, along = vector.reshape(2, width, rank)
        return np.einsum("mr,mr->m", measured.left @ across, seen_right) + np.einsum(
            "mr,mr->m", measured.right @ outside(along), seen_left
        )

    def backward(vector: Array) -> Array:
        across = measured.left.T @ (vector[:, None] * seen_right)
        along = outside(measured.right.T @ (vector[:, None] * seen_left))
        return np.concatenate([across.ravel(), along.ravel()])

    shape = (len(measured), 2 * width * rank)
    operator = LinearOperator(shape, matvec=forward, rmatvec=backward, dtype=np.float64)
    solution = lsmr(operator, rest, atol=accuracy, btol=accuracy, conlim=0)[0]
    across, along = solution.reshape(2, width, rank)
    return across, outside(along)


def find_leading(measured: Measured, rest: Array, count: int, rng: np.random.Generator) -> Factored:
    """The leading directions of Σ_k rest_k left_k right_kᵀ, scaled to explain `rest` best."""
    block = rng.standard_normal((measured.width, count))
    for _ in range(4):
        block, _ = np.linalg.qr(measured.left.T @ (rest[:, None] * (measured.right @ block)))
        block, _ = np.linalg.qr(measured.right.T @ (rest[:, None] * (measured.left @ block)))
    found = Factored.of(
        measured.left.T @ (rest[:, None] * (measured.right @ block)), block.T, count
    )
    seen = found.predict(measured)
    power = float(seen @ seen)
    return Factored(
        found.left, found.singular * (float(seen @ rest) / power if power > 0 else 0.0), found.right
    )


def fit_by_rank(measured: Measured, highest: int, rng: np.random.Generator) -> Iterator[LowRankFit]:
    """Fits of rank growing by half, each starting from the one before; the caller says when to
    stop."""
    weights, rank = measured.weights, min(1, highest)
    point = find_leading(measured, weights**2 * measured.products, rank, rng)
    while True:
        found = fit(measured, point)
        yield found
        if rank >= highest:
            return
        more = min(max(rank + 1, int(1.5 * rank)), highest) - rank
        rest = weights**2 * (measured.products - found.matrix.predict(measured))
        added = find_leading(measured, rest, more, rng)
        point = Factored.of(
            np.hstack([found.matrix.left * found.matrix.singular, added.left * added.singular]),
            np.vstack([found.matrix.right, added.right]),
            rank + more,
        )
        rank = point.rank


def scatter(
    measured: Measured, point: Factored, draws: int, rng: np.random.Generator
) -> list[Factored]:
    """Changes of the fit that errors of the measurements like those stated would make."""
    weights, changes = measured.weights, []
    for _ in range(draws):
        noise = weights * measured.errors * rng.standard_normal(len(measured))
        across, along = _solve_step(measured, weights, point, noise, ROUGH)
        left, right = np.hstack([across, point.left]), np.vstack([point.right, along.T])
        changes.append(Factored.of(left, right, min(2 * point.rank, measured.width)))
    return changes


def _rms(numbers: Array) -> float:
    return float(np.sqrt(np.mean(np.square(numbers)))) if len(numbers) else 0.0
