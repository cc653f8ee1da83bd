"""A matrix from some of its columns and rows: Y = A·Ω, B = T·A, and A = Y (T Y)⁻¹ B."""

import numpy as np
from scipy.linalg import lu_factor, lu_solve

from keyhole.arrays import Array, Float
from keyhole.linalg.reflections import without


class Parted:
    """Orthonormal rows in two parts of one array: what is left to choose from, and what was taken,
    the latest first."""

    def __init__(self, rows: Float[Array, "d d"]) -> None:
        self._all = np.array(rows)
        self.left, self.taken = np.split(self._all, [len(rows)])

    def take(self, weights: Float[Array, "k n"]) -> Float[Array, "k d"]:
        """Combinations, orthonormal, of those that are left."""
        taken = weights @ self.left
        self.left = without(self.left, weights)
        self.taken = self._all[len(self.left) :]
        self.taken[: len(taken)] = taken
        return taken


class Crosses:
    """As many columns as rows, seen along orthonormal directions, with their standard errors; the
    latest first."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.t, self.omega = np.zeros((2, 0, width))  # orthonormal rows
        self.rows = np.zeros((0, width))  # t · A
        self.columns = np.zeros((width, 0))  # A · ω
        self.row_errors, self.column_errors = np.zeros(0), np.zeros(0)
        self.core = lu_factor(np.zeros((0, 0)))  # of t · A · ω, unless complete

    def __len__(self) -> int:
        return len(self.t)

    @property
    def complete(self) -> bool:
        return len(self) == self.width

    def add_columns(
        self, omega: Float[Array, "n d"], columns: Float[Array, "d k"], errors: Float[Array, " k"]
    ) -> None:
        """New columns; `omega` are all directions, the new ones first. Rows must follow."""
        self.omega, self.columns = omega, np.column_stack([columns, self.columns])
        self.column_errors = np.append(errors, self.column_errors)

    def add_rows(
        self, t: Float[Array, "n d"], rows: Float[Array, "k d"], errors: Float[Array, " k"]
    ) -> None:
        """As many as there are new columns: both make new crosses."""
        self.t, self.rows = t, np.vstack([rows, self.rows])
        self.row_errors = np.append(errors, self.row_errors)
        if not self.complete:
            self.core = lu_factor(self.t @ self.columns, overwrite_a=True)

    def by_columns(self, x: Float[Array, "n d"]) -> Float[Array, "r n"]:
        """(T Y)⁻¹ B x, by which the columns count in A · x. Where Ω is complete, that is Ω x."""
        return self.omega @ x.T if self.complete else lu_solve(self.core, self.rows @ x.T)

    def by_rows(self, u: Float[Array, "m d"]) -> Float[Array, "r m"]:
        """u Y (T Y)⁻¹, by which the rows count in u · A. Where T is complete, that is u Tᵀ."""
        if self.complete:
            return np.asarray(self.t @ u.T)
        return np.asarray(lu_solve(self.core, (u @ self.columns).T, trans=1))

    def explained(self, x: Float[Array, "n d"]) -> Float[Array, "d n"]:
        """A · x as far as the crosses explain it."""
        if not len(self):
            return np.zeros((self.width, len(x)))
        return self.columns @ self.by_columns(x)

    def explained_error(self, u: Float[Array, "m d"], x: Float[Array, "n d"]) -> float:
        """Largest standard error of u · A · x, as far as the crosses explain it."""
        if not len(self):
            return 0.0
        by_columns = self.column_errors[:, None] * self.by_columns(x)
        by_rows = self.row_errors[:, None] * self.by_rows(u)
        return float(sum(np.linalg.norm(part, axis=0).max() for part in (by_columns, by_rows)))

    def weights(self) -> tuple[Float[Array, "r d"], Float[Array, "d r"]]:
        """(T Y)⁻¹ B and Y (T Y)⁻¹."""
        if self.complete:
            return self.omega, self.t.T
        left = lu_solve(self.core, self.columns.T, trans=1).T
        return lu_solve(self.core, self.rows), left
