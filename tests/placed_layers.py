"""Layers whose scores depend on where tokens stand. They hold the truth."""

import numpy as np

from keyhole.models.attention import Attention, Head
from keyhole.models.position import Position


def placed_layer(
    kind: str,
    width: int,
    heads: int,
    seed: int,
    window: int | None = None,
    masked: int | None = None,
) -> Attention:
    """A layer of heads that share out the width, biases included, with one kind of positions."""
    rng = np.random.default_rng(seed)
    inner = width // heads
    values = [
        rng.standard_normal((width, inner)) @ rng.standard_normal((inner, width)) / width
        for _ in range(heads)
    ]
    offset = rng.standard_normal(width)
    if kind == "rotary":
        rows = (heads, inner, width + 1)
        keys, queries = (1.4 * rng.standard_normal(rows) / width**0.5 for _ in range(2))
        frequencies = 1e4 ** (-np.arange(inner // 2) / (inner // 2))
        blank = np.zeros((width, width))
        position = Position(frequencies, keys / inner**0.25, queries / inner**0.25, window=window)
        return Attention([Head(blank, None, value) for value in values], offset, None, position)
    made = []
    for value in values:
        left = 1.4 * rng.standard_normal((width, inner)) / width**0.5
        right = 1.4 * rng.standard_normal((inner, width)) / width**0.5
        made.append(Head((left, right), left @ rng.standard_normal(inner) / 2, value))
    if kind == "linear bias":
        position = Position(slopes=2.0 ** -np.arange(1.0, heads + 1), window=window)
    elif kind == "bias by distance":
        table = np.repeat(rng.standard_normal((heads, 9)), 3, axis=1)
        position = Position(bias=table - table[:, :1], window=window)
    elif kind == "position vectors":
        position = Position(vectors=0.5 * rng.standard_normal((24, width)))
    else:
        position = Position(window=window, masked=masked)
    return Attention(made, offset, None, position)
