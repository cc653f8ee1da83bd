import numpy as np
import pytest

from keyhole.learners.block.box import Unclear
from keyhole.learners.block.direction_fit import (
    Data,
    Directed,
    DirectionOptions,
    balanced,
    find_network,
    fit_directions,
    join,
    lengths,
    merge_neurons,
    normal_equations,
    points_beside,
    points_wanted,
    prune_neurons,
    random_network,
    removal_costs,
    residual_of,
    split,
    with_one,
    without,
)

WIDTH = 5
START = np.eye(WIDTH, WIDTH + 1)


def secret(activation, neurons=4):
    rng = np.random.default_rng(3)
    rows = np.column_stack([rng.standard_normal((neurons, WIDTH)), 0.3 * np.ones(neurons)])
    affine = np.column_stack([np.eye(WIDTH), 0.2 * rng.standard_normal(WIDTH)])
    return Directed(affine, 0.6 * rng.standard_normal((WIDTH, neurons)), rows, activation)


class Sphere:
    """Directions of a network at random points of a sphere, exactly."""

    def __init__(self, net):
        self.net, self.rng = net, np.random.default_rng(1)
        self.points = np.zeros((0, WIDTH))

    def grow(self, count):
        more = self.rng.standard_normal((max(0, count - len(self.points)), WIDTH))
        self.points = np.concatenate([self.points, 2.0 * more / lengths(more)])

    def grow_beside(self, net):
        more = points_beside(net, self.points, 2.0, self.rng)
        self.points = np.concatenate([self.points, more])

    def read(self, known):
        z = self.net(self.points)
        return self.points, z / lengths(z)


def data_of(net, count=60):
    sphere = Sphere(net)
    sphere.grow(count)
    points, seen = sphere.read(None)
    return Data(with_one(points), seen)


def planes(net):
    return net.rows / lengths(net.rows)


def test_the_normal_equations_are_those_of_the_residuals():
    net = random_network(START, 3, "gelu", np.random.default_rng(0))
    data = data_of(secret("gelu"), 20)
    place, step = join(net), 1e-6
    columns = []
    for k in range(len(place)):
        sides = [
            residual_of(split(place + way * step * np.eye(len(place))[k], net), data)[1]
            for way in (1.0, -1.0)
        ]
        columns.append((sides[0] - sides[1]).ravel() / (2.0 * step))
    table = np.array(columns).T
    normal, gradient = normal_equations(net, data)
    assert np.allclose(normal, table.T @ table, atol=1e-7)
    assert np.allclose(gradient, table.T @ residual_of(net, data)[1].ravel(), atol=1e-7)


def test_slopes_are_derivatives():
    net, point = secret("silu"), np.array([[0.3, -0.2, 0.5, 1.0, -0.4]])
    step = 1e-6
    seen = [(net(point + step * e) - net(point - step * e))[0] / (2 * step) for e in np.eye(WIDTH)]
    assert np.allclose(net.slopes(point)[0], np.array(seen).T, atol=1e-8)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_a_network_from_directions_alone(activation):
    truth = secret(activation)
    net = find_network(Sphere(truth), START, (activation,), 1e-9, np.random.default_rng(0))
    assert net.neurons == truth.neurons
    assert np.abs(planes(truth) @ planes(net).T).max(axis=1).min() > 1.0 - 1e-9


def test_what_is_no_network_of_this_kind_is_told():
    class Other(Sphere):
        def read(self, known):
            seen = np.sin(3.0 * self.points)
            return self.points, seen / lengths(seen)

    options = DirectionOptions(starts=1, growth=20.0, steps=15)
    rng = np.random.default_rng(0)
    with pytest.raises(Unclear, match="no network explains"):
        find_network(Other(secret("gelu")), START, ("gelu",), 1e-9, rng, options)


@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
def test_neurons_on_one_hyperplane_become_one(activation):
    truth, points = secret(activation), np.random.default_rng(2).standard_normal((9, WIDTH))
    twice = Directed(
        truth.affine,
        np.column_stack([0.3 * truth.outer, 0.7 * truth.outer, truth.outer[:, :1]]),
        np.concatenate([truth.rows, truth.rows, -truth.rows[:1]]),
        activation,
    )
    merged = merge_neurons(twice)
    assert merged.neurons == truth.neurons
    constant = merged(points) - twice(points)
    assert np.allclose(constant, constant[0], atol=1e-12)


def test_needless_neurons_go():
    truth = secret("gelu")
    more = random_network(START, 1, "gelu", np.random.default_rng(5))
    wide = Directed(
        truth.affine,
        np.column_stack([truth.outer, 1e-3 * more.outer]),
        np.concatenate([truth.rows, more.rows]),
        "gelu",
    )
    data = data_of(truth, 80)
    near, _ = fit_directions(wide, data, 30)
    costs = removal_costs(near, data)
    assert costs[-1] < 1e-6 * costs[:-1].min()
    found, rest = prune_neurons(near, data, 1e-9)
    assert found.neurons == truth.neurons
    assert rest < 1e-8


def test_points_beside_rare_neurons_lie_on_their_rare_side():
    net = Directed(np.eye(WIDTH, WIDTH + 1), np.ones((WIDTH, 2)),
                   np.array([[1.0, 0, 0, 0, 0, -1.8], [0, 1.0, 0, 0, 0, -5.0]]), "relu")  # fmt: skip
    points = np.random.default_rng(0).standard_normal((40, WIDTH))
    points *= 2.0 / lengths(points)
    more = points_beside(net, points, 2.0, np.random.default_rng(1))
    assert len(more) >= 8
    assert (more[:, 0] > 1.8).all()
    assert np.allclose(lengths(more), 2.0)


def test_balanced_networks_have_the_same_directions():
    net = secret("relu")
    points = np.random.default_rng(0).standard_normal((6, WIDTH))
    z, other = net(points), balanced(net)(points)
    assert np.allclose(z / lengths(z), other / lengths(other))
    assert points_wanted(7, 7, 8) == int(1.7 * (7 * 16 + 8 * 8) / 6) + 4


def test_what_taking_out_a_relu_costs():
    rng = np.random.default_rng(0)
    affine, outer = np.eye(6, 6), 0.3 * rng.standard_normal((6, 4))
    net = Directed(affine, outer * [1.0, 1.0, 0.02, 1.0], rng.standard_normal((4, 6)), "relu")
    points = rng.standard_normal((200, 5))
    seen = net(points)
    data = Data(with_one(points), seen / np.linalg.norm(seen, axis=1, keepdims=True))
    costs = removal_costs(net, data)
    assert np.argmin(costs) == 2
    fewer = without(net, np.array([2]))
    left = fit_directions(fewer, data, 40)[1] ** 2 * data.seen.size
    assert 0.5 < costs[2] / left < 2.0
