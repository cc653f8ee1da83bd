"""Attention from its projections: query, key, value and output maps as files and modules keep them.

Pure numpy: whatever reads weights (torch modules, GGUF files) ends here.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.models.attention import Attention, Head
from keyhole.models.position import Position


@dataclass(frozen=True, eq=False)
class Linear:
    """x -> weight x + bias."""

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"]

    def rows(self, chosen: slice) -> "Linear":
        return Linear(self.weight[chosen], self.bias[chosen])


@dataclass(frozen=True, eq=False)
class Projections:
    """Query, key, value and output maps of all heads, one below the other."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear | None  # None: the heads' values stand side by side in the answer
    heads: int
    scale: float | None = None  # None: one over the square root of a head's width
    window: int | None = None


def assemble_attention(maps: Projections, frequencies: Float[Array, " n"] | None) -> Attention:
    """The layer that these maps make; `frequencies` are radians per place of a rotary embedding."""
    inner = len(maps.query.weight) // maps.heads
    shared = maps.heads * inner // len(maps.key.weight)  # heads that have one key and value map
    scale = inner**-0.5 if maps.scale is None else maps.scale
    out = Linear(np.eye(maps.heads * inner), np.zeros(maps.heads * inner))
    out = out if maps.out is None else maps.out
    heads, rotary, offset = [], [], out.bias.copy()
    for h in range(maps.heads):
        own, group = (slice(k * inner, (k + 1) * inner) for k in (h, h // shared))
        query, key, value = maps.query.rows(own), maps.key.rows(group), maps.value.rows(group)
        column = out.weight[:, own]
        offset += column @ value.bias
        if frequencies is not None:
            rotary.append(_turning_pairs(query, key, len(frequencies), scale))
            kept = slice(2 * len(frequencies), None)  # what a partial rotation leaves alone
            query, key = query.rows(kept), key.rows(kept)
        left = scale * key.weight.T
        score = (left, query.weight) if len(query.weight) else np.zeros((left.shape[0],) * 2)
        heads.append(Head(score, left @ query.bias, (column @ value.weight).T))
    position = None
    if frequencies is not None:
        keys, queries = (np.stack(part) for part in zip(*rotary, strict=True))
        position = Position(frequencies, keys, queries, window=maps.window)
    elif maps.window is not None:
        position = Position(window=maps.window)
    return Attention(heads, offset, position=position)


def _turning_pairs(
    query: Linear, key: Linear, count: int, scale: float
) -> tuple[Float[Array, "m e"], Float[Array, "m e"]]:
    """The rows that turn, as pairs of real and imaginary rows on [token; 1]: entry j and entry
    j + count form a pair. A key is conjugate, since scores know the difference of two angles."""
    rows = []
    for linear, sign in ((key, -1.0), (query, 1.0)):
        whole = np.column_stack([linear.weight, linear.bias])
        pairs = np.stack([whole[:count], sign * whole[count : 2 * count]], axis=1)
        rows.append(pairs.reshape(2 * count, -1))
    return rows[0], scale * rows[1]
