"""A zoo: boxes of known families, of all sizes and precisions, and twenty impostors.

Each knows its family (None: an impostor) and the learner that one would pick who knew the box.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import erf

from keyhole.learners.base import Learner
from keyhole.learners.label_only import LabelOnly
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.single_head import LowRank, SingleHead
from keyhole.learners.transformer.learner import Transformer
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import open_oracle
from keyhole.oracles.wrappers.degrade import BITS, Labels, Noisy, Rounded, round_bits
from multi_head_boxes import layer_box, random_layer
from networks import layer, network

Function = Callable[[np.ndarray], np.ndarray]
SINGLE, SEVERAL, LABELS = "single head", "several heads", "label-only head"
NETWORK, LAYER = "ReLU network", "Transformer"


@dataclass(frozen=True, eq=False)
class Specimen:
    """A box by name. `build` makes it anew for each run: some boxes remember what they were asked."""

    name: str
    build: Callable[[], Oracle]
    family: str | None = None
    learner: Learner | None = field(default=None)


def rng_of(seed: int) -> np.random.Generator:
    return np.random.default_rng([seed, 60])


def drawn(seed: int, width: int, **options: Any) -> Attention:
    return attention(rng_of(seed), width, **options)


def member(
    name: str, family: str, learner: Learner, box: Callable[[], Any], **options: Any
) -> Specimen:
    def build() -> Oracle:
        made = box()
        return made if isinstance(made, Oracle) else open_oracle(made, **options)

    return Specimen(name, build, family, learner)


def shortened(model: Attention, bits: int) -> Function:
    """The model in a short number format: parameters, tokens and answers rounded to it."""
    parts = {name: round_bits(array, bits) for name, array in model.to_arrays().items()}
    short = Attention.from_arrays(parts).astype(np.float32)

    def box(tokens: np.ndarray) -> np.ndarray:
        return round_bits(short(round_bits(tokens, bits).astype(np.float32)), bits)

    return box


def single(model: Any) -> Function:
    """A keyhole model that computes in float32 from end to end."""
    parts = {name: array.astype(np.float32) for name, array in model.to_arrays().items()}
    short = type(model).from_arrays(parts)
    return lambda tokens: short(tokens.astype(np.float32))


def layer_of(seed: int, width: int, heads: int, dtype: str = "float64", bias: bool = True) -> Any:
    import torch

    made = random_layer(width, heads, seed)
    if not bias:
        with torch.no_grad():
            made.in_proj_bias.zero_()
            made.out_proj.bias.zero_()
    return layer_box(made.to(getattr(torch, dtype)))


def words(seed: int, count: int, width: int) -> np.ndarray:
    return rng_of(seed).standard_normal((count, width))


def narcissus(seed: int, width: int) -> Attention:
    """A head that sees nothing but its own query, unless that is short."""
    (head,) = drawn(seed, width).heads
    return Attention([Head(head.score + 30.0 * np.eye(width), None, head.value)])


def one_head() -> list[Specimen]:
    single_head = SingleHead()
    return [
        member("d=4", SINGLE, single_head, lambda: drawn(0, 4)),
        member("d=16", SINGLE, single_head, lambda: drawn(1, 16)),
        member("d=48", SINGLE, single_head, lambda: drawn(2, 48)),
        member("large scores", SINGLE, single_head, lambda: drawn(3, 12, scale=30.0)),
        member("small scores", SINGLE, single_head, lambda: drawn(4, 12, scale=0.01)),
        member("key bias", SINGLE, single_head, lambda: drawn(5, 20, bias=True)),
        member("key bias, d=40", SINGLE, single_head, lambda: drawn(6, 40, bias=True)),
        member("vector answers", SINGLE, single_head, lambda: drawn(7, 12, outputs=5)),
        member(
            "vector answers, biases",
            SINGLE,
            single_head,
            lambda: drawn(8, 12, outputs=12, bias=True),
        ),
        member("rank 2 of 24", SINGLE, LowRank(), lambda: drawn(9, 24, rank=2)),
        member("rank 4 of 48", SINGLE, LowRank(), lambda: drawn(10, 48, rank=4)),
        member("rank 3 of 24, biases", SINGLE, LowRank(), lambda: drawn(11, 24, rank=3, bias=True)),
        member("rank 2, vectors", SINGLE, LowRank(), lambda: drawn(12, 20, rank=2, outputs=4)),
        member("float32", SINGLE, single_head, lambda: single(drawn(13, 12)), width=12),
        member(
            "float32, biases",
            SINGLE,
            single_head,
            lambda: single(drawn(14, 10, bias=True)),
            width=10,
        ),
        member("bfloat16", SINGLE, single_head, lambda: shortened(drawn(15, 8), 8), width=8),
        member(
            "four decimals",
            SINGLE,
            single_head,
            lambda: Rounded(open_oracle(drawn(16, 8)), decimals=4),
        ),
        member("noise 1e-4", SINGLE, single_head, lambda: Noisy(open_oracle(drawn(17, 8)), 1e-4)),
        member("tokens within 2", SINGLE, single_head, lambda: drawn(18, 10), max_norm=2.0),
        member("entries in a box", SINGLE, single_head, lambda: drawn(19, 8), low=-1.0, high=0.5),
        member(
            "a vocabulary", SINGLE, single_head, lambda: drawn(20, 6), vocabulary=words(20, 40, 6)
        ),
        member("d=64, vectors of 64", SINGLE, single_head, lambda: drawn(22, 64, outputs=64)),
        member("d=48, vectors of 8", SINGLE, single_head, lambda: drawn(23, 48, outputs=8)),
        member("attends to itself", SINGLE, single_head, lambda: narcissus(24, 8)),
        member("at most pairs", SINGLE, single_head, lambda: drawn(21, 10), max_length=2),
    ]


def several_heads() -> list[Specimen]:
    several = MultiHead()
    return [
        member("2 heads, d=6", SEVERAL, several, lambda: drawn(30, 6, heads=2)),
        member("3 heads, d=8", SEVERAL, several, lambda: drawn(31, 8, heads=3)),
        member("2 heads, biases", SEVERAL, several, lambda: drawn(32, 6, heads=2, bias=True)),
        member("2 heads, one weak", SEVERAL, several, lambda: weak_extra_head(36)),
        member("2 heads, rank 2", SEVERAL, several, lambda: drawn(33, 12, heads=2, rank=2)),
        member(
            "2 heads, float32", SEVERAL, several, lambda: single(drawn(34, 6, heads=2)), width=6
        ),
        member("a layer, 4 heads of 16", SEVERAL, several, lambda: layer_of(0, 16, 4), width=16),
        member(
            "a layer, no biases", SEVERAL, several, lambda: layer_of(1, 12, 3, bias=False), width=12
        ),
        member("a layer, 8 heads of 32", SEVERAL, several, lambda: layer_of(2, 32, 8), width=32),
        member(
            "a layer, float32", SEVERAL, several, lambda: layer_of(3, 12, 3, "float32"), width=12
        ),
        member(
            "a layer, tokens within 2",
            SEVERAL,
            several,
            lambda: layer_of(4, 12, 3),
            width=12,
            max_norm=2.0,
        ),
    ]


def networks() -> list[Specimen]:
    net, transformer = ReluNetworkLearner(), Transformer()
    return [
        member("d=6, 8 neurons", NETWORK, net, lambda: network(0, 6, 8)),
        member("d=12, 20 neurons", NETWORK, net, lambda: network(1, 12, 20)),
        member("inputs within 2", NETWORK, net, lambda: network(4, 5, 6), max_norm=2.0),
        member("float32", NETWORK, net, lambda: single(network(5, 5, 6)), width=5),
        member("3 outputs", NETWORK, net, lambda: network(2, 6, 8, 3)),
        member("d=5, 8 neurons", LAYER, transformer, lambda: layer(0, 5, 8)),
        member("no biases", LAYER, transformer, lambda: layer(1, 6, 10, bias=False)),
        member("tokens within 3", LAYER, transformer, lambda: layer(7, 5, 6), max_norm=3.0),
        member("key bias", LAYER, transformer, lambda: layer(2, 6, 10, key_bias=True)),
    ]


def labels() -> list[Specimen]:
    only = LabelOnly()
    return [
        member("signs", LABELS, only, lambda: Labels(open_oracle(drawn(40, 4)))),
        member("bits", LABELS, only, lambda: Labels(open_oracle(drawn(41, 4)), BITS)),
    ]


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def altered(change: Callable[[np.ndarray], np.ndarray], seed: int, heads: int = 1) -> Function:
    """Heads whose scores are changed before the softmax."""
    model = drawn(seed, 8, heads=heads)

    def box(tokens: np.ndarray) -> np.ndarray:
        answer = np.zeros(len(tokens))
        for head in model.heads:
            scores = np.einsum("nld,nd->nl", tokens, head.keys(tokens[:, -1]))
            answer += np.einsum("nl,nl->n", softmax(change(scores)), tokens @ head.value)
        return answer

    return box


def masked(scores: np.ndarray) -> np.ndarray:
    """Every third token is not seen."""
    scores = scores.copy()
    scores[:, 1:-1:3] = -np.inf
    return scores


def windowed(scores: np.ndarray) -> np.ndarray:
    scores = scores.copy()
    scores[:, :-10] = -np.inf
    return scores


def first_is_hot(scores: np.ndarray) -> np.ndarray:
    scores = scores.copy()
    scores[:, 0] *= 1.3
    return scores


def weak_extra_head(seed: int, outputs: int | None = None) -> Attention:
    model, extra = (drawn(seed + k, 8, outputs=outputs) for k in range(2))
    (head,) = extra.heads
    return Attention([*model.heads, Head(head.score, None, 1e-4 * head.value)])


def linear_attention(tokens: np.ndarray) -> np.ndarray:
    (head,) = drawn(57, 8).heads
    scores = np.einsum("nld,nd->nl", tokens, head.keys(tokens[:, -1]))
    return np.einsum("nl,nl->n", scores, tokens @ head.value)


def mean_mlp(tokens: np.ndarray) -> np.ndarray:
    rng = rng_of(58)
    return np.tanh(tokens.mean(axis=1) @ rng.standard_normal((8, 16)) / 3) @ rng.standard_normal(16)


def gru(tokens: np.ndarray) -> np.ndarray:
    rng = rng_of(59)
    maps, value = rng.standard_normal((3, 2, 8, 8)) / 3, rng.standard_normal(8)
    state = np.zeros((len(tokens), 8))
    for t in range(tokens.shape[1]):
        update, reset = (
            0.5 * (1 + np.tanh((tokens[:, t] @ maps[k, 0] + state @ maps[k, 1]) / 2))
            for k in (0, 1)
        )
        new = np.tanh(tokens[:, t] @ maps[2, 0] + (reset * state) @ maps[2, 1])
        state = (1 - update) * state + update * new
    return np.asarray(state @ value)


def two_layers(seed: int = 0) -> Function:
    first, second = network(seed, 6, 10), network(seed + 1, 10, 6)
    return lambda x: second(np.maximum(x[:, -1] @ first.weight.T + first.bias, 0))


def other_activation(tokens: np.ndarray) -> np.ndarray:
    net = network(3, 6, 10)
    hidden = tokens[:, -1] @ net.weight.T + net.bias
    return np.asarray((hidden * np.tanh(np.logaddexp(0, hidden))) @ net.output)


def smooth_layer(tokens: np.ndarray) -> np.ndarray:
    plain = layer(3, 6, 10)
    hidden = plain.attended(tokens) @ plain.network.weight.T + plain.network.bias
    return np.asarray(hidden * 0.5 * (1 + erf(hidden / np.sqrt(2))) @ plain.network.output)


def gated_by_one_entry(tokens: np.ndarray) -> np.ndarray:
    return (tokens[:, -1, 0] * tokens[:, :, 1].mean(axis=1)) * 2.0


def mean_of_squares(tokens: np.ndarray) -> np.ndarray:
    return (tokens**2).mean(axis=1) @ np.linspace(-1.0, 2.0, tokens.shape[2])


def cubed(tokens: np.ndarray) -> np.ndarray:
    """A residual connection, and a cube instead of a norm."""
    mixed = layer_of(5, 8, 2)(tokens) + tokens[:, -1]
    return np.asarray(mixed**3)


def first_token_added(tokens: np.ndarray) -> np.ndarray:
    plain = layer(4, 6, 10)
    return np.asarray(plain.network(plain.attended(tokens) + 0.5 * tokens[:, 0]))


def two_heads_and_network(tokens: np.ndarray) -> np.ndarray:
    first, second = layer(5, 6, 10), layer(6, 6, 10)
    return np.asarray(first.network((first.attended(tokens) + second.attended(tokens)) / 2))


def stepped(tokens: np.ndarray) -> np.ndarray:
    """A head whose answers jump where the query is long."""
    return drawn(60, 8)(tokens) + 0.1 * (np.linalg.norm(tokens[:, -1], axis=1) > 9.0)


class Drifting:
    """Its value grows with every query."""

    width = 8

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        self.asked += len(tokens)
        return drawn(61, 8)(tokens) * (1 + 1e-7 * self.asked)


def impostors() -> list[Specimen]:
    def fake(name: str, box: Callable[[], Any], **options: Any) -> Specimen:
        made = member(name, "", SingleHead(), box, **options)
        return Specimen(name, made.build)

    stated = NoiseModel(additive=1e-6)
    return [
        fake("two hidden layers", two_layers, width=6),
        fake("every third token masked", lambda: altered(masked, 50), width=8),
        fake("window of ten", lambda: altered(windowed, 51), width=8),
        fake("window of ten, 2 heads", lambda: altered(windowed, 51, 2), width=8),
        fake("ALiBi", lambda: altered(lambda s: s + 0.05 * np.arange(s.shape[1]), 52), width=8),
        fake(
            "ALiBi, 2 heads",
            lambda: altered(lambda s: s + 0.05 * np.arange(s.shape[1]), 52, 2),
            width=8,
        ),
        fake("score cap", lambda: altered(lambda s: 30 * np.tanh(s / 30), 53), width=8),
        fake("score cap, 2 heads", lambda: altered(lambda s: 30 * np.tanh(s / 30), 53, 2), width=8),
        fake("temperature at one position", lambda: altered(first_is_hot, 54), width=8),
        fake("linear attention", lambda: linear_attention, width=8),
        fake("MLP over the mean", lambda: mean_mlp, width=8),
        fake("GRU", lambda: gru, width=8),
        fake("drift", Drifting),
        fake(
            "noise beyond what is stated",
            lambda: Noisy(open_oracle(drawn(62, 8), precision=stated), 1e-3),
        ),
        fake("a hidden step", lambda: stepped, width=8),
        fake("residual and cube", lambda: cubed, width=8),
        fake("mean of squares", lambda: mean_of_squares, width=8),
        fake("gated by one entry", lambda: gated_by_one_entry, width=8),
        fake("network with its first token added", lambda: first_token_added, width=6),
        fake("network over two heads", lambda: two_heads_and_network, width=6),
    ]


def everything() -> list[Specimen]:
    return [*one_head(), *several_heads(), *networks(), *labels(), *impostors()]
