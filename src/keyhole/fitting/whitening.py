"""Tokens of unit second moment: scores of all directions start alike, whatever the user's units."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.linalg import solve_triangular

from keyhole.arrays import Array
from keyhole.fitting.attention_rows import Rows


def whitened(rows: Rows) -> tuple[Rows, Callable[[Array], Array]]:
    """The rows in whitened tokens x' = L^-1 x, and the map of scores back: L^-t theta' L^-1."""
    d = rows.width
    flat = rows.tokens.reshape(-1, d)
    factor = np.linalg.cholesky(flat.T @ flat / max(int(rows.lengths.sum()), 1))
    inverse = solve_triangular(factor, np.eye(d), lower=True)
    tokens = rows.tokens @ inverse.T
    anchors = rows.anchors.copy()
    anchors[:, :, :d] = rows.anchors[:, :, :d] @ inverse.T

    def back(theta: Array) -> Array:
        out = theta.copy()
        out[:d] = np.tensordot(inverse.T, theta[:d], axes=1)
        return np.asarray(out @ inverse)

    return replace(rows, tokens=tokens, anchors=anchors), back
