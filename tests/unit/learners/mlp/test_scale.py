import numpy as np
import pytest

from keyhole.learners.mlp.scale import find_scale, widened
from keyhole.models.mlp import Mlp


def found_size(activation, seed, largest=np.inf, bias=0.2):
    """Sizes before and after, for a network whose arguments have the size of the inputs."""
    rng = np.random.default_rng(seed)
    secret = Mlp(
        rng.standard_normal((64, 16)) / 4.0,
        bias * rng.standard_normal(64),
        rng.standard_normal((16, 64)) / 8.0,
        activation=activation,
    )

    def ask(points, purpose):
        assert purpose == "scale"
        assert np.linalg.norm(points, axis=1).max() <= largest
        return secret(points[:, None])

    size = find_scale(ask, 16, 2.0**-53, rng, largest).size
    return size, widened(ask, 16, size, rng, largest)


@pytest.mark.parametrize("seed", range(4))
def test_an_odd_function_is_looked_at_where_it_bends(seed):
    """Around zero its second differences nearly cancel: what they differ by looks large beside
    them at sizes that are far too small."""
    before, after = found_size("tanh", seed)
    assert before < 0.4
    assert 0.4 < after < 3.0


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_a_size_that_shows_the_bends_stays(activation):
    before, after = found_size(activation, 0, bias=0.5)
    assert before <= after <= 4.0 * before
    assert 0.5 < after < 6.0


def test_the_domain_is_not_left():
    _, after = found_size("tanh", 0, largest=1.0)
    assert after <= 0.25


@pytest.mark.parametrize(("activation", "smooth"), [("gelu", True), ("relu", False)])
def test_few_digits_hide_small_bends_and_not_that_they_are_smooth(activation, smooth):
    rng = np.random.default_rng(0)
    rows, bias, outer = rng.standard_normal((10, 10)), rng.standard_normal(10) / 2, np.ones((1, 10))
    secret = Mlp(rows / 10**0.5, bias, outer, activation=activation).astype(np.float32)

    def ask(points, purpose):
        return np.asarray(secret(points[:, None].astype(np.float32)), np.float64)

    for seed in range(4):
        scale = find_scale(ask, 10, 2.0**-24, np.random.default_rng(seed))
        assert scale.smooth is smooth
        assert not scale.affine
