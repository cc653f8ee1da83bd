"""Random members of the model classes, for demos, tests and benchmarks. Holds the truth: no
learner may import this."""

from math import comb

import numpy as np

from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.language_model import Table, TokenAttention, TokenHead
from keyhole.models.mlp import Mlp
from keyhole.models.stack import Stack


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


def block(
    rng: np.random.Generator,
    width: int,
    *,
    heads: int = 0,
    neurons: int = 0,
    norm: str = "post",
    kind: str = "layer",
    activation: str = "gelu",
    epsilon: float = 1e-5,
    parallel: bool = False,
    gated: bool = False,
) -> Block:
    """A block as frameworks initialise them: heads of rank width / heads with maps of entries of
    variance 1 / width, biases of 0.3, gains of 1 ± 0.2. No heads, or no neurons: one sublayer.
    Gated networks are those of Llama: no bias in them.

    >>> block(np.random.default_rng(0), 8, heads=2, neurons=16)
    Block(width=8, 2 heads, 16 gelu neurons, post-norm (layer))
    """

    def weights(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / np.sqrt(width)

    layer = network = None
    if heads:
        rank, members = max(1, width // heads), []
        offset = 0.3 * rng.standard_normal(width)
        for _ in range(heads):
            query, key, value, out = (weights(rank, width) for _ in range(4))
            query_bias, value_bias = 0.3 * rng.standard_normal((2, rank))
            root = np.sqrt(rank)
            members.append(Head((key.T / root, query), key.T @ query_bias / root, value.T @ out))
            offset = offset + value_bias @ out
        layer = Attention(members, offset)
    if neurons:
        network = Mlp(
            weights(neurons, width),
            0.3 * rng.standard_normal(neurons),
            weights(width, neurons),
            activation=activation,
            offset=0.3 * rng.standard_normal(width),
        )
    if neurons and gated:
        network = Mlp(
            weights(neurons, width),
            np.zeros(neurons),
            weights(width, neurons),
            activation=activation,
            gate=weights(neurons, width),
            gate_bias=np.zeros(neurons),
        )
    count = 0 if norm == "none" else (heads > 0) + (neurons > 0)
    gain = 1.0 + 0.2 * rng.standard_normal((count, width))
    shift = 0.3 * rng.standard_normal((count, width)) if kind == "layer" else np.zeros_like(gain)
    return Block(
        layer,
        network,
        norm=norm,
        kind=kind,
        epsilons=epsilon,
        gain=gain,
        bias=shift,
        parallel=parallel,
    )


def stack(
    rng: np.random.Generator,
    width: int,
    *,
    layers: int,
    heads: int,
    neurons: int,
    kind: str = "layer",
    activation: str = "gelu",
    causal: bool = True,
    gated: bool = False,
) -> Stack:
    """Pre-norm blocks, one after the other.

    >>> stack(np.random.default_rng(0), 8, layers=2, heads=2, neurons=16)
    Stack(2 blocks: Block(width=8, 2 heads, 16 gelu neurons, pre-norm (layer)))
    """
    blocks = [
        block(
            rng,
            width,
            heads=heads,
            neurons=neurons,
            norm="pre",
            kind=kind,
            activation=activation,
            gated=gated,
        )
        for _ in range(layers)
    ]
    return Stack(blocks, causal=causal)


def token_attention(
    rng: np.random.Generator,
    tokens: int,
    width: int,
    heads: int,
    head_width: int,
    *,
    tied: bool = False,
    logprobs: bool = False,
) -> TokenAttention:
    """Embedding, attention and unembedding with scores of about one; `tied`: input and output
    share their embedding."""
    embedding = rng.standard_normal((tokens, width))
    output = embedding if tied else rng.standard_normal((tokens, width))
    found = []
    for _ in range(heads):
        query, key, value = rng.standard_normal((3, width, head_width)) / np.sqrt(width)
        out = rng.standard_normal((head_width, width)) / np.sqrt(head_width)
        scores = Table(embedding @ query, (embedding @ key).T / np.sqrt(head_width))
        found.append(TokenHead(scores, Table(embedding @ value, out @ output.T)))
    return TokenAttention(Table(embedding, output.T), found, logprobs=logprobs)
