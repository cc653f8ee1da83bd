import numpy as np
import pytest

from keyhole.learners.mlp.far_field import FAR, Unresolved, fit_scales, read_far_field
from keyhole.learners.mlp.scale import find_scale
from keyhole.models.mlp import Mlp


def network(rng, width=5, neurons=15, outputs=5, activation="gelu", scale=1.0):
    return Mlp(
        scale * rng.standard_normal((neurons, width)) / width**0.5,
        rng.standard_normal(neurons) / 2,
        rng.standard_normal((outputs, neurons)),
        activation=activation,
        linear=scale * rng.standard_normal((outputs, width)),
        offset=rng.standard_normal(outputs),
    )


@pytest.mark.parametrize("outputs", [1, 2, 5])
def test_every_neuron_is_met_on_one_path(outputs):
    rng = np.random.default_rng(0)
    truth = network(rng, outputs=outputs)
    far = read_far_field(lambda x, _: truth(x), 5, FAR * 60, 1.0, 2.0**-53, rng)
    directions = far.direction / np.linalg.norm(far.direction, axis=1, keepdims=True)
    rows = truth.inner / np.linalg.norm(truth.inner, axis=1, keepdims=True)
    cosines = np.abs(directions @ rows.T)
    assert len(directions) == 15
    assert sorted(cosines.argmax(axis=1)) == list(range(15))
    assert (1 - cosines.max(axis=1)).max() < 1e-9


@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_tanh"])
def test_answers_near_zero_tell_activation_and_scales(activation):
    rng = np.random.default_rng(1)
    truth = network(rng, activation=activation)
    far = read_far_field(lambda x, _: truth(x), 5, FAR * 60, 1.0, 2.0**-53, rng)
    points = rng.standard_normal((60, 5))
    weights, left = fit_scales(far, points, truth(points), ["gelu", "silu", "gelu_tanh"], 1.0)
    assert weights.activation == activation
    assert left < 1e-6
    fresh = rng.standard_normal((20, 5))
    assert np.abs(weights(fresh) - truth(fresh)).max() < 1e-6


def test_a_flat_function_is_not_read():
    with pytest.raises(Unresolved):
        read_far_field(
            lambda x, _: np.tanh(x @ np.ones((4, 4))), 4, 1e7, 1.0, 2.0**-53,
            np.random.default_rng(0),
        )  # fmt: skip


@pytest.mark.parametrize("decade", [-6, -3, 0, 3, 6])
def test_the_scale_is_found_over_decades(decade):
    rng = np.random.default_rng(2)
    truth = network(rng, scale=10.0**decade)
    found = find_scale(lambda x, _: truth(x), 5, 2.0**-53, rng)
    assert found.smooth
    assert not found.affine
    assert 1 / 30 < found.size * 10.0**decade < 30


def test_piecewise_linear_and_affine_are_told():
    rng = np.random.default_rng(3)
    bent = network(rng, activation="relu")
    assert not find_scale(lambda x, _: bent(x), 5, 2.0**-53, rng).smooth
    straight = rng.standard_normal((5, 5))
    assert find_scale(lambda x, _: x @ straight, 5, 2.0**-53, rng).affine


def test_a_corner_of_the_path_near_a_plane_costs_no_digits():
    width, radius = 12, FAR * 48 * 6**0.5
    corner, other = np.linalg.qr(np.random.default_rng(6).standard_normal((width, 2)))[0].T
    truth = network(np.random.default_rng(3), width, 24, width)
    rows = truth.inner.copy()
    rows[0] -= (rows[0] @ corner + 1e-5 * rows[0] @ other) * corner  # met 1e-5 after the corner
    truth = Mlp(rows, truth.inner_bias, truth.outer, linear=truth.linear, offset=truth.offset)
    rng = np.random.default_rng(6)
    far = read_far_field(lambda x, _: truth(x), width, radius, 1.0, 2.0**-53, rng)
    lengths = np.linalg.norm(far.direction, axis=1)
    found = np.column_stack([far.direction, far.bias]) / lengths[:, None]
    planes = np.column_stack([rows, truth.inner_bias]) / np.linalg.norm(rows, axis=1)[:, None]
    gaps = np.minimum(*(np.abs(found[:, None] - side * planes).max(axis=2) for side in (1, -1)))
    assert gaps.min(axis=0).max() < 0.02
