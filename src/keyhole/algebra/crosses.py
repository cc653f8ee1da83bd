"""A matrix from some of its columns and rows: Y = A·Ω, B = T·A, and A = Y (T Y)⁻¹ B."""

import numpy as np
from scipy.linalg import lu_factor, lu_solve

from keyhole.arrays import Array, Float


class Crosses:
    """As many columns as rows, seen along orthonormal directions, with their standard errors."""

    def __init__(self, width: int) -> None:
        self.t, self.omega = np.zeros((2, 0, width))  # orthonormal rows
        self.rows = np.zeros((0, width))  # t · A
        self.columns = np.zeros((width, 0))  # A · ω
        self.row_errors, self.column_errors = np.zeros(0), np.zeros(0)
        self.core = lu_factor(np.zeros((0, 0)))  # of t · A · ω

    def __len__(self) -> int:
        return len(self.t)

    def add_columns(
        self, omega: Float[Array, "k d"], columns: Float[Array, "d k"], errors: Float[Array, " k"]
    ) -> None:
        """New directions, orthogonal to those before; rows must follow."""
        self.omega = np.vstack([self.omega, omega])
        self.columns = np.column_stack([self.columns, columns])
        self.column_errors = np.append(self.column_errors, errors)

    def add_rows(
        self, t: Float[Array, "k d"], rows: Float[Array, "k d"], errors: Float[Array, " k"]
    ) -> None:
        """As many as there are new columns: both make new crosses."""
        self.t, self.rows = np.vstack([self.t, t]), np.vstack([self.rows, rows])
        self.row_errors = np.append(self.row_errors, errors)
        self.core = lu_factor(self.t @ self.columns)

    def explained(self, x: Float[Array, "n d"]) -> Float[Array, "d n"]:
        """A · x as far as the crosses explain it."""
        if not len(self):
            return np.zeros((self.rows.shape[1], len(x)))
        return self.columns @ lu_solve(self.core, self.rows @ x.T)

    def explained_error(self, u: Float[Array, "m d"], x: Float[Array, "n d"]) -> float:
        """Largest standard error of u · A · x, as far as the crosses explain it."""
        if not len(self):
            return 0.0
        by_columns = self.column_errors[:, None] * lu_solve(self.core, self.rows @ x.T)
        by_rows = self.row_errors[:, None] * lu_solve(self.core, (u @ self.columns).T, trans=1)
        return float(sum(np.linalg.norm(part, axis=0).max() for part in (by_columns, by_rows)))

    def weights(self) -> tuple[Float[Array, "r d"], Float[Array, "d r"]]:
        """(T Y)⁻¹ B, by which the columns count in every entry, and Y (T Y)⁻¹, by which the rows
        do. Where T and Ω are complete, that is Ω and Tᵀ."""
        if len(self) == self.rows.shape[1]:
            return self.omega, self.t.T
        left = lu_solve(self.core, self.columns.T, trans=1).T
        return lu_solve(self.core, self.rows), left
