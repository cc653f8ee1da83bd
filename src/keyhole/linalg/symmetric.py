"""Symmetric matrices as vectors with the same inner products."""

import numpy as np

from keyhole.arrays import Array, Float, Int


def half_of(size: int) -> tuple[Int[Array, " P"], Int[Array, " P"], Float[Array, " P"]]:
    """Rows and columns of the entries on and above the diagonal, and the weight of each: two
    entries are one number."""
    rows, columns = np.triu_indices(size)
    return rows, columns, np.where(rows == columns, 1.0, np.sqrt(2.0))


def flat(matrices: Float[Array, "*k s s"]) -> Float[Array, "*k P"]:
    """The matrices as vectors.

    >>> flat(np.array([[1.0, 2.0], [2.0, 3.0]])).round(3).tolist()
    [1.0, 2.828, 3.0]
    """
    rows, columns, weight = half_of(matrices.shape[-1])
    return np.asarray(matrices[..., rows, columns] * weight)


def unflat(vectors: Float[Array, "k P"], size: int) -> Float[Array, "k s s"]:
    """The matrices of these vectors."""
    rows, columns, weight = half_of(size)
    matrices = np.zeros((len(vectors), size, size))
    matrices[:, rows, columns] = matrices[:, columns, rows] = vectors / weight
    return matrices
