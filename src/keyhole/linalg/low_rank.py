"""Matrices of low rank: their range, column by column, and what noise leaves of singular values."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.linalg.rank import count_above, noise_edge


@dataclass(eq=False)
class RangeFinder:
    """Grows an orthonormal basis Q of the columns seen so far; orthogonalises twice, so that the
    basis stays orthonormal to rounding however nearly dependent the columns are."""

    width: int

    def __post_init__(self) -> None:
        self._rows = np.zeros((0, self.width))

    @property
    def rank(self) -> int:
        return len(self._rows)

    @property
    def basis(self) -> Float[Array, "d r"]:
        return self._rows.T

    def add(self, column: Float[Array, " d"]) -> None:
        """Extends the range by a column that is not in it."""
        rest = self.outside(column)
        self._rows = np.vstack([self._rows, rest / np.linalg.norm(rest)])

    def become(self, basis: Float[Array, "d r"]) -> None:
        """Takes over an orthonormal basis."""
        self._rows = np.ascontiguousarray(basis.T)

    def outside(self, vectors: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        """The part of each vector orthogonal to the range."""
        for _ in range(2):
            vectors = vectors - (vectors @ self._rows.T) @ self._rows
        return vectors


@dataclass(frozen=True, eq=False)
class Truncated:
    """left · diag(singular) · right, entrywise standard errors, and the largest singular value that
    noise alone shows."""

    left: Float[Array, "d r"]
    singular: Float[Array, " r"]
    right: Float[Array, "r n"]
    error: Float[Array, "d n"]
    level: float


def truncate_noise(
    matrix: Float[Array, "d n"],
    error: Float[Array, "d n"],
    draws: list[Array],
    rank: int | None = None,
) -> Truncated:
    """The matrix without the singular values that noise explains (those below 1.5 times the
    largest that noise alone shows), or of a given rank. `draws` of its error are projected as it
    is, and tell the error that is left."""
    left, singular, right = np.linalg.svd(matrix, full_matrices=False)
    level = noise_edge(error, (matrix.shape[0], matrix.shape[1]))
    kept = count_above(singular, 1.5 * level) if rank is None else min(rank, len(singular))
    left, singular, right = left[:, :kept], singular[:kept], right[:kept]
    moved = [x - _outside(left, _outside(right.T, x.T).T) for x in draws]
    hidden = 0.5 * level / np.sqrt(matrix.size)  # a singular value that may be there unseen
    return Truncated(
        left, singular, right, np.sqrt(np.mean(np.square(moved), axis=0) + hidden**2), level
    )


def separate_errors(error: Float[Array, "d n"]) -> tuple[Float[Array, "d 1"], Float[Array, "1 n"]]:
    """Entrywise errors as a product, of the same root mean square: those of a score in factors."""
    left, _, right = np.linalg.svd(error)
    rows, columns = np.abs(left[:, :1]), np.abs(right[:1])
    scale = np.linalg.norm(error) / (np.linalg.norm(rows) * np.linalg.norm(columns))
    return scale * rows, columns


def _outside(basis: Float[Array, "d r"], rows: Float[Array, "d n"]) -> Float[Array, "d n"]:
    return np.asarray(rows - basis @ (basis.T @ rows))
