"""Orthonormal tokens that every one of several subspaces sees as well conditioned blocks.

Statement. Given orthonormal bases B_1..B_n (d x r_i), find T = [T_1..T_m] with orthonormal
columns (d x k each) such that every B_i' T_j is close to a multiple of an isometry; for some of
the bases not each T_j, but all of T together. Random T leave condition numbers of thousands among
a hundred blocks; alternating between the nearest isometries of all blocks and the nearest
orthonormal T (orthogonal Procrustes, twice) brings the worst down to about three.
"""

from collections.abc import Sequence

import numpy as np

from keyhole.arrays import TINY, Array, Float


def find_nearest_isometry(matrix: Array) -> Array:
    """The nearest matrix with orthonormal columns (or rows)."""
    u, _, vt = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(u @ vt)


def spread_tokens(
    bases: list[Array],
    count: int,
    blocks: int,
    rng: np.random.Generator,
    whole: Sequence[Array] = (),
) -> Float[Array, "d n"]:
    """`blocks` groups of `count` orthonormal tokens; across groups orthonormal as far as the
    width allows. The bases in `whole` see all groups together."""
    width = bases[0].shape[0]
    groups = max(1, width // count)
    parts = [
        _design_group(bases, whole, count, min(groups, blocks - start), rng)
        for start in range(0, blocks, groups)
    ]
    return np.concatenate(parts, axis=1)


def _design_group(
    bases: list[Array], whole: Sequence[Array], count: int, blocks: int, rng: np.random.Generator
) -> Array:
    stacked = np.concatenate([*bases, *whole], axis=1)
    width, total = len(stacked), count * blocks
    cuts = np.cumsum([base.shape[1] for base in (*bases, *whole)])[:-1]
    each = [slice(start, start + count) for start in range(0, total, count)]
    views = [
        (rows, columns)
        for place, rows in enumerate(np.split(np.arange(stacked.shape[1]), cuts))
        for columns in (each if place < len(bases) else [slice(0, total)])
    ]
    rate = 3.0 / np.linalg.norm(stacked, 2) ** 2  # of the gradient step, over-relaxed
    tokens = np.linalg.qr(rng.standard_normal((width, total)))[0]
    best, worst = tokens, np.inf
    sweeps = 40  # rounds of alternation: improvement stalls after about thirty
    good_condition = 3.0  # worst condition number of a block at which tokens are taken
    for _ in range(sweeps):
        seen = stacked.T @ tokens
        target, condition = np.empty_like(seen), 1.0
        for rows, columns in views:
            u, s, vt = np.linalg.svd(seen[rows, columns], full_matrices=False)
            wide = max(len(rows), columns.stop - columns.start)
            target[rows, columns] = (u @ vt) * np.sqrt(wide / width)
            condition = max(condition, float(s[0] / max(s[-1], TINY)))
        if condition < worst:
            best, worst = tokens, condition
        if worst <= good_condition:
            break
        tokens = find_nearest_isometry(tokens + rate * (stacked @ (target - seen)))
    return best
