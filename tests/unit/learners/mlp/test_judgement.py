"""What rounding explains of a residual, and how a network is reported."""

import numpy as np
import pytest

import keyhole
from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF
from keyhole.learners.mlp.judgement import explained_residual, moved_back, with_sides
from keyhole.learners.mlp.options import MlpOptions
from keyhole.learners.mlp.refinement import RefinedNetwork
from keyhole.measurement.asker import Asker
from keyhole.models.mlp import Mlp, turned
from keyhole.network.weights import Weights
from keyhole.oracles.noise import NoiseModel
from networks import weights_and_points


@pytest.mark.parametrize("unit", [UNIT_ROUNDOFF, SINGLE_ROUNDOFF])
def test_terms_that_cancel_excuse_no_residual_of_few_digits(unit):
    weights, points, _ = weights_and_points(0)
    # two neurons that are nearly one, with large opposite outer weights: a wrong fit looks so
    inner = np.vstack([weights.inner[:1], weights.inner[:1] + 1e-4])
    outer = 1e4 * weights.outer[:, :1] * [1.0, -1.0]
    odd = Weights(inner, outer, weights.affine, "gelu")
    answers = odd(points)
    box = Asker(keyhole.open_oracle(lambda x: x, width=6, precision=NoiseModel(unit)))
    allowed = explained_residual(
        box, RefinedNetwork(odd, 0.0, 0.0, 0), points, answers, MlpOptions()
    )
    size = np.sqrt(np.mean(answers**2))
    if unit == SINGLE_ROUNDOFF:
        assert allowed < 40.0 * unit * size
    else:
        assert allowed > 1000.0 * unit * size


def test_a_network_is_moved_back_to_the_points_of_the_box():
    weights, points, rng = weights_and_points(1)
    centre, radius = rng.standard_normal(6), 3.0
    back = moved_back(weights, centre, radius)
    np.testing.assert_allclose(back(centre + radius * points), weights(points), atol=1e-12)


def test_a_linear_part_that_may_be_zero_decides_the_sides():
    rng = np.random.default_rng(2)
    rows, outer = rng.standard_normal((5, 6)), rng.standard_normal((4, 5))
    true = Mlp(rows, np.zeros(5), outer, activation="gelu")
    other = turned(true, np.array([True, False, True, False, False]))
    zeros = Mlp.from_arrays({name: 0 * part for name, part in other.to_arrays().items()})
    found, _, note = with_sides(other, zeros, MlpOptions().certain)
    assert not found.linear.any()
    assert "is zero" in note
