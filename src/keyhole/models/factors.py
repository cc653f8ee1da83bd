"""A recovered layer the way it was built: query, key, value and output maps of every head.

Only products can be seen from outside, so the maps are one choice among many: the balanced one, in
which query and key maps (and value and output maps) have the same singular values.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head


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
    small = 1e-7  # singular value, relative to the largest, that recovered parameters count as zero
    return int((sizes > small * sizes[0]).sum())


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
    """The query, key, value and output maps of all heads, of one common inner width.

    Args:
        model: A layer of attention.
        width: Inner width; None for the smallest that fits all heads.

    Returns:
        The maps of each head: balanced factors of its score and of its value.

    Raises:
        InvalidArgument: A head that needs a larger inner width.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> maps = layer_maps(attention(np.random.default_rng(0), 6, heads=2, rank=2, outputs=6))
        >>> maps[0].query.shape
        (6, 6)
    """
    inner = max(head_width(head) for head in model.heads) if width is None else width
    return tuple(head_maps(head, inner) for head in model.heads)


def find_groups(model: Attention) -> tuple[tuple[int, ...], ...]:
    """Heads that share their keys and values (grouped or multi-query attention), as groups.

    Shared maps show as the spaces of tokens that a head reads: those of its keys and of its values
    are the same. A head that reads all of a token says nothing, and is a group by itself.
    """
    found: list[tuple[list[int], list[Array]]] = []
    for number, head in enumerate(model.heads):
        keys = scores_with_bias(head)
        if model.position is not None and model.position.keys is not None:
            keys = np.concatenate([keys, model.position.keys[number, :, :-1].T], axis=1)
        value = head.value if head.value.ndim == 2 else head.value[:, None]
        spaces = [range_of(keys), range_of(value)]
        whole = any(space.shape[1] == model.width for space in spaces)
        for members, own in found:
            if not whole and all(same_space(a, b) for a, b in zip(spaces, own, strict=True)):
                members.append(number)
                break
        else:
            found.append(([number], spaces))
    return tuple(tuple(members) for members, _ in found)


def range_of(matrix: Float[Array, "d n"]) -> Float[Array, "d r"]:
    """An orthonormal basis of the columns."""
    left, sizes, _ = np.linalg.svd(matrix, full_matrices=False)
    return np.asarray(left[:, : numerical_rank(sizes)])


def same_space(one: Float[Array, "d r"], other: Float[Array, "d s"]) -> bool:
    """Whether two orthonormal bases span one space."""
    apart = 1e-4  # sine of an angle that recovered spaces have by their errors
    if one.shape != other.shape or not one.shape[1]:
        return False
    return bool(np.linalg.norm(one - other @ (other.T @ one), 2) < apart)


def tell_groups(groups: tuple[tuple[int, ...], ...]) -> tuple[str, ...]:
    """The sentence for the reader of a report; none where no heads share."""
    if all(len(members) == 1 for members in groups):
        return ()
    heads = sum(len(members) for members in groups)
    return (f"{heads} heads share {len(groups)} sets of keys and values (grouped queries).",)
