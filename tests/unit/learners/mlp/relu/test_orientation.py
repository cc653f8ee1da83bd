import numpy as np
import pytest

from keyhole.learners.mlp.relu.orientation import orient_neurons, turn_neurons
from keyhole.models.relu_network import ReluNetwork
from networks import network


def hidden_sides(net, seed=0):
    return turn_neurons(net, np.random.default_rng(seed).random(net.neurons) < 0.5)


@pytest.mark.parametrize(
    ("width", "neurons", "outputs", "method"),
    [
        (8, 8, None, "linear"),
        (6, 20, 4, "linear"),
        (16, 32, None, "branch"),
        (8, 24, None, "branch"),
    ],
)
def test_sides_are_decided_and_certified(width, neurons, outputs, method):
    net = network(0, width, neurons, outputs)
    found = orient_neurons(hidden_sides(net), 1e-12)
    assert found.certified
    assert found.method.startswith(method)
    assert not found.network.skip.any()
    assert found.network.weight == pytest.approx(net.weight, abs=1e-12)


def test_leaky_neurons_are_recognised():
    net, leak = network(0, 8, 6), 0.1
    leaky = ReluNetwork(
        net.weight,
        net.bias,
        (1 - leak) * net.output,
        leak * net.weight.T @ net.output,
        leak * net.bias @ net.output,
    )
    found = orient_neurons(hidden_sides(leaky), 1e-12)
    assert found.leak == pytest.approx(leak)


def test_a_true_skip_is_not_explained_away():
    net = network(0, 8, 6)
    with_skip = ReluNetwork(net.weight, net.bias, net.output, np.ones(8))
    found = orient_neurons(hidden_sides(with_skip), 1e-12)
    assert not found.certified
    points = np.random.default_rng(0).standard_normal((20, 8))
    assert found.network(points) == pytest.approx(with_skip(points), abs=1e-12)


def test_coarse_parameters_decide_nothing():
    net = hidden_sides(network(0, 2, 30))
    assert not orient_neurons(net, 1e-2).certified
