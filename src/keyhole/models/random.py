"""Random members of the model classes, for demos, tests and benchmarks. Holds the truth: no
learner may import this."""

import numpy as np

from keyhole.models.attention import Attention, Head


def attention(
    rng: np.random.Generator,
    width: int,
    *,
    heads: int = 1,
    rank: int | None = None,
    outputs: int | None = None,
    scale: float = 1.0,
    bias: bool = False,
) -> Attention:
    """Scores with entries of standard deviation scale / sqrt(width), standard normal values.

    >>> attention(np.random.default_rng(0), 4, heads=2)
    Attention(width=4, heads=2, outputs=scalar)
    """
    members = []
    for _ in range(heads):
        if rank is None:
            score = scale * rng.standard_normal((width, width)) / np.sqrt(width)
        else:
            left = rng.standard_normal((width, rank)) / np.sqrt(rank)
            score = (scale * left, rng.standard_normal((rank, width)) / np.sqrt(width))
        shape = (width,) if outputs is None else (width, outputs)
        value = rng.standard_normal(shape)
        key_bias = scale * rng.standard_normal(width) if bias else None
        members.append(Head(score, key_bias, value))
    offset = rng.standard_normal(() if outputs is None else outputs) if bias else 0.0
    return Attention(members, offset)
