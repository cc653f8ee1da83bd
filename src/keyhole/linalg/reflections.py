"""Orthonormal rows, mixed among each other by reflections, in the memory where they lie."""

import numpy as np

from keyhole.arrays import Array, Float


def turned(rows: Float[Array, "m d"], start: Array, goal: Array) -> Float[Array, "m d"]:
    """Orthonormal rows mixed by the reflection that takes the direction `start` to `goal`."""
    if not start.any():
        return rows
    gap = start / np.linalg.norm(start) - goal / np.linalg.norm(goal)
    size = float(gap @ gap)
    if size == 0.0:
        return rows
    rows -= np.outer(2.0 / size * gap, gap @ rows)
    return rows


def without(rows: Float[Array, "m d"], weights: Float[Array, "k m"]) -> Float[Array, "n d"]:
    """Orthonormal rows spanning what is left when the combinations `weights`, orthonormal, are
    taken out: all but the last of the block reflection that takes these to the last. The memory of
    the last is free for others then."""
    taken = len(weights)
    left, sizes, right = np.linalg.svd(weights[:, -taken:])
    gap = weights.copy()
    gap[:, -taken:] += left @ right  # away from the last rows: no cancellation
    mixed = (left / (1.0 + sizes)) @ (left.T @ (gap @ rows))
    rest = rows[:-taken]
    rest -= gap[:, :-taken].T @ mixed
    return rest
