"""Tables that are lines are told from others."""

import numpy as np

from keyhole.learners.positions.additive import Additive, learn_additive
from keyhole.learners.positions.values import ValueMaps, measure_value_maps
from keyhole.measurement.asker import Asker
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from placed_layers import placed_layer


def test_slopes_of_lines() -> None:
    scores = np.zeros((2, 3, 4))
    lines = Additive(scores, np.outer([-0.5, -0.25], np.arange(6.0)), 1e-12)
    assert lines.slopes is not None
    assert np.allclose(lines.slopes, [0.5, 0.25])
    assert Additive(scores, np.array([[0.0, 1, 1, 2], [0, 1, 2, 3]]), 1e-12).slopes is None


def test_scores_and_table() -> None:
    truth = placed_layer("bias by distance", 8, 2, 7)
    ask, rng = Asker(FunctionOracle(truth, Spec(8))), np.random.default_rng(0)
    values = measure_value_maps(ask, rng, None)
    assert isinstance(values, ValueMaps)
    found = learn_additive(ask, rng, values, None)
    assert isinstance(found, Additive)
    assert truth.position is not None
    assert truth.position.bias is not None
    for h, head in enumerate(truth.heads):
        own = int(np.argmin([np.linalg.norm(m - head.value) for m in values.maps]))
        assert np.allclose(found.scores[own][:, :-1], head.score, atol=1e-8)
        assert np.allclose(found.scores[own][:, -1], head.key_bias, atol=1e-8)
        true = truth.position.bias[h]
        assert np.allclose(found.table[own][: len(true)], true, atol=1e-7)
        assert np.allclose(found.table[own][len(true) :], true[-1], atol=1e-7)
