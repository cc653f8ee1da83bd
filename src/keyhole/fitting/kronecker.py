"""Units of the entries of matrices in which the normal equations are nearly the identity.

Statement.  Where derivatives by a matrix W are outer products g_n a_n^t (what reaches the result of
            W, what W reads), the columns of the Jacobian by S z = G (z * u) A^t have about norm one
            and are nearly orthogonal, G and A orthogonal, u positive.
Queries.    None.
Algebra.    Random signs y on every number of every answer, pulled back, give g_n; then
            B = sum |a_n|^2 g_n g_n^t = G . G^t, C = sum |g_n|^2 a_n a_n^t = A . A^t, and
            D_ij = sum (G^t g_n)_i^2 (A^t a_n)_j^2, u = 1 / sqrt D. A vector has no A. In these
            units the leverage of a query is the sum of its own terms of D u^2.
When it fails. Rows of very unequal leverage make any such units bad: `equal_leverage` first.
Source.     Martens, Grosse (2015); George et al. (2018) for D in the eigenbasis.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float

LEAST = 1e-6  # square of a column, relative to the largest of its matrix, that is as good as none
UNEQUAL = 1e-3  # leverage, relative to the mean, below which a row is made no heavier


@dataclass(frozen=True, eq=False)
class Unit:
    """Of one matrix: step = left (z * scale) right^t; of a vector: step = z * scale."""

    scale: Array
    left: Array | None = None
    right: Array | None = None

    def apply(self, z: Array) -> Array:
        step = z * self.scale
        return step if self.left is None or self.right is None else self.left @ step @ self.right.T

    def divided(self, size: float) -> "Unit":
        """The same for a derivative that is larger by this factor."""
        return Unit((self.scale / size).astype(self.scale.dtype), self.left, self.right)

    def adjoint(self, step: Array) -> Array:
        if self.left is None or self.right is None:
            return step * self.scale
        return np.asarray((self.left.T @ step @ self.right) * self.scale)


Units = dict[str, Unit]


@dataclass(frozen=True, eq=False)
class Probed:
    """What random signs on the answers of some queries pull back to: per probe what reaches the
    result of every matrix, and what each matrix reads (vectors read nothing)."""

    pulled: Sequence[Mapping[str, Float[Array, "n p"]]]
    reads: Mapping[str, Float[Array, "n q"]]

    def only(self, names: Collection[str]) -> "Probed":
        """The same for matrices and vectors of these names."""
        some = [{name: g for name, g in one.items() if name in names} for one in self.pulled]
        return Probed(some, self.reads)


def find_units(probed: Sequence[Probed], weights: Sequence[Array]) -> Units:
    """Units of all matrices and vectors for rows of these weights (one per query)."""
    names = dict.fromkeys(name for one in probed for pulled in one.pulled for name in pulled)
    size = float(np.sqrt(np.mean(np.concatenate(weights).astype(np.float64) ** 2)))
    even = [weight / size for weight in weights]  # fourth powers of some overflow
    return {name: _unit_of(name, probed, even).divided(size) for name in names}


def _unit_of(name: str, probed: Sequence[Probed], weights: Sequence[Array]) -> Unit:
    terms = list(_terms(name, probed, weights))
    if terms[0][1] is None:
        squares = sum((g**2).sum(axis=0) for g, _, _ in terms) / terms[0][2]
        return Unit(_scale_of(np.asarray(squares)))
    inside, outside = 0.0, 0.0
    for g, a, _ in terms:
        assert a is not None
        outside = outside + (g * np.sum(a * a, axis=1, keepdims=True)).T @ g
        inside = inside + (a * np.sum(g * g, axis=1, keepdims=True)).T @ a
    left, right = (np.linalg.eigh(np.asarray(gram, dtype=np.float64))[1].astype(terms[0][0].dtype)
                   for gram in (outside, inside))  # fmt: skip
    squares = 0.0
    for g, a, count in terms:
        assert a is not None
        squares = squares + ((g @ left) ** 2).T @ (a @ right) ** 2 / count
    return Unit(_scale_of(np.asarray(squares)), left, right)


def _terms(
    name: str, probed: Sequence[Probed], weights: Sequence[Array]
) -> Iterable[tuple[Array, Array | None, int]]:
    """g, a and the number of probes, of every batch and probe."""
    for one, weight in zip(probed, weights, strict=True):
        for pulled in one.pulled:
            if name in pulled:
                g = pulled[name] * weight.astype(pulled[name].dtype)[:, None]
                yield g, one.reads.get(name), len(one.pulled)


def _scale_of(squares: Array) -> Array:
    """One over the columns' norms; what no answer shows does not move."""
    largest = float(squares.max(initial=0.0))
    if largest == 0.0:
        return np.zeros_like(squares)
    return np.asarray(1.0 / np.sqrt(np.maximum(squares, LEAST * largest)), dtype=squares.dtype)


def leverages(units: Units, probed: Sequence[Probed], weights: Sequence[Array]) -> list[Array]:
    """Of every query, in these units."""
    found = []
    for one, weight in zip(probed, weights, strict=True):
        total = np.zeros(len(weight))
        for pulled in one.pulled:
            for name, g in pulled.items():
                unit, a = units[name], one.reads.get(name)
                if unit.left is None or unit.right is None or a is None:
                    total += (g**2) @ unit.scale**2
                else:
                    inside = (g @ unit.left) ** 2 @ unit.scale**2
                    total += np.sum(inside * (a @ unit.right) ** 2, axis=1)
        found.append(total * weight**2 / len(one.pulled))
    return found


def equal_leverage(
    probed: Sequence[Probed], weights: Sequence[Array], rounds: int = 4
) -> list[Array]:
    """Weights with which all queries have about the same leverage, of mean square one."""
    for _ in range(rounds):
        found = leverages(find_units(probed, weights), probed, weights)
        least = UNEQUAL * np.mean(np.concatenate(found))
        weights = [weight / np.sqrt(np.maximum(one, least))
                   for weight, one in zip(weights, found, strict=True)]  # fmt: skip
        size = np.sqrt(np.mean(np.concatenate(weights) ** 2))
        weights = [weight / size for weight in weights]
    return list(weights)
