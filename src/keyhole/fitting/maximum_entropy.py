"""Where to start with one head: the attention weights of largest entropy that the labels allow.

One head, Y = P T W, can be read backwards: with Z the inverse of the values, Y Z = P T, so every
label, mapped by the same unknown Z, is an average of its example's tokens. Among the weights that
allow this those of largest entropy are a convex problem. Its dual has one tilt eta for each row,

    min sum_i A_i(eta_i) + slack |eta_i|^2 / 2   such that  sum_i y_i (eta_i - start_i)^t = 0,
    A_i(eta) = log sum_j exp <eta, t_j>,

with Z as the multiplier; it is solved by Newton's method. In a head the tilts are linear in the
anchor, eta_i = Theta^t q_i: a regression of the tilts on the anchors is the start. The slack keeps
labels that lie on the edge of what tokens can average to, and noisy ones, from infinite tilts.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.linalg.softmax import softmax

LARGEST = 400  # unknowns of Z; beyond, its Newton steps cost more than the descents they save
MOST_ROWS = 1024  # more are not needed for a start
STEPS = 25  # Newton steps; a dozen is usual
SETTLED = 1e-4  # Newton decrement of a row at which a start is good enough
FULL_STEP = 1e-2  # decrement of a row up to which steps need no damping
USABLE = 1e-6  # smallest singular value, relative, of labels that can be mapped back to tokens


def tilted(rows: Rows, start: Float[Array, "p 1 d"], slack: float) -> Float[Array, "p 1 d"]:
    """Scores of one head regressed on the tilts nearest to those of `start`.

    `slack` in units of a squared token entry. Where the labels cannot be mapped back to tokens
    (fewer outputs than dimensions, values that are not invertible) `start` itself.
    """
    n, a = rows.weights.shape
    rows = rows.take(np.arange(max(1, min(n, MOST_ROWS // a))))
    counted = rows.weights > 0
    labels = _mapped_back(rows.targets[counted], rows.width, rows.offset)
    if labels is None or labels.shape[1] * rows.width > LARGEST:
        return start
    example = np.nonzero(counted)[0]
    anchors, tokens = rows.anchors[counted], rows.tokens[example]
    padding = 0.0 if rows.padding is None else rows.padding[example, 0]
    slack *= float(np.mean(tokens**2))
    base = anchors @ start[:, 0]
    tilts, identity = base, slack * np.eye(rows.width)
    for _ in range(STEPS):
        scores = np.einsum("rd,rld->rl", tilts, tokens) + padding
        weights = softmax(scores, overwrite=True)
        means = np.einsum("rl,rld->rd", weights, tokens)
        spread = np.einsum("rld,rle->rde", weights[:, :, None] * tokens, tokens, optimize=True)
        spread += identity - means[:, :, None] * means[:, None, :]
        step = _newton_step(labels, spread, means + slack * tilts, tilts - base)
        decrement = float(np.einsum("rd,rde,re->", step, spread, step, optimize=True) / len(step))
        tilts = tilts + step / (1.0 if decrement <= FULL_STEP else 1 + np.sqrt(decrement))
        if decrement <= SETTLED:
            break
    return np.asarray(np.linalg.lstsq(anchors, tilts, rcond=None)[0][:, None, :])


def _mapped_back(targets: Float[Array, "r D"], width: int, offset: bool) -> Array | None:
    """Orthogonal columns that span what the values made of the tokens, a constant among them where
    an offset is fitted; None where a dimension of the tokens is lost."""
    if targets.shape[1] < width or len(targets) <= width:
        return None
    if offset:
        targets = targets - targets.mean(axis=0)
    left, sizes, _ = np.linalg.svd(targets, full_matrices=False)
    if sizes[width - 1] <= USABLE * sizes[0]:
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
