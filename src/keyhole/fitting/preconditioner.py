"""Kronecker preconditioner for the Gauss-Newton matrix of attention scores.

Per head, J^t J is sum over rows of (q q^t) x (G G^t) with q the anchor and G the head's response.
Its Kronecker approximation, mean(q q^t) x sum(G G^t), plus the damping, is inverted exactly by two
small eigendecompositions.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.variable_projection import ProjectedFit

IDLE_CURVATURE = (
    1e-12  # curvature, relative to the largest, given to unknowns that have none (a dead head)
)


@dataclass(frozen=True, eq=False)
class KroneckerSolve:
    """sum_i left x right_i in eigenvector form; `scale` (m,) is the damping's unit per head."""

    left_vectors: Float[Array, "p p"]
    right_vectors: Float[Array, "m d d"]
    weights: Float[Array, "p m d"]
    scale: Float[Array, " m"]

    def solve(self, damping: float, vector: Float[Array, "p m d"]) -> Float[Array, "p m d"]:
        """(approximation + damping * scale)^-1 vector."""
        inside = np.tensordot(self.left_vectors.T, vector, axes=1)
        inside = np.einsum("pmd,mde->pme", inside, self.right_vectors, optimize=True)
        inside /= self.weights + damping * self.scale[:, None]
        inside = np.einsum("pme,mde->pmd", inside, self.right_vectors, optimize=True)
        return np.tensordot(self.left_vectors, inside, axes=1)

    def inverse_diagonal(self) -> Float[Array, "p m d"]:
        """Diagonal of the undamped approximation's inverse."""
        left, right = self.left_vectors**2, self.right_vectors**2
        return np.asarray(
            np.einsum("px,xme,mde->pmd", left, 1.0 / self.weights, right, optimize=True)
        )

    def astype(self, dtype: type) -> "KroneckerSolve":
        parts = (self.left_vectors, self.right_vectors, self.weights, self.scale)
        return KroneckerSolve(*(part.astype(dtype) for part in parts))


def approximate_normal(rows: Rows, at: ProjectedFit) -> KroneckerSolve:
    """The preconditioner at a projection, without forming any row's response."""
    _n, _a, _p = rows.anchors.shape
    m, _d = at.theta.shape[1:]
    counted = max(rows.counted, 1)
    weighted = rows.anchors * rows.weights[:, :, None]
    left = np.einsum("nap,naq->pq", weighted, rows.anchors, optimize=True) / counted
    right = np.stack([_response_moment(rows, at, i) for i in range(m)])
    left_sizes, left_vectors = np.linalg.eigh(left)
    right_sizes, right_vectors = np.linalg.eigh(right)
    weights = left_sizes.clip(0)[:, None, None] * right_sizes.clip(0)[None]
    scale = weights.mean(axis=(0, 2))
    floor = IDLE_CURVATURE * max(float(scale.max()), TINY)
    return KroneckerSolve(left_vectors, right_vectors, weights + floor, scale + floor)


def _response_moment(rows: Rows, at: ProjectedFit, head: int) -> Float[Array, "d d"]:
    """sum over rows of G G^t, G = Cov_P(x) W, for one head.

    With C = T^t diag(P) (T W - y), y the row's output of this head, G G^t = C C^t; summing over
    output columns needs only the L x L Gram of the tokens' centred outputs.
    """
    n, a = rows.weights.shape
    d = rows.width
    pattern = at.pattern.reshape(n, a, -1, at.pattern.shape[2])[:, :, head]
    pattern = pattern * np.sqrt(rows.weights)[:, :, None]
    outputs = rows.tokens @ at.values.reshape(-1, d, at.values.shape[1])[head]
    gram = outputs @ outputs.transpose(0, 2, 1)  # (n, L, L)
    mean = pattern @ gram  # (n, a, L)
    total = np.einsum("nal,nal->na", pattern, mean)
    # Gram of the centred outputs, weighted by P on both sides and summed over the rows
    pairs = pattern.transpose(0, 2, 1) @ pattern
    middle = gram * pairs
    cross = pattern.transpose(0, 2, 1) @ (pattern * mean)
    middle -= cross + cross.transpose(0, 2, 1)
    middle += pattern.transpose(0, 2, 1) @ (pattern * total[:, :, None])
    return np.asarray(np.einsum("nli,nlk,nkj->ij", rows.tokens, middle, rows.tokens, optimize=True))
