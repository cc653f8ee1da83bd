"""One head in closed form: softmax(X Theta X^t) X W with fewer tokens than outputs.

Within one example let the q distinct tokens have outputs y_1 ... y_q. If these are affinely
independent, the attention matrix can be inverted, and each x_a W is an affine combination of the
y's: with C an orthonormal basis of the complement of span{y_b - y_q}, C^t (x_a W - y_q) = 0, which
is linear in W. Then P = Y (X W)^+ and log(P_ac / P_ab), corrected for repeated tokens, is linear in
Theta.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.fitting.attention_rows import Rows

USABLE = 1e-6  # smallest singular value, relative, of output differences that can be inverted
WIDEST = 32  # beyond, the d^2 equations cost more than a descent from a random start
POSITIVE = 1e-12  # a smaller attention weight is rounding, its logarithm means nothing


def one_head(rows: Rows) -> Float[Array, "d 1 d"] | None:
    """Scores of the one head that explains all rows, or None where the examples do not allow it.

    A start for the polish, not an estimate: with noisy labels it is rough.
    """
    _n, a, p = rows.anchors.shape
    length, d = rows.tokens.shape[1:]
    if a != length or p != d or rows.padding is not None or length > rows.outputs:
        return None
    if max(d, rows.outputs) > WIDEST:
        return None
    whole = (rows.weights > 0).all(axis=1)
    merged = [_distinct(x, y) for x, y in zip(rows.tokens[whole], rows.targets[whole], strict=True)]
    usable = [m for m in merged if m is not None]
    value = _values(usable, d, rows.outputs) if usable else None
    return None if value is None else _scores(usable, value, d)


def _distinct(tokens: Array, outputs: Array) -> tuple[Array, Array, Array] | None:
    """Distinct tokens, their outputs and multiplicities; None if outputs are affinely dependent."""
    unique, first, counts = np.unique(tokens, axis=0, return_index=True, return_counts=True)
    if len(unique) < 2:
        return None
    labels = outputs[first]
    sizes = np.linalg.svd(labels[:-1] - labels[-1], compute_uv=False)
    if len(unique) - 1 > outputs.shape[1] or sizes[-1] < USABLE * np.linalg.norm(labels):
        return None
    return unique, labels, counts


def _values(usable: list[tuple[Array, Array, Array]], d: int, outputs: int) -> Array | None:
    """Least squares for W from C^t W^t x_a = C^t y_q, accumulated as normal equations."""
    equations = sum(len(tokens) * (outputs - len(tokens) + 1) for tokens, _, _ in usable)
    if equations < outputs * d:
        return None
    complements = np.stack([_complement(labels) for _, labels, _ in usable])
    moments = np.stack([tokens.T @ tokens for tokens, _, _ in usable])
    normal = complements.reshape(len(usable), -1).T @ moments.reshape(len(usable), -1)
    system = normal.reshape(outputs, outputs, d, d).transpose(0, 2, 1, 3)
    ends = np.stack([c @ labels[-1] for c, (_, labels, _) in zip(complements, usable, strict=True)])
    right = ends.T @ np.stack([tokens.sum(axis=0) for tokens, _, _ in usable])
    try:
        solution = np.linalg.solve(system.reshape(outputs * d, -1), right.ravel())
    except np.linalg.LinAlgError:
        return None
    return solution.reshape(outputs, d).T


def _complement(labels: Array) -> Array:
    """Projection onto what is orthogonal to all differences of outputs."""
    q, _ = np.linalg.qr((labels[:-1] - labels[-1]).T)
    return np.asarray(np.eye(labels.shape[1]) - q @ q.T)


def _scores(usable: list[tuple[Array, Array, Array]], value: Array, d: int) -> Array | None:
    """Weighted least squares for Theta from the log ratios of attention weights."""
    equations, logs = [], []
    for tokens, labels, counts in usable:
        attention = _attention(tokens @ value, labels)
        if attention is None:
            continue
        for a, weights in enumerate(attention):
            best = int(np.argmax(weights))
            good = weights > POSITIVE
            good[best] = False
            if not good.any():
                continue
            ratio = np.log(weights[good] / weights[best]) - np.log(counts[good] / counts[best])
            lines = np.einsum("p,cq->cpq", tokens[a], tokens[good] - tokens[best])
            equations.append(lines.reshape(len(ratio), -1) * weights[good][:, None])
            logs.append(ratio * weights[good])
    if sum(map(len, logs)) < d * d:
        return None
    design = np.concatenate(equations)
    try:
        solution = np.linalg.solve(design.T @ design, design.T @ np.concatenate(logs))
    except np.linalg.LinAlgError:
        return None
    return solution.reshape(d, 1, d)


def _attention(images: Array, labels: Array) -> Array | None:
    """P with P images = labels and rows of sum one; None where that does not say what P is."""
    ones = np.ones((len(images), 1))
    design = np.hstack([images, ones * np.linalg.norm(images)])
    sizes = np.linalg.svd(design, compute_uv=False)
    if sizes[-1] < USABLE * sizes[0]:
        return None
    return np.asarray(np.hstack([labels, ones * np.linalg.norm(images)]) @ np.linalg.pinv(design))
