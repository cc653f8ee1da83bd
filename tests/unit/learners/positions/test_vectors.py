"""Vectors of places behind value maps that are known."""

import numpy as np

from keyhole.learners.base import Inconclusive
from keyhole.learners.positions.values import ValueMaps, measure_value_maps
from keyhole.learners.positions.vectors import find_takers, measure_vectors
from keyhole.measurement.asker import Asker
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from placed_layers import placed_layer


def test_one_vector_per_place() -> None:
    truth = placed_layer("position vectors", 8, 2, 2)
    ask, rng = Asker(FunctionOracle(truth, Spec(8))), np.random.default_rng(1)
    values = measure_value_maps(ask, rng, 24, 30.0)
    assert isinstance(values, ValueMaps)
    found = measure_vectors(ask, values, 24)
    assert not isinstance(found, Inconclusive)
    assert truth.position is not None
    assert truth.position.vectors is not None
    true = truth.position.vectors - truth.position.vectors[0]
    vectors, (told,) = found
    assert np.abs(vectors - true).max() < 1e-7
    assert told.tokens.shape == (24, 1, 8)
    assert (told.lasts == np.arange(1, 24)).all()
    assert (
        np.abs(
            told.answers - values.offset - (told.tokens[:, 0] + vectors[1:]) @ values.total
        ).max()
        < 1e-6
    )


def test_heads_that_take_the_token_are_named() -> None:
    outs = (np.eye(4)[:2], np.eye(4)[2:])
    ins = (np.ones((3, 2)), np.ones((3, 2)))
    values = ValueMaps(np.zeros(4), ins, outs, 1e-16, 1e-16, np.zeros((2, 3)), np.zeros(3))
    silent = 1e5 * np.ones(3)
    assert find_takers(values, np.array([[3e5, 3e5, 0.1, 0.2]]), silent).tolist() == [True, False]
