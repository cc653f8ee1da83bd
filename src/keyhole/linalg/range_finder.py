"""The range of a matrix, column by column."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float


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
