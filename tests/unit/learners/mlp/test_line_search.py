import numpy as np
import pytest

from keyhole.learners.mlp.line_search import FAR, trace
from keyhole.learners.mlp.pieces import NotPiecewiseAffine
from networks import network


def along(function, width, seed=0, start=0.0):
    rng = np.random.default_rng(seed)
    origin, direction = rng.standard_normal((2, width))
    asked = []

    def ask(times):
        asked.append(len(times))
        return function(origin + times[:, None] * direction).reshape(len(times), -1)

    return origin, direction, ask, asked


def true_kinks(net, origin, direction):
    return np.sort(-(net.weight @ origin + net.bias) / (net.weight @ direction))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("outputs", [None, 2, 16])
def test_every_kink_is_found(seed, outputs):
    net = network(seed, 8, 40, outputs)
    origin, direction, ask, asked = along(net, 8, seed)
    line = trace(ask, 2.0**-52, 0.0, (-FAR, FAR))
    kinks = true_kinks(net, origin, direction)
    assert len(line.kinks) == 40
    assert np.max(np.abs(line.kinks - kinks) / (1 + np.abs(kinks))) < 1e-6
    assert sum(asked) <= (5.6 if outputs != 16 else 3.2) * 40 + 7
    assert len(asked) <= 40


def test_jumps_and_slopes_are_those_of_the_network():
    net = network(3, 6, 12)
    origin, direction, ask, _ = along(net, 6)
    line = trace(ask, 2.0**-52, 0.0, (-FAR, FAR))
    gain = net.weight @ direction
    order = np.argsort(-(net.weight @ origin + net.bias) / gain)
    jumps = (net.output * np.abs(gain))[order]
    assert line.jumps[:, 0] == pytest.approx(jumps, abs=1e-8)


def test_two_kinks_of_opposite_sign_close_together():
    def bump(points):
        t = points[:, 0]
        return np.maximum(t - 0.5, 0) - 0.9 * np.maximum(t - 0.5001, 0)

    line = trace(lambda t: bump(t[:, None])[:, None], 2.0**-52, 0.0, (-FAR, FAR))
    assert line.kinks == pytest.approx([0.5, 0.5001], abs=1e-9)


def test_a_kink_beyond_the_near_end():
    line = trace(lambda t: np.maximum(t - 5e4, 0)[:, None], 2.0**-52, 0.0, (-FAR, FAR))
    assert line.kinks == pytest.approx([5e4], rel=1e-9)


def test_a_straight_line_costs_seven_answers():
    asked = []

    def ask(t):
        asked.append(len(t))
        return (3 * t - 1)[:, None]

    assert len(trace(ask, 2.0**-52, 0.0, (-FAR, FAR)).kinks) == 0
    assert sum(asked) == 7


@pytest.mark.parametrize("bent", [np.tanh, np.sin, lambda t: np.logaddexp(0, 30 * t)])
def test_smooth_answers_are_refused(bent):
    with pytest.raises(NotPiecewiseAffine, match="bend everywhere") as caught:
        trace(lambda t: bent(t)[:, None], 2.0**-52, 0.0, (-FAR, FAR))
    assert not np.allclose(caught.value.value, caught.value.expected, rtol=0, atol=1e-12)


def test_a_jump_is_refused():
    with pytest.raises(NotPiecewiseAffine, match="jump"):
        trace(lambda t: (t + 0.1 * (t > 0.3))[:, None], 2.0**-52, 0.0, (-FAR, FAR))


def test_noise_beyond_rounding_is_noticed():
    rng = np.random.default_rng(0)
    net = network(0, 8, 8)
    _, _, ask, _ = along(net, 8)
    noisy = lambda t: ask(t) + 1e-12 * rng.standard_normal((len(t), 1))  # noqa: E731
    line = trace(noisy, 2.0**-52, 0.0, (-FAR, FAR))
    assert len(line.kinks) == 8
    assert 1e-13 < line.unit < 1e-11
