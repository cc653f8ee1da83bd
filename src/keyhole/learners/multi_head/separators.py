"""Separating tokens: one per head that this head attends to and no other does.

Given the keys k_h of the heads at one anchor, the tokens w_h of least norm with

    (w_h - w_g) . k_h >= |k_h|   and   w_h . k_h >= |k_h|     for all g != h

keep every head on its own token, by a margin proportional to the head's own scale (so that heads
of different sharpness hold alike when the anchor moves). This is a least-distance problem: one
nonnegative least squares problem (Lawson and Hanson, "Solving Least Squares Problems", ch. 23).
Feasible iff no two k_h are positively parallel, hence also for more heads than dimensions.
"""

import numpy as np
from scipy.optimize import nnls

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned

ALIKE = "no tokens separate these heads: two of them attend alike"


def design_separators(keys: Float[Array, "h d"]) -> Float[Array, "h d"]:
    """Separating tokens of least norm with margins of at least 1 in units of each |k_h|."""
    heads = len(keys)
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    basis = np.linalg.svd(unit, full_matrices=False)[2]  # separators live in the span of the keys
    small = unit @ basis.T
    rows = np.zeros((heads, heads, heads, small.shape[1]))  # constraint (h, g): acts on w_h, w_g
    for h in range(heads):
        rows[h, :, h] += small[h]
        for g in range(heads):
            if g != h:
                rows[h, g, g] -= small[h]
    constraints = rows.reshape(heads * heads, -1)
    system = np.vstack([constraints.T, np.ones(heads * heads)])
    target = np.zeros(len(system))
    target[-1] = 1.0
    try:
        weights, _ = nnls(system, target, maxiter=60 * heads * heads)
    except RuntimeError as error:
        raise IllConditioned(ALIKE) from error
    rest = system @ weights - target
    if not rest[-1] < 0:
        raise IllConditioned(ALIKE)
    separators = (-rest[:-1] / rest[-1]).reshape(heads, -1) @ basis
    smallest = measure_margins(separators, unit).min()
    if not smallest > 0:
        raise IllConditioned(ALIKE)
    return np.asarray(separators / min(1.0, smallest))


def measure_margins(
    separators: Float[Array, "h d"],
    keys: Float[Array, "h d"],
    anchor: Float[Array, " d"] | None = None,
) -> Float[Array, " h"]:
    """By how much, in log-odds, heads prefer their own token to every other and to the anchor."""
    scores = keys @ separators.T
    own = np.diag(scores).copy()
    others = (scores - np.diag(np.full(len(keys), np.inf))).max(axis=1)
    itself = np.zeros(len(keys)) if anchor is None else keys @ anchor
    return np.asarray(own - np.maximum(others, itself))
