"""What a budget buys on a coarse box."""

import numpy as np
import pytest

import keyhole
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.models.attention import Attention
from keyhole.models.canonical import match_heads
from keyhole.models.random import attention
from multi_head_boxes import layer_box, layer_truth, random_layer


def errors(recovery: keyhole.Recovery, truth: Attention) -> tuple[float, float]:
    """Worst relative error of a score, and in units of its error bar."""
    bars = dict(zip(map(id, recovery.model.heads), recovery.errors.heads, strict=True))
    worst, units = 0.0, 0.0
    for found, true in match_heads(recovery.model.heads, truth.heads):
        gap = float(np.linalg.norm(found.score - true.score))
        worst = max(worst, gap / float(np.linalg.norm(true.score)))
        units = max(units, gap / float(np.linalg.norm(bars[id(found)].score)))
    return worst, units


def test_a_float32_layer() -> None:
    layer = random_layer(16, 2, 0).float()
    truth, floor = layer_truth(layer), 4 * 16 + 2 - 16
    box = keyhole.open_oracle(layer_box(layer), width=16)
    plain = errors(keyhole.recover(box, MultiHead()), truth)
    recovery = keyhole.recover(box, MultiHead(), budget=5 * floor)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.paid <= 5 * floor
    assert recovery.ledger.by_purpose["refinement"] > 0
    worst, units = errors(recovery, truth)
    assert worst < 0.1 * plain[0]
    assert units < 3


@pytest.mark.parametrize("seed", [0, 1])
def test_float32_scalar_answers(seed: int) -> None:
    truth = attention(np.random.default_rng(seed), 6, heads=2)
    recovery = keyhole.recover(
        truth.astype(np.float32), MultiHead(), seed=seed, budget=4 * 2 * (36 + 6)
    )
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    worst, units = errors(recovery, truth)
    assert worst < 1e-5
    assert units < 3


def test_an_exact_box_spends_nothing_more() -> None:
    truth = attention(np.random.default_rng(2), 6, heads=2)
    free, bounded = (keyhole.recover(truth, MultiHead(), budget=b) for b in (None, 10_000))
    assert free.ledger.paid == bounded.ledger.paid


@pytest.mark.parametrize(("heads", "outputs"), [(1, 8), (2, 16)])
def test_a_float32_layer_without_biases(heads: int, outputs: int) -> None:
    truth = attention(np.random.default_rng(3), 8, heads=heads, outputs=outputs)
    recovery = keyhole.recover(truth.astype(np.float32), MultiHead(), budget=900)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.by_purpose["refinement"] > 0
    assert errors(recovery, truth)[1] < 3
