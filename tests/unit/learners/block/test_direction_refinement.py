import numpy as np
import pytest

from keyhole.learners.block.direction_fit import Data, Directed, residual_of, with_one
from keyhole.learners.block.direction_refinement import (
    DirectionModel,
    join,
    refine_directions,
    split,
)


def network(rng, activation, width=6, neurons=9):
    return Directed(
        np.column_stack([np.eye(width), 0.3 * rng.standard_normal(width)]),
        rng.standard_normal((width, neurons)) / 3.0,
        rng.standard_normal((neurons, width + 1)),
        activation,
    )


def data_of(net, rng, count=120):
    points = rng.standard_normal((count, net.affine.shape[1] - 1))
    z = net(points)
    return Data(with_one(points), z / np.linalg.norm(z, axis=1, keepdims=True))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_products_are_those_of_the_derivative(activation):
    rng = np.random.default_rng(0)
    net = network(rng, activation)
    model, point = DirectionModel(net, data_of(network(rng, activation), rng)), join(net)
    assert np.array_equal(join(split(point, net)), point)
    at, step = model.linearize(point), rng.standard_normal(len(point))
    vector, h = rng.standard_normal(len(at.residual)), 1e-7
    slope = (model.residual(point + h * step) - model.residual(point - h * step)) / (2 * h)
    assert np.linalg.norm(at.jvp(step) - slope) < 1e-5 * np.linalg.norm(slope)
    assert np.isclose(vector @ at.jvp(step), at.vjp(vector) @ step)
    z = rng.standard_normal(len(point))
    assert np.isclose(at.scaling.apply(z) @ step, z @ at.scaling.adjoint(step))


def test_the_columns_of_one_neuron_are_orthonormal_in_its_units():
    rng = np.random.default_rng(1)
    net = network(rng, "gelu")
    at = DirectionModel(net, data_of(net, rng)).linearize(join(net))
    columns = np.array([at.jvp(at.scaling.apply(one)) for one in np.eye(at.unknowns)[-13:]])
    assert np.allclose(columns @ columns.T, np.eye(13), atol=1e-6)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_network_of_a_few_digits_becomes_exact(activation):
    rng = np.random.default_rng(2)
    truth = network(rng, activation)
    data = data_of(truth, rng)
    near = split(join(truth) * (1.0 + 1e-4 * rng.standard_normal(join(truth).size)), truth)
    found, rest = refine_directions(near, data, steps=6)
    assert residual_of(near, data)[0] > 1e-5
    assert rest < 1e-11
    fresh = rng.standard_normal((50, 6))
    one, other = (
        z / np.linalg.norm(z, axis=1, keepdims=True) for z in (truth(fresh), found(fresh))
    )
    assert np.abs(one - other).max() < 1e-9
