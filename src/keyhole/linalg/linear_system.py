"""Exact linear equations in the values of several heads, collected while the heads are found.

Every row says: answer = sum_h row_h . value_h, where row_h is the token that head h attends to.
Rows of one arrangement of tokens differ little from each other, so what is *known* is judged by the
directions of their differences, and what is *computed* is one least-squares problem over the rows
themselves (they share the same rounding error).
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.linalg.rank import count_above


@dataclass(frozen=True, eq=False)
class LinearSystem:
    """Rows, answers, and the directions that the rows have explored."""

    rows: Float[Array, "n h d"]
    answers: Float[Array, "n outputs"]
    directions: Float[Array, "n h d"]

    @classmethod
    def of(cls, rows: Float[Array, "n h d"], answers: Float[Array, "n outputs"]) -> "LinearSystem":
        """The system of these equations, each of which explores its own row."""
        return cls(rows, answers, rows)

    def add(
        self,
        rows: Float[Array, "n h d"],
        answers: Float[Array, "n outputs"],
        origin: Float[Array, "h d"] | None = None,
    ) -> "LinearSystem":
        """The system with more equations; `origin` is the arrangement they are perturbations of."""
        directions = rows if origin is None else rows - origin
        return LinearSystem(
            np.concatenate([self.rows, rows]),
            np.concatenate([self.answers, answers]),
            np.concatenate([self.directions, directions]),
        )

    def split(self, head: int, place: int) -> "LinearSystem":
        """The system after head `head` turned out to be two, the other one now at `place`: both
        attended to the same tokens so far."""
        rows, directions = (
            np.insert(part, place, part[:, head], axis=1) for part in (self.rows, self.directions)
        )
        return LinearSystem(rows, self.answers, directions)

    def find_unexplored(self) -> Float[Array, "k h d"]:
        """Orthonormal directions, over all heads at once, that no equation has explored."""
        flat = self.directions.reshape(len(self.directions), -1)
        flat = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), TINY)
        _, sizes, basis = np.linalg.svd(flat)
        dependent = 1e-7  # singular value, of normalised directions, below which they add nothing
        rank = count_above(sizes, dependent)
        return basis[rank:].reshape(-1, *self.rows.shape[1:])

    def solve(self) -> tuple[Float[Array, "h d outputs"], Float[Array, "k n"]]:
        """The values, and the matrix that takes errors of answers to errors of values."""
        flat = self.rows.reshape(len(self.rows), -1)
        # relative singular value that is rounding: a direction that was not explored
        singular = 1e-15
        inverse = np.linalg.pinv(flat, rcond=singular)
        values = inverse @ self.answers
        # One step of refinement: perturbations are small beside what they perturb, and the solver's
        # own rounding must not exceed the answers'.
        values += inverse @ (self.answers - flat @ values)
        return values.reshape(*self.rows.shape[1:], -1), inverse
