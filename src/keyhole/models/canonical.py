"""The only place that says when two parameter sets are the same function.

Attention: the order of heads does not matter; heads with equal score and key bias act as one head
with the sum of their values; a head with value zero does nothing. What remains after merging,
dropping and sorting is the canonical form (Proposition 7.1 of Bhattamishra, Shah, Hahn, Kanade,
"Provably Learning Attention with Queries", shows that no more can be known).
"""

from functools import singledispatch
from importlib import import_module
from typing import Any

import numpy as np
from scipy.linalg import qr
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head

OTHER_MODELS = ("keyhole.models.relu_canonical", "keyhole.models.sign_attention")
MERGE_TOLERANCE = 1e-12  # relative score difference below which two heads cannot be told apart


@singledispatch
def distance(a: Any, b: Any) -> float:
    """Largest relative Frobenius error over the parameter blocks, after removing the symmetries.

    Blocks: the scores, the key biases, the values, the offset. `b` is the yardstick: a block of
    `b` that is zero is compared in units of the block family it belongs to, absolute if that is
    zero too. Infinite where the structures (number of heads, shapes) differ.
    """
    for name in OTHER_MODELS:  # they register themselves when they are loaded
        import_module(name)
    known = distance.dispatch(type(a))
    if known is distance.dispatch(object):
        raise InvalidArgument(f"no distance is defined for {type(a).__name__}")
    return float(known(a, b))


def relative(error: float, scale: float) -> float:
    """error / scale, and the absolute error where there is no scale."""
    return error / scale if scale > 0 else error


@distance.register
def _(a: Attention, b: Any) -> float:
    if hasattr(b, "distance_from"):  # of which only labels are seen: it knows what to compare
        return float(b.distance_from(a))
    if not isinstance(b, Attention):
        raise InvalidArgument(f"cannot compare Attention with {type(b).__name__}")
    if a.width != b.width or a.outputs != b.outputs:
        return float("inf")
    first, second = canonical(a), canonical(b)
    if first is None or second is None:  # no live head: only the offset remains
        if (first is None) != (second is None):
            return float("inf")
        return relative(float(np.linalg.norm(a.offset - b.offset)), float(np.linalg.norm(b.offset)))
    if len(first.heads) != len(second.heads):
        return float("inf")
    pairs = matched(first.heads, second.heads)
    scores = max(score_norm(h) for h in second.heads)
    biases = max(float(np.linalg.norm(h.key_bias)) for h in second.heads)
    values = max(float(np.linalg.norm(h.value)) for h in second.heads)
    worst = 0.0
    for mine, theirs in pairs:
        worst = max(
            worst,
            relative(score_gap(mine, theirs), score_norm(theirs) or scores),
            relative(
                float(np.linalg.norm(mine.key_bias - theirs.key_bias)),
                float(np.linalg.norm(theirs.key_bias)) or biases or scores,
            ),
            relative(
                float(np.linalg.norm(mine.value - theirs.value)),
                float(np.linalg.norm(theirs.value)),
            ),
        )
    offset = float(np.linalg.norm(first.offset - second.offset))
    return max(worst, relative(offset, float(np.linalg.norm(second.offset)) or values))


def canonical(model: Attention) -> Attention | None:
    """Equal heads merged, dead heads dropped; None where no head is left."""
    merged: list[Head] = []
    for head in model.heads:
        for i, known in enumerate(merged):
            if same_attention(head, known):
                score: Any = known.score_factors or known.score
                merged[i] = Head(score, known.key_bias, known.value + head.value)
                break
        else:
            merged.append(head)
    largest = max(float(np.abs(head.value).max(initial=0.0)) for head in model.heads)
    alive = [h for h in merged if np.abs(h.value).max(initial=0.0) > MERGE_TOLERANCE * largest]
    return Attention(alive, model.offset) if alive else None


def same_attention(a: Head, b: Head) -> bool:
    """Whether two heads attend alike on every input: equal score and key bias."""
    scale = max(score_norm(a), score_norm(b))
    bias = max(float(np.linalg.norm(a.key_bias)), float(np.linalg.norm(b.key_bias)))
    gap = float(np.linalg.norm(a.key_bias - b.key_bias))
    same_bias = gap <= MERGE_TOLERANCE * max(bias, scale)
    return same_bias and score_gap(a, b) <= MERGE_TOLERANCE * scale


def matched(a: tuple[Head, ...], b: tuple[Head, ...]) -> list[tuple[Head, Head]]:
    """Heads of `a` paired with heads of `b`, least total distance of their parameters."""
    if len(a) == 1 == len(b):
        return [(a[0], b[0])]
    cost = np.array([[mismatch(x, y) for y in b] for x in a])
    rows, columns = linear_sum_assignment(cost)
    return [(a[i], b[j]) for i, j in zip(rows, columns, strict=True)]


def mismatch(a: Head, b: Head) -> float:
    """Sum of the relative errors of score, key bias and value, each at most 2."""
    gaps = (
        (score_gap(a, b), score_norm(b)),
        *(
            (float(np.linalg.norm(x - y)), float(np.linalg.norm(y)))
            for x, y in ((a.key_bias, b.key_bias), (a.value, b.value))
        ),
    )
    return sum(min(relative(gap, size), 2.0) for gap, size in gaps)


def score_norm(head: Head) -> float:
    """Frobenius norm of the score, without multiplying factors out."""
    if head.score_factors is None:
        return float(np.linalg.norm(head.score))
    return product_norm(head.score_factors.left, head.score_factors.right)


def score_gap(a: Head, b: Head) -> float:
    """Frobenius norm of the difference of two scores; factored scores stay factored."""
    if a.score_factors is None or b.score_factors is None:
        return float(np.linalg.norm(a.score - b.score))
    left = np.hstack([a.score_factors.left, b.score_factors.left])
    right = np.vstack([a.score_factors.right, -b.score_factors.right])
    return product_norm(left, right)


def product_norm(left: Array, right: Array) -> float:
    """Frobenius norm of left @ right through the two small triangular factors: a difference of
    nearly equal products keeps its digits, which a Gram matrix would lose."""
    if left.shape[1] >= left.shape[0]:
        return float(np.linalg.norm(left @ right))
    upper = qr(left, mode="r")[0][: left.shape[1]]
    lower = qr(right.T, mode="r")[0][: right.shape[0]]
    return float(np.linalg.norm(upper @ lower.T))
