import numpy as np
import pytest

from keyhole.learners.mlp.redundancy import (
    costs_of_leaving,
    fit_with_redundancy,
    random_start,
    without_cheap,
)
from keyhole.learners.mlp.refinement import Weights, chosen

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
    starts = [random_start(16, points, 4, name, False, rng) for name in names]
    found = fit_with_redundancy(points, truth(points), starts, UNIT)
    assert found.activation == activation
    assert found.neurons == 9
    assert cosines(found.inner, truth.inner).min() > 1 - 1e-9


def test_another_activation_is_not_explained():
    rng = np.random.default_rng(1)
    truth = teacher(rng)
    points = rng.standard_normal((100, 4))
    starts = [random_start(14, points, 4, "tanh", False, rng)]
    assert fit_with_redundancy(points, truth(points), starts, UNIT) is None


def test_leaving_costs_what_least_squares_says():
    rng = np.random.default_rng(2)
    truth = teacher(rng)
    points = rng.standard_normal((60, 4))
    answers = truth(points)
    costs, left = costs_of_leaving(truth, points, answers)
    assert left < 1e-20
    _, alone = costs_of_leaving(chosen(truth, np.arange(1, 9)), points, answers)
    assert alone == pytest.approx(costs[0], rel=1e-6)


def test_a_twin_is_spared():
    rng = np.random.default_rng(3)
    truth = teacher(rng)
    points = rng.standard_normal((60, 4))
    twins = chosen(truth, np.array([0, 0, *range(1, 9)]))
    assert without_cheap(twins, points, truth(points), 1e-6).neurons == 9
