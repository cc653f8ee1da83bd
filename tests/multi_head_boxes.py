"""Layers that hold the truth, and the one way the tests below run the learner on them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole.learners.base import Hypothesis
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import canonical, match_heads, score_gap
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.wrappers.batch import Batcher
from keyhole.oracles.wrappers.count import QueryCounter
from keyhole.oracles.wrappers.validate import Validator


def ask_all(
    box: Callable[[np.ndarray], Any],
    width: int,
    learner: MultiHead,
    seed: int = 0,
    budget: int | None = None,
    **spec: Any,
) -> tuple[Hypothesis, QueryCounter]:
    """What the learner finds, and the counter at the border."""
    oracle = QueryCounter(Batcher(Validator(FunctionOracle(box, Spec(width, **spec)))), budget)
    return learner.learn(oracle, np.random.default_rng(seed)), oracle


def asker(box: Callable[[np.ndarray], Any], width: int, **spec: Any) -> Asker:
    """What the stages of the learner ask."""
    return Asker(FunctionOracle(box, Spec(width, **spec)))


def pairs(learned: Hypothesis, truth: Attention) -> list[tuple[Head, Head, Head]]:
    """Found head, true head, error bars of the found head."""
    form = canonical(truth)
    assert form is not None
    bars = dict(zip(map(id, learned.model.heads), learned.errors.heads, strict=True))
    return [(a, b, bars[id(a)]) for a, b in match_heads(learned.model.heads, form.heads)]


def worst_bar(learned: Hypothesis, truth: Attention) -> float:
    """Largest true error of a score in units of its error bar."""
    found = pairs(learned, truth)
    return max(score_gap(a, b) / np.linalg.norm(bar.score) for a, b, bar in found)


def random_layer(width: int, heads: int, seed: int) -> Any:
    """torch.nn.MultiheadAttention with random weights and biases, in float64."""
    import torch

    torch.manual_seed(seed)
    layer = torch.nn.MultiheadAttention(width, heads, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        layer.in_proj_bias.normal_(0, 0.5)
        layer.out_proj.bias.normal_(0, 0.5)
    return layer.eval()


def layer_box(layer: Any) -> Callable[[np.ndarray], np.ndarray]:
    """The layer's answer at the last position."""
    import torch

    kind = layer.out_proj.weight.dtype

    def box(tokens: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            x = torch.as_tensor(np.ascontiguousarray(tokens)).to(kind)
            return layer(x[:, -1:], x, x, need_weights=False)[0][:, 0].numpy()

    return box


def layer_truth(layer: Any) -> Attention:
    """The same layer as products of its maps."""
    inner = layer.embed_dim // layer.num_heads
    q, k, v = (w.double().numpy() for w in layer.in_proj_weight.detach().chunk(3))
    bq, _, bv = (b.double().numpy() for b in layer.in_proj_bias.detach().chunk(3))
    out = layer.out_proj.weight.detach().double().numpy()
    heads = []
    for h in range(layer.num_heads):
        s = slice(h * inner, (h + 1) * inner)
        score, bias = k[s].T @ q[s], k[s].T @ bq[s]
        heads.append(Head(score / np.sqrt(inner), bias / np.sqrt(inner), v[s].T @ out[:, s].T))
    return Attention(heads, layer.out_proj.bias.detach().double().numpy() + out @ bv)
