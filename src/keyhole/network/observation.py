"""What is seen of the answers behind a network.

An algorithm that fits a network to answers is given an `Observation` of them: the answers whole
(`Value`), or without their part along one direction each (`Direction`), as behind a norm, which
hides the length of what comes out.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import TINY, Array, Float


@runtime_checkable
class Observation(Protocol):
    """What is seen of answers that are linear in the columns of a basis."""

    def completed(
        self, basis: Float[Array, "n c"], answers: Float[Array, "n d"]
    ) -> Float[Array, "n d"]:
        """The answers, and what they lack, as the best combination of the columns has it."""
        ...

    def hides(self, directions: Float[Array, "d m"]) -> Float[Array, "n m"] | None:
        """How much of these directions each answer lacks; None where it lacks nothing."""
        ...


@dataclass(frozen=True)
class Value:
    """Answers are seen whole."""

    def completed(
        self, basis: Float[Array, "n c"], answers: Float[Array, "n d"]
    ) -> Float[Array, "n d"]:
        return answers

    def hides(self, directions: Float[Array, "d m"]) -> None:
        return None


@dataclass(frozen=True, eq=False)
class Direction:
    """Answers lack their parts along these unit vectors, one for each of them."""

    hidden: Float[Array, "n d"]

    def completed(
        self, basis: Float[Array, "n c"], answers: Float[Array, "n d"]
    ) -> Float[Array, "n d"]:
        return answers + impute(basis, answers, self.hidden)

    def hides(self, directions: Float[Array, "d m"]) -> Float[Array, "n m"]:
        return np.asarray(self.hidden @ directions)


def impute(
    basis: Float[Array, "n c"], answers: Float[Array, "n d"], hidden: Float[Array, "n d"]
) -> Float[Array, "n d"]:
    """What the answers lack, as the linear part would have it: conjugate gradients for the sizes
    s that minimise the residual of answers + s hidden. Few steps are enough, since one number of
    each answer is missing; a function along `hidden` everywhere, as the identity on a sphere is,
    has no part in it."""

    def left(table: Array) -> Array:
        """Along `hidden`, of what the basis leaves."""
        return np.asarray(((table - basis @ (basis.T @ table)) * hidden).sum(axis=1))

    sizes, gradient = np.zeros(len(answers)), -left(answers)
    first = square = float(gradient @ gradient)
    way, most = gradient, 40
    for _ in range(most):
        if square <= 1e-28 * first or square < TINY:
            break
        image = left(way[:, None] * hidden)
        bend = float(way @ image)
        if bend <= 1e-12 * float(way @ way):
            break
        sizes = sizes + square / bend * way
        gradient = gradient - square / bend * image
        before, square = square, float(gradient @ gradient)
        way = gradient + square / before * way
    return np.asarray(sizes[:, None] * hidden)
