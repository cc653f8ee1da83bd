"""Inverses to the last digit."""

import numpy as np

from keyhole.arrays import Array, Float


def right_inverse(matrix: Float[Array, "k n"]) -> Float[Array, "n k"]:
    """The inverse of least norm of a matrix with independent rows: matrix @ inverse = identity.

    A singular value decomposition may lose a digit or two where singular values nearly coincide,
    however well conditioned the matrix is. One Newton step squares that error and keeps the range.
    """
    inverse = np.linalg.pinv(matrix)
    return np.asarray(inverse @ (2.0 * np.eye(len(matrix)) - matrix @ inverse))
