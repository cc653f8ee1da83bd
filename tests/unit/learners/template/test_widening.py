import numpy as np
import pytest
from tests.templates import AttentionHeads, Encoder, randomise
from torch import nn

from keyhole.learners.template.forward import Forward
from keyhole.learners.template.widening import (
    draw_wide,
    embed,
    find_neurons,
    find_pairs,
    narrow,
    widen,
)


class Network(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, tokens):  # type: ignore[no-untyped-def]
        return self.net(tokens.mean(1))


def test_pairs_are_found_by_what_passes_through() -> None:
    deep = Network(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 6), nn.SiLU(), nn.Linear(6, 2))
    pairs = find_pairs(Forward.of(deep), 3, 1)
    assert [(pair.inner, pair.outer) for pair in pairs] == [("net.0", "net.2"), ("net.2", "net.4")]
    assert [pair.turn for pair in pairs] == [0.0, pytest.approx(1.0)]
    relu = find_pairs(Forward.of(Encoder(activation="relu")), 6, 1)
    assert [pair.kinked for pair in relu] == [True]


@pytest.mark.parametrize(
    ("module", "width"),
    [
        (AttentionHeads(4), 4),
        (Network(nn.Linear(3, 5), nn.Softmax(-1), nn.Linear(5, 2)), 3),
        (Network(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5), nn.Linear(5, 2)), 3),
        (Network(nn.Linear(3, 5), nn.Linear(5, 2)), 3),
    ],
)
def test_what_is_no_pair(module: nn.Module, width: int) -> None:
    assert find_pairs(Forward.of(module), width, 1) == []


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_wider_and_back_is_the_same_function(activation: str) -> None:
    template = Forward.of(randomise(Encoder(activation=activation), 0))
    pairs = find_pairs(template, 6, 2)
    wide = widen(template, pairs, 1.5)
    tokens = np.random.default_rng(0).standard_normal((5, 3, 6))
    truth = template.predict(template.weights, tokens)
    arrays = {
        k: np.array(v) for k, v in wide.split(embed(template, wide, template.weights)).items()
    }
    for part in (arrays["layer.linear1.weight"], arrays["layer.linear1.bias"]):
        part[1] *= -1  # a neuron that points the wrong way round, and the leak that makes up for it
    arrays["layer.linear2.leak"][1] = -1.0
    weights = wide.join(arrays)
    assert np.allclose(wide.predict(weights, tokens), truth, atol=1e-12)
    kept = find_neurons(wide, pairs)[:8][::-1]
    back = narrow(template, wide, pairs, weights, kept)
    assert np.allclose(template.predict(back, tokens), truth, atol=1e-12)


def test_starts_begin_without_leaks() -> None:
    template = Forward.of(Encoder())
    wide = widen(template, find_pairs(template, 6, 2), 2.0)
    start = wide.split(draw_wide(wide, np.random.default_rng(0)))
    assert start["layer.linear1.weight"].shape == (16, 6)
    assert not start["layer.linear2.leak"].any()


def test_a_smooth_stand_in_nears_relu() -> None:
    template = Forward.of(randomise(Encoder(activation="relu"), 0))
    pairs = find_pairs(template, 6, 2)
    tokens = np.random.default_rng(0).standard_normal((5, 3, 6))
    truth = template.predict(template.weights, tokens)
    gaps = []
    for sharpness in (2.0, 20.0, 200.0):
        wide = widen(template, pairs, 1.0, sharpness)
        weights = embed(template, wide, template.weights)
        gaps.append(np.abs(wide.predict(weights, tokens) - truth).max())
    assert gaps[0] > gaps[1] > gaps[2]
