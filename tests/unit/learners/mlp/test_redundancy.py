import numpy as np
import pytest

from keyhole.learners.mlp.redundancy import (
    RedundancyOptions,
    fit_with_redundancy,
    repair,
    thin_out,
)
from keyhole.network.weights import Weights, chosen

UNIT = 2.0**-53


def teacher(rng, width=4, neurons=9, outputs=4, activation="gelu"):
    rows = rng.standard_normal((neurons, width))
    return Weights(
        np.column_stack([0.7 * rows, rng.standard_normal(neurons) / 2]),
        rng.standard_normal((outputs, neurons)),
        rng.standard_normal((outputs, width + 1)),
        activation,
    )


def cosines(found, truth):
    a, b = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (found, truth))
    return np.abs(a @ b.T).max(axis=0)


@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_redundant_neurons_find_the_network_and_its_activation(activation):
    rng = np.random.default_rng(0)
    truth = teacher(rng, activation=activation)
    points = rng.standard_normal((100, 4))
    names = ("gelu", "silu", "tanh")
    found = fit_with_redundancy(points, truth(points), 16, names, False, UNIT, rng)
    assert found.activation == activation
    assert found.neurons == 9
    assert cosines(found.inner, truth.inner).min() > 1 - 1e-9


def test_another_activation_is_not_explained():
    rng = np.random.default_rng(1)
    truth = teacher(rng)
    points = rng.standard_normal((100, 4))
    assert fit_with_redundancy(points, truth(points), 14, ["tanh"], False, UNIT, rng) is None


def test_a_network_without_one_of_its_neurons_is_repaired():
    rng = np.random.default_rng(2)
    truth = teacher(rng)
    points = rng.standard_normal((100, 4))
    found = repair(chosen(truth, np.arange(8)), points, truth(points), UNIT, rng)
    assert found is not None
    assert found.neurons == 9


def test_a_twin_leaves():
    rng = np.random.default_rng(3)
    truth = teacher(rng)
    points = rng.standard_normal((100, 4))
    answers = truth(points)
    twins = chosen(truth, np.array([0, 0, *range(1, 9)]))
    scale = float(np.sqrt(np.mean(answers**2)))
    found = thin_out(twins, points, answers, 1e-9 * scale, scale, RedundancyOptions())
    assert found is not None
    assert found.neurons == 9
