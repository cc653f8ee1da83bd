"""A matrix of low rank seen through noise: what is left without that which noise explains."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float

ABOVE_NOISE = 1.5  # a singular value this much above what noise shows is there
HIDDEN = 0.5  # and one of this share of it may be there unseen


@dataclass(frozen=True, eq=False)
class Truncated:
    """left · diag(singular) · right, entrywise standard errors, and the largest singular value that
    noise alone shows."""

    left: Float[Array, "d r"]
    singular: Float[Array, " r"]
    right: Float[Array, "r n"]
    error: Float[Array, "d n"]
    level: float


def without_noise(
    matrix: Float[Array, "d n"],
    error: Float[Array, "d n"],
    draws: list[Array],
    rank: int | None = None,
) -> Truncated:
    """The matrix without the singular values that noise explains, or of a given rank. `draws` of
    its error are projected as it is, and tell the error that is left."""
    left, singular, right = np.linalg.svd(matrix, full_matrices=False)
    # the largest singular value of a random matrix with such entries, from both its sides
    square = error**2
    level = float(np.sqrt(square.sum(axis=0).max()) + np.sqrt(square.sum(axis=1).max()))
    kept = int(np.sum(singular > ABOVE_NOISE * level)) if rank is None else min(rank, len(singular))
    left, singular, right = left[:, :kept], singular[:kept], right[:kept]
    moved = [x - _outside(left, _outside(right.T, x.T).T) for x in draws]
    hidden = HIDDEN * level / np.sqrt(matrix.size)
    return Truncated(
        left, singular, right, np.sqrt(np.mean(np.square(moved), axis=0) + hidden**2), level
    )


def separated(error: Float[Array, "d n"]) -> tuple[Float[Array, "d 1"], Float[Array, "1 n"]]:
    """Entrywise errors as a product, of the same root mean square: those of a score in factors."""
    left, _, right = np.linalg.svd(error)
    rows, columns = np.abs(left[:, :1]), np.abs(right[:1])
    scale = np.linalg.norm(error) / (np.linalg.norm(rows) * np.linalg.norm(columns))
    return scale * rows, columns


def _outside(basis: Float[Array, "d r"], rows: Float[Array, "d n"]) -> Float[Array, "d n"]:
    return np.asarray(rows - basis @ (basis.T @ rows))
