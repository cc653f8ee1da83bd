import numpy as np
import pytest

from keyhole.learners.mlp.relu_corrections import balanced_points, iterated, polished
from keyhole.models.relu_network import ReluNetwork
from networks import network


def slightly_off(net, size, seed=0):
    rng = np.random.default_rng(seed)
    rows = np.linalg.norm(net.weight, axis=1)
    unit = ReluNetwork(net.weight / rows[:, None], net.bias / rows, net.output * rows)
    return ReluNetwork(
        unit.weight + size * rng.standard_normal(unit.weight.shape),
        unit.bias + size * rng.standard_normal(unit.neurons),
        unit.output,
        size * rng.standard_normal(unit.width),
        size,
    )


@pytest.mark.parametrize("limit", [10**6, 0])
def test_polish_finds_the_network(monkeypatch, limit):
    monkeypatch.setattr("keyhole.learners.mlp.relu_corrections.DENSE_UNKNOWNS", limit)
    net = network(0, 6, 10)
    rng = np.random.default_rng(1)
    points = rng.standard_normal((200, 6))
    current = slightly_off(net, 1e-8)
    for _ in range(3):
        current = polished(current, points, net(points) - current(points))
    fresh = rng.standard_normal((500, 6))
    assert np.abs(current(fresh) - net(fresh)).max() < 1e-13


def test_mirrored_points_see_both_sides():
    net = ReluNetwork([[1.0, 0.0]], [-5.0], [1.0])
    points = balanced_points(net, np.random.default_rng(0).standard_normal((100, 2)), 10)
    assert (points @ net.weight[0] + net.bias[0] > 0).sum() >= 10


def test_iterated_solution_solves():
    rng = np.random.default_rng(0)
    on = np.concatenate([np.ones((80, 1)), rng.random((80, 4)) < 0.5], axis=1)
    flat = rng.standard_normal((80, 3))
    truth = rng.standard_normal((5, 3))
    values = np.einsum("nm,nd,md->n", on, flat, truth)
    first = iterated(on, flat, values).reshape(5, 3)
    assert first == pytest.approx(truth, abs=1e-4)
    left = values - np.einsum("nm,nd,md->n", on, flat, first)  # every solve takes six digits off
    assert first + iterated(on, flat, left).reshape(5, 3) == pytest.approx(truth, abs=1e-9)
