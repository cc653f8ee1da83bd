"""Attention whose weights do not sum to one."""

from dataclasses import replace

import numpy as np

import keyhole
from keyhole.learners.positions.sinks import SinkRatios, has_sink, solve_sinks
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention
from keyhole.models.position import Position
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from placed_layers import placed_layer


def sink_layer(seed: int, biased: bool) -> Attention:
    """Two heads of rank four, sinks affine in the anchor; value biases within the heads' outputs."""
    plain = placed_layer("none", 8, 2, seed)
    rng = np.random.default_rng(seed + 100)
    biases = np.stack([rng.standard_normal(8) @ head.value for head in plain.heads])
    position = Position(
        sinks=0.5 * rng.standard_normal((2, 9)), sink_values=-biases if biased else None
    )
    return Attention(plain.heads, plain.offset, None, position)


def test_large_tokens_act_linearly_beside_a_sink() -> None:
    box = FunctionOracle(sink_layer(0, True), Spec(8))
    assert has_sink(Asker(box), np.random.default_rng(0))

    def squared(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(tokens[:, -1] ** 2 + tokens.mean(axis=1))

    assert not has_sink(Asker(FunctionOracle(squared, Spec(8))), np.random.default_rng(0))


def test_a_sink_is_seen_beside_keys_that_turn() -> None:
    """Most tokens that stand twice are left to the sink of some head at one of their places."""
    layer = placed_layer("rotary", 16, 8, seed=5)
    position = replace(layer.position, sinks=np.random.default_rng(5).standard_normal(8))
    box = FunctionOracle(Attention(layer.heads, layer.offset, None, position), Spec(16))
    assert has_sink(Asker(box), np.random.default_rng(0))


def test_log_ratios_give_scores_and_sinks() -> None:
    rng = np.random.default_rng(1)
    width, rank, full = 5, 2, 3
    score = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width + 1))
    sink = rng.standard_normal(width + 1)
    asked = []
    for number in range(12):
        anchor = rng.standard_normal(width)
        moves = rng.standard_normal((width if number < full else 1, 1, width))
        place = np.append(anchor, 1.0)
        tokens = (moves @ score @ place)[:, None]
        level = np.full((len(moves), 1), sink @ place - anchor @ score @ place)
        asked.append(SinkRatios(anchor, moves, tokens, level, np.zeros_like(level)))
    found = solve_sinks(asked, full, rank)
    assert np.allclose(found.scores[0], score)
    assert np.allclose(found.sinks[0], sink)


def test_a_layer_with_sinks_is_recovered() -> None:
    truth = sink_layer(3, True)
    found = keyhole.recover(truth, seed=1)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.position.kind == "sink"
    assert keyhole.distance(found.model, truth) < 1e-5
    assert found.details["family"] == "attention with a sink"


def test_a_sink_beside_positions_is_refused_with_that_reason() -> None:
    layer = sink_layer(2, False)
    position = replace(layer.position, slopes=np.array([0.5, 0.25]))
    truth = Attention(layer.heads, layer.offset, None, position)
    found = keyhole.recover(truth, seed=1, throw=False)
    assert found.outcome is keyhole.Outcome.UNSUPPORTED
    assert "a sink and positions" in found.reason
