"""A recovered layer the way it was built: query, key, value and output maps of every head.

Only products can be seen from outside, so the maps are one choice among many: the balanced one, in
which query and key maps (and value and output maps) have the same singular values.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head

SMALL = 1e-7  # singular value, relative to the largest, that recovered parameters count as zero


@dataclass(frozen=True, eq=False)
class HeadMaps:
    """score = keyᵀ query / sqrt(width), key_bias = keyᵀ query_bias / sqrt(width), value = into out.

    `width` is the number of rows of query and key, and of columns of `into` (d, width).
    """

    query: Float[Array, "w d"]
    query_bias: Float[Array, " w"]
    key: Float[Array, "w d"]
    into: Float[Array, "d w"]
    out: Float[Array, "w outputs"]

    @property
    def width(self) -> int:
        return int(self.query.shape[0])


def numerical_rank(sizes: Float[Array, " n"]) -> int:
    """How many singular values count, given the largest."""
    if not len(sizes) or sizes[0] == 0:
        return 0
    return int((sizes > SMALL * sizes[0]).sum())


def scores_with_bias(head: Head) -> Float[Array, "d e"]:
    """[score | key_bias]: one map of the query and a constant."""
    return np.concatenate([head.score, head.key_bias[:, None]], axis=1)


def head_width(head: Head) -> int:
    """The smallest inner width with which this head can be built."""
    value = head.value if head.value.ndim == 2 else head.value[:, None]
    scores = np.linalg.svd(scores_with_bias(head), compute_uv=False)
    values = np.linalg.svd(value, compute_uv=False)
    return max(1, numerical_rank(scores), numerical_rank(values))


def head_maps(head: Head, width: int | None = None) -> HeadMaps:
    """The balanced maps of a head, of a given inner width (unused rows are zero)."""
    needed = head_width(head)
    inner = needed if width is None else width
    if inner < needed:
        raise InvalidArgument(f"this head needs an inner width of {needed}, got {inner}")
    value = head.value if head.value.ndim == 2 else head.value[:, None]
    left, right = balanced_product(scores_with_bias(head), inner)
    into, out = balanced_product(value, inner)
    strength = inner**0.25  # the square root of the layer's own scaling, on either side
    return HeadMaps(
        query=strength * right[:, :-1],
        query_bias=strength * right[:, -1],
        key=strength * left.T,
        into=into,
        out=out,
    )


def balanced_product(matrix: Array, inner: int) -> tuple[Array, Array]:
    """matrix = left @ right with equal singular values, padded with zeros to `inner`."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    count = min(inner, len(s))
    root = np.sqrt(s[:count])
    left = np.zeros((matrix.shape[0], inner))
    right = np.zeros((inner, matrix.shape[1]))
    left[:, :count] = u[:, :count] * root
    right[:count] = root[:, None] * vt[:count]
    return left, right


def layer_maps(model: Attention, width: int | None = None) -> tuple[HeadMaps, ...]:
    """The maps of all heads, of one common inner width (the smallest that fits them all)."""
    inner = max(head_width(head) for head in model.heads) if width is None else width
    return tuple(head_maps(head, inner) for head in model.heads)
