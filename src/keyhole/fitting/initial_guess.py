"""Where a descent begins: whitened tokens, small random scores, and for one head two better ways.

Whitening. With tokens of unit second moment, scores of all directions start alike, whatever the
user's units.

One head in closed form: softmax(X Theta X^t) X W with fewer tokens than outputs. Within one example
let the q distinct tokens have outputs y_1 ... y_q. If these are affinely independent, the attention
matrix can be inverted, and each x_a W is an affine combination of the y's: with C an orthonormal
basis of the complement of span{y_b - y_q}, C^t (x_a W - y_q) = 0, which is linear in W. Then
P = Y (X W)^+ and log(P_ac / P_ab), corrected for repeated tokens, is linear in Theta.

One head by largest entropy. The head Y = P T W can be read backwards: with Z the inverse of the
values, Y Z = P T, so every label, mapped by the same unknown Z, is an average of its example's
tokens. Among the weights that allow this those of largest entropy are a convex problem. Its dual
has one tilt eta for each row,

    min sum_i A_i(eta_i) + slack |eta_i|^2 / 2   such that  sum_i y_i (eta_i - start_i)^t = 0,
    A_i(eta) = log sum_j exp <eta, t_j>,

with Z as the multiplier; it is solved by Newton's method. In a head the tilts are linear in the
anchor, eta_i = Theta^t q_i: a regression of the tilts on the anchors is the start. The slack keeps
labels that lie on the edge of what tokens can average to, and noisy ones, from infinite tilts.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.linalg import solve_triangular

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.linalg.softmax import log_ratio, softmax

INVERTIBLE = 1e-6  # smallest singular value, relative, of labels that can be mapped back to tokens


def whiten_tokens(rows: Rows) -> tuple[Rows, Callable[[Array], Array]]:
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


def draw_start(rows: Rows, heads: int, rng: np.random.Generator) -> Float[Array, "p m d"]:
    """Small scores of equal size whatever the scale of the tokens: attention begins nearly uniform,
    scores have standard deviation 0.3."""
    shape = (rows.anchors.shape[2], heads, rows.width)
    power = np.sqrt(_power(rows.anchors) * _power(rows.tokens))
    return np.asarray(0.3 / power * rng.standard_normal(shape))


def _power(vectors: Array) -> float:
    """Mean squared norm of the vectors that are not padding."""
    squares = np.einsum("nld,nld->nl", vectors, vectors)
    return max(float(squares[squares > 0].mean()) if (squares > 0).any() else 1.0, TINY)


def solve_one_head(rows: Rows) -> Float[Array, "d 1 d"] | None:
    """Scores of the one head that explains all rows, or None where the examples do not allow it.

    A start for the descent, not an estimate: with noisy labels it is rough.
    """
    _n, a, p = rows.anchors.shape
    length, d = rows.tokens.shape[1:]
    if a != length or p != d or rows.padding is not None or length > rows.outputs:
        return None
    widest_closed_form = 32  # entries of a token; beyond, d^2 equations cost more than a descent
    if max(d, rows.outputs) > widest_closed_form:
        return None
    whole = (rows.weights > 0).all(axis=1)
    merged = [
        _merge_copies(x, y) for x, y in zip(rows.tokens[whole], rows.targets[whole], strict=True)
    ]
    usable = [m for m in merged if m is not None]
    value = _solve_values(usable, d, rows.outputs) if usable else None
    return None if value is None else _solve_scores(usable, value, d)


def _merge_copies(tokens: Array, outputs: Array) -> tuple[Array, Array, Array] | None:
    """Distinct tokens, their outputs and multiplicities; None if outputs are affinely dependent."""
    unique, first, counts = np.unique(tokens, axis=0, return_index=True, return_counts=True)
    if len(unique) < 2:
        return None
    labels = outputs[first]
    sizes = np.linalg.svd(labels[:-1] - labels[-1], compute_uv=False)
    if len(unique) - 1 > outputs.shape[1] or sizes[-1] < INVERTIBLE * np.linalg.norm(labels):
        return None
    return unique, labels, counts


def _solve_values(usable: list[tuple[Array, Array, Array]], d: int, outputs: int) -> Array | None:
    """Least squares for W from C^t W^t x_a = C^t y_q, accumulated as normal equations."""
    equations = sum(len(tokens) * (outputs - len(tokens) + 1) for tokens, _, _ in usable)
    if equations < outputs * d:
        return None
    complements = np.stack([_project_complement(labels) for _, labels, _ in usable])
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


def _project_complement(labels: Array) -> Array:
    """Projection onto what is orthogonal to all differences of outputs."""
    q, _ = np.linalg.qr((labels[:-1] - labels[-1]).T)
    return np.asarray(np.eye(labels.shape[1]) - q @ q.T)


def _solve_scores(usable: list[tuple[Array, Array, Array]], value: Array, d: int) -> Array | None:
    """Weighted least squares for Theta from the log ratios of attention weights."""
    equations, logs = [], []
    for tokens, labels, counts in usable:
        attention = _invert_attention(tokens @ value, labels)
        if attention is None:
            continue
        for a, weights in enumerate(attention):
            best = int(np.argmax(weights))
            good = weights > 1e-12  # less is rounding, its logarithm means nothing
            good[best] = False
            if not good.any():
                continue
            ratio = log_ratio(weights[good], weights[best]).odds
            ratio -= log_ratio(counts[good], counts[best]).odds
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


def _invert_attention(images: Array, labels: Array) -> Array | None:
    """P with P images = labels and rows of sum one; None where that does not say what P is."""
    ones = np.ones((len(images), 1))
    design = np.hstack([images, ones * np.linalg.norm(images)])
    sizes = np.linalg.svd(design, compute_uv=False)
    if sizes[-1] < INVERTIBLE * sizes[0]:
        return None
    return np.asarray(np.hstack([labels, ones * np.linalg.norm(images)]) @ np.linalg.pinv(design))


def maximize_entropy(
    rows: Rows, start: Float[Array, "p 1 d"], slack: float
) -> Float[Array, "p 1 d"]:
    """Scores of one head regressed on the tilts nearest to those of `start`.

    `slack` in units of a squared token entry. Where the labels cannot be mapped back to tokens
    (fewer outputs than dimensions, values that are not invertible) `start` itself.
    """
    n, a = rows.weights.shape
    rows = rows.take(np.arange(max(1, min(n, 1024 // a))))
    counted = rows.weights > 0
    labels = _map_back(rows.targets[counted], rows.width, rows.offset)
    # unknowns of Z; beyond, its Newton steps cost more than the descents they save
    most_mapped = 400
    if labels is None or labels.shape[1] * rows.width > most_mapped:
        return start
    example = np.nonzero(counted)[0]
    anchors, tokens = rows.anchors[counted], rows.tokens[example]
    padding = 0.0 if rows.padding is None else rows.padding[example, 0]
    slack *= float(np.mean(tokens**2))
    base = anchors @ start[:, 0]
    tilts, identity = base, slack * np.eye(rows.width)
    for _ in range(25):  # a dozen is usual
        scores = np.einsum("rd,rld->rl", tilts, tokens) + padding
        weights = softmax(scores, overwrite=True)
        means = np.einsum("rl,rld->rd", weights, tokens)
        spread = np.einsum("rld,rle->rde", weights[:, :, None] * tokens, tokens, optimize=True)
        spread += identity - means[:, :, None] * means[:, None, :]
        step = _newton_step(labels, spread, means + slack * tilts, tilts - base)
        decrement = float(np.einsum("rd,rde,re->", step, spread, step, optimize=True) / len(step))
        tilts = tilts + step / (1.0 if decrement <= 1e-2 else 1 + np.sqrt(decrement))
        if decrement <= 1e-4:  # good enough for a start
            break
    return np.asarray(np.linalg.lstsq(anchors, tilts, rcond=None)[0][:, None, :])


def _map_back(targets: Float[Array, "r D"], width: int, offset: bool) -> Array | None:
    """Orthogonal columns that span what the values made of the tokens, a constant among them where
    an offset is fitted; None where a dimension of the tokens is lost."""
    if targets.shape[1] < width or len(targets) <= width:
        return None
    if offset:
        targets = targets - targets.mean(axis=0)
    left, sizes, _ = np.linalg.svd(targets, full_matrices=False)
    if sizes[width - 1] <= INVERTIBLE * sizes[0]:
        return None
    columns = left[:, :width] * np.sqrt(len(left))
    return np.hstack([columns, np.ones((len(left), 1))]) if offset else columns


def _newton_step(labels: Array, spread: Array, averages: Array, excess: Array) -> Array:
    """Change of the tilts: spread_i step_i = Z^t y_i - averages_i, with the Z that keeps the
    constraint, sum_i y_i (excess_i + step_i)^t = 0."""
    r, outputs = labels.shape
    d = averages.shape[1]
    inverse = np.linalg.inv(spread)
    pairs = (labels[:, :, None] * labels[:, None, :]).reshape(r, -1)
    system = (pairs.T @ inverse.reshape(r, -1)).reshape(outputs, outputs, d, d)
    system = system.transpose(0, 2, 1, 3).reshape(outputs * d, outputs * d)
    right = labels.T @ (np.einsum("rde,re->rd", inverse, averages) - excess)
    values = np.linalg.solve(system, right.reshape(-1)).reshape(outputs, d)
    return np.asarray(np.einsum("rde,re->rd", inverse, labels @ values - averages))
