"""Exact linear equations in the values of several heads, collected while they are found.

Every row says: answer = sum_h row_h . value_h, where row_h is the token head h attends to. Rows of
one configuration differ little from each other, so what is *known* is judged by the directions of
their differences, and what is *computed* is one least-squares problem over the rows themselves
(they share the same rounding error).
"""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import TINY, Array, Float

SINGULAR = 1e-15  # relative singular value that is rounding: directions that were not explored
DEPENDENT = 1e-7  # singular value, of normalised directions, below which they add nothing


@dataclass
class Equations:
    """Rows (heads, width) and answers (outputs,), with the directions they have explored."""

    heads: int
    width: int
    rows: list[Array] = field(default_factory=list)
    answers: list[Array] = field(default_factory=list)
    directions: list[Array] = field(default_factory=list)

    def add(
        self,
        rows: Float[Array, "n h d"],
        answers: Float[Array, "n outputs"],
        origin: Float[Array, "h d"] | None = None,
    ) -> None:
        """New equations; `origin` is the configuration they are perturbations of."""
        for row, answer in zip(rows, answers, strict=True):
            self.rows.append(row)
            self.answers.append(answer)
            self.directions.append(row if origin is None else row - origin)

    def split(self, head: int, place: int) -> None:
        """Head `head` turns out to be two, the other now at `place`: both attended to the same
        tokens so far."""
        for kind in (self.rows, self.directions):
            kind[:] = [np.insert(row, place, row[head], axis=0) for row in kind]
        self.heads += 1

    def unexplored(self) -> Float[Array, "k h d"]:
        """Orthonormal directions, over all heads at once, that no equation has looked at."""
        flat = np.stack(self.directions).reshape(len(self.directions), -1)
        flat = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), TINY)
        _, sizes, basis = np.linalg.svd(flat)
        rank = int((sizes > DEPENDENT).sum())
        return basis[rank:].reshape(-1, self.heads, self.width)

    def solve(self) -> tuple[Float[Array, "h d outputs"], Float[Array, "k n"]]:
        """Values, and the matrix that takes errors of answers to errors of values."""
        flat = np.stack(self.rows).reshape(len(self.rows), -1)
        # Perturbations are small beside what they perturb: differences first, so that the
        # solver's own rounding does not exceed the answers'.
        inverse = np.linalg.pinv(flat, rcond=SINGULAR)
        answers = np.stack(self.answers)
        values = inverse @ answers
        values += inverse @ (answers - flat @ values)
        return values.reshape(self.heads, self.width, -1), inverse
