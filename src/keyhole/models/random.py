"""Random members of the model classes, for demos, tests and benchmarks. Holds the truth: no
learner may import this."""

from math import comb

import numpy as np

from keyhole.errors import InvalidArgument
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


def high_order(
    rng: np.random.Generator,
    width: int,
    heads: int,
    *,
    step: float = 0.5,
) -> Attention:
    """A layer on which learning from examples is hard: its heads cancel up to order heads - 2.

    With scores base + i step direction and values (-1)^i C(m - 1, i) W, i = 0 ... m - 1, the layer
    is the (m - 1)-th finite difference of one head along a line of scores: what the heads do up to
    order m - 2 in the step cancels exactly. This is the mechanism behind the lower bounds of Chen
    and Li ("Provably learning a multi-head attention layer", STOC 2025), by which time exponential
    in the number of heads cannot be avoided: the smaller the step and the more heads, the fainter
    the trace that tells this layer from one with a head less.

    `step` is the Frobenius norm of the difference between two neighbouring scores, which are of
    norm one; the values are divided by step^(heads - 1), so that the outputs stay of order one.

    >>> high_order(np.random.default_rng(0), 4, 3)
    Attention(width=4, heads=3, outputs=4)
    """
    if heads < 1 or not step > 0:
        raise InvalidArgument(f"heads must be at least 1 and step positive, got {heads}, {step}")
    base, direction = (rng.standard_normal((width, width)) for _ in range(2))
    base *= 1.0 / np.linalg.norm(base)
    direction *= step / np.linalg.norm(direction)
    value = rng.standard_normal((width, width)) / (np.sqrt(width) * step ** (heads - 1))
    members = [
        Head(base + i * direction, None, (-1.0) ** i * comb(heads - 1, i) * value)
        for i in range(heads)
    ]
    return Attention(members, np.zeros(width))
