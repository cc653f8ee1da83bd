"""Orthonormal bases whose members look alike to a given map.

A probe is useful in proportion to its overlap with the value map, so no probe should have a small
one. `equal_overlap` returns a random orthonormal basis in which every member (or every group of k
members, for a value map of rank k) has the same overlap. Random, so that the scores measured along
it have one predictable scale however sparse or lopsided the score matrix is. `reflect_rows` and
`complement_rows` mix orthonormal rows among each other in the memory where they lie.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keyhole.arrays import Array, Float, Int, digest

DENSE_LIMIT = 1536  # up to this width a basis is an array; beyond, rows are made on demand


@dataclass(frozen=True, eq=False)
class DenseBasis:
    """An orthonormal basis kept as a matrix, one member per row."""

    matrix: Float[Array, "d d"]

    @property
    def width(self) -> int:
        return int(self.matrix.shape[1])

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        """Members by number; a view of them where they follow each other."""
        first = int(index[0]) if len(index) else 0
        if np.array_equal(index, np.arange(first, first + len(index))):
            return self.matrix[first : first + len(index)]
        return np.take(self.matrix, index, axis=0)

    def combine(self, coefficients: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Vectors from their coordinates."""
        return coefficients @ self.matrix

    def coordinates(self, vectors: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return vectors @ self.matrix.T

    def combine_squared(self, coefficients: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """coefficients @ matrix**2: how variances travel."""
        return coefficients @ self.matrix**2

    @cached_property
    def _digest(self) -> bytes:
        return digest(self.matrix)

    def digest(self) -> bytes:
        return self._digest


@dataclass(frozen=True, eq=False)
class KroneckerBasis:
    """Rows of (outer ⊗ inner) reflected at the hyperplane normal to `mirror`; O(d) memory."""

    outer: Float[Array, "a a"]
    inner: Float[Array, "b b"]
    mirror: Float[Array, " d"]  # a unit vector, or zero for no reflection

    @property
    def width(self) -> int:
        return int(self.outer.shape[0] * self.inner.shape[0])

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        """Each depends on its number alone, to the last bit, whatever it is asked with."""
        high, low = np.divmod(index, self.inner.shape[0])
        cube = np.einsum("na,nb->nab", self.outer[high], self.inner[low])  # faster than a product
        rows = cube.reshape(len(index), self.width)
        rows -= self._mirrored[index, None] * self.mirror
        return rows

    @cached_property
    def _mirrored(self) -> Float[Array, " d"]:
        """Twice the product of every unreflected row with the mirror."""
        return 2.0 * self._kronecker(self.mirror[None], self.outer.T, self.inner.T)[0]

    def scale(self, factor: float) -> "KroneckerBasis":
        """Tokens of another length at no cost; no longer a basis to expand in."""
        return KroneckerBasis(factor * self.outer, self.inner, self.mirror)

    def combine(self, coefficients: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return self._reflect(self._kronecker(coefficients, self.outer, self.inner))

    def coordinates(self, vectors: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return self._kronecker(self._reflect(vectors), self.outer.T, self.inner.T)

    def combine_squared(self, coefficients: Float[Array, "n d"]) -> Float[Array, "n d"]:
        # the reflection moves each row by a vector of norm O(1/sqrt d): left out for variances
        return self._kronecker(coefficients, self.outer**2, self.inner**2)

    def _reflect(self, vectors: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return vectors - np.outer(vectors @ self.mirror, 2.0 * self.mirror)

    def _kronecker(self, vectors: Array, outer: Array, inner: Array) -> Array:
        cube = vectors.reshape(len(vectors), outer.shape[0], inner.shape[0])
        return (outer.T @ (cube @ inner)).reshape(len(vectors), self.width)

    @cached_property
    def _digest(self) -> bytes:
        return digest(self.outer, self.inner, self.mirror)

    def digest(self) -> bytes:
        return self._digest


Basis = DenseBasis | KroneckerBasis


def random_basis(
    rng: np.random.Generator, width: int, first: Float[Array, " d"] | None = None
) -> Basis:
    """A random orthonormal basis; its member 0 is the unit vector `first` where one is given."""
    if width <= DENSE_LIMIT:
        plain: Basis = DenseBasis(random_rotation(rng, width))
    else:
        plain = KroneckerBasis(*_factor_rotations(rng, width), np.zeros(width))
    if first is None:
        return plain
    mirror = _mirror(plain.rows(np.zeros(1, dtype=np.int64))[0], first)
    if isinstance(plain, KroneckerBasis):
        return KroneckerBasis(plain.outer, plain.inner, mirror)
    plain.matrix[:] -= np.outer(plain.matrix @ mirror, 2.0 * mirror)
    plain.matrix[0] = first
    return plain


def _mirror(start: Float[Array, " d"], goal: Float[Array, " d"]) -> Float[Array, " d"]:
    """Normal of the hyperplane whose reflection takes one unit vector to another."""
    gap = goal - start
    size = float(np.linalg.norm(gap))
    return gap / size if size > 0 else gap


def equal_overlap(rng: np.random.Generator, value: Float[Array, "d k"]) -> Basis:
    """A random orthonormal basis for probes, `value` having orthonormal columns.

    Members g·k … g·k+k−1 form group g; the overlap of each group with `value` is a multiple of an
    orthogonal k × k matrix, the same multiple for all groups (up to a last, smaller group).
    """
    width, rank = value.shape
    if rank == 1 and width > DENSE_LIMIT:
        outer, inner = _factor_rotations(rng, width)
        level = np.outer(outer.sum(axis=0), inner.sum(axis=0)).ravel() / np.sqrt(width)
        return KroneckerBasis(outer, inner, _mirror(level, value[:, 0]))
    if rank == 1:
        plain = random_rotation(rng, width)
        mirror = _mirror(plain @ value[:, 0], _level_columns(width, 1)[:, 0])
        plain -= np.outer(2.0 * mirror, mirror @ plain)
        return DenseBasis(plain)
    target = _level_columns(width, rank) @ random_rotation(rng, rank)
    rest = _complement(target) @ random_rotation(rng, width - rank)
    return DenseBasis(target @ value.T + rest @ _complement(value).T)


def random_directions(rng: np.random.Generator, count: int, width: int) -> Float[Array, "n d"]:
    """Unit vectors."""
    sample = rng.standard_normal((count, width))
    return np.asarray(sample / np.linalg.norm(sample, axis=1, keepdims=True))


def random_rotation(rng: np.random.Generator, size: int) -> Float[Array, "n n"]:
    if size == 0:
        return np.zeros((0, 0))
    q, r = np.linalg.qr(rng.standard_normal((size, size)))
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    return np.asarray(q)


def _level_columns(width: int, rank: int) -> Float[Array, "d k"]:
    """Orthonormal columns; column j is constant on the rows j, j + k, j + 2k, …"""
    level = np.zeros((width, rank))
    for j in range(rank):
        level[j::rank, j] = 1.0 / np.sqrt(len(range(j, width, rank)))
    return level


def _complement(columns: Float[Array, "d k"]) -> Float[Array, "d m"]:
    """Orthonormal columns for everything the given orthonormal ones leave out."""
    q, _ = np.linalg.qr(columns, mode="complete")
    return q[:, columns.shape[1] :]


def _factor_rotations(rng: np.random.Generator, width: int) -> tuple[Array, Array]:
    """Rotations of sizes a · b = width, a and b as equal as the divisors allow."""
    a = next(n for n in range(int(np.sqrt(width)), 0, -1) if width % n == 0)
    return random_rotation(rng, a), random_rotation(rng, width // a)


def reflect_rows(rows: Float[Array, "m d"], start: Array, goal: Array) -> Float[Array, "m d"]:
    """Mixes orthonormal rows, in place, by the reflection that takes `start` to `goal`."""
    if not start.any():
        return rows
    gap = start / np.linalg.norm(start) - goal / np.linalg.norm(goal)
    size = float(gap @ gap)
    if size == 0.0:
        return rows
    rows -= np.outer(2.0 / size * gap, gap @ rows)
    return rows


def complement_rows(rows: Float[Array, "m d"], weights: Float[Array, "k m"]) -> Float[Array, "n d"]:
    """Orthonormal rows spanning what is left when the combinations `weights`, orthonormal, are
    taken out: all but the last of the block reflection that takes these to the last. In place: the
    memory of the last is free for others then."""
    taken = len(weights)
    left, sizes, right = np.linalg.svd(weights[:, -taken:])
    gap = weights.copy()
    gap[:, -taken:] += left @ right  # away from the last rows: no cancellation
    mixed = (left / (1.0 + sizes)) @ (left.T @ (gap @ rows))
    rest = rows[:-taken]
    rest -= gap[:, :-taken].T @ mixed
    return rest
