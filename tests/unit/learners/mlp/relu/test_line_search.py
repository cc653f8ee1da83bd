import numpy as np
import pytest

from keyhole.learners.mlp.relu.line_search import (
    FAR,
    AffinePiece,
    LineEvidence,
    NotPiecewiseAffine,
    find_crossing,
    is_generic,
    search_line,
)
from networks import network


def along(function, width, seed=0, start=0.0):
    rng = np.random.default_rng(seed)
    origin, direction = rng.standard_normal((2, width))
    asked = []

    def ask(times):
        asked.append(len(times))
        return function(origin + times[:, None] * direction).reshape(len(times), -1)

    return origin, direction, ask, asked


def true_breakpoints(net, origin, direction):
    return np.sort(-(net.weight @ origin + net.bias) / (net.weight @ direction))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("outputs", [None, 2, 16])
def test_every_breakpoint_is_found(seed, outputs):
    net = network(seed, 8, 40, outputs)
    origin, direction, ask, asked = along(net, 8, seed)
    line = search_line(ask, 2.0**-52, 0.0, (-FAR, FAR))
    breakpoints = true_breakpoints(net, origin, direction)
    assert len(line.breakpoints) == 40
    assert np.max(np.abs(line.breakpoints - breakpoints) / (1 + np.abs(breakpoints))) < 1e-6
    assert sum(asked) <= (5.6 if outputs != 16 else 3.2) * 40 + 7
    assert len(asked) <= 40


def test_jumps_and_slopes_are_those_of_the_network():
    net = network(3, 6, 12)
    origin, direction, ask, _ = along(net, 6)
    line = search_line(ask, 2.0**-52, 0.0, (-FAR, FAR))
    gain = net.weight @ direction
    order = np.argsort(-(net.weight @ origin + net.bias) / gain)
    jumps = (net.output * np.abs(gain))[order]
    assert line.jumps[:, 0] == pytest.approx(jumps, abs=1e-8)


def test_two_breakpoints_of_opposite_sign_close_together():
    def bump(points):
        t = points[:, 0]
        return np.maximum(t - 0.5, 0) - 0.9 * np.maximum(t - 0.5001, 0)

    line = search_line(lambda t: bump(t[:, None])[:, None], 2.0**-52, 0.0, (-FAR, FAR))
    assert line.breakpoints == pytest.approx([0.5, 0.5001], abs=1e-9)


def test_a_breakpoint_beyond_the_near_end():
    line = search_line(lambda t: np.maximum(t - 5e4, 0)[:, None], 2.0**-52, 0.0, (-FAR, FAR))
    assert line.breakpoints == pytest.approx([5e4], rel=1e-9)


def test_a_straight_line_costs_seven_answers():
    asked = []

    def ask(t):
        asked.append(len(t))
        return (3 * t - 1)[:, None]

    assert len(search_line(ask, 2.0**-52, 0.0, (-FAR, FAR)).breakpoints) == 0
    assert sum(asked) == 7


@pytest.mark.parametrize("bent", [np.tanh, np.sin, lambda t: np.logaddexp(0, 30 * t)])
def test_smooth_answers_are_refused(bent):
    with pytest.raises(NotPiecewiseAffine, match="bend everywhere") as caught:
        search_line(lambda t: bent(t)[:, None], 2.0**-52, 0.0, (-FAR, FAR))
    assert not np.allclose(caught.value.value, caught.value.expected, rtol=0, atol=1e-12)


def test_a_jump_is_refused():
    with pytest.raises(NotPiecewiseAffine, match="jump"):
        search_line(lambda t: (t + 0.1 * (t > 0.3))[:, None], 2.0**-52, 0.0, (-FAR, FAR))


def test_noise_beyond_rounding_is_noticed():
    rng = np.random.default_rng(0)
    net = network(0, 8, 8)
    _, _, ask, _ = along(net, 8)
    noisy = lambda t: ask(t) + 1e-12 * rng.standard_normal((len(t), 1))  # noqa: E731
    line = search_line(noisy, 2.0**-52, 0.0, (-FAR, FAR))
    assert len(line.breakpoints) == 8
    assert 1e-13 < line.unit < 1e-11


# -- what two pieces prove --

EXACT = LineEvidence(1e-16)


def bend_at(breakpoints: list[float], seed: int = 0):
    """A line of vectors that bends at these times, by random jumps."""
    rng = np.random.default_rng(seed)
    start, slope = rng.standard_normal((2, 5))
    jumps = rng.standard_normal((len(breakpoints), 5))
    return lambda t: start + slope * t + np.maximum(t - np.array(breakpoints), 0.0) @ jumps


def piece(line, *times: float) -> AffinePiece:
    return AffinePiece(list(times), [line(t) for t in times])


def test_lines_that_meet_prove_proves_one() -> None:
    line = bend_at([0.3])
    left, right = piece(line, -1.0, -0.9), piece(line, 0.9, 1.0)
    t = find_crossing(left, right)
    assert t is not None
    assert abs(t - 0.3) < 1e-12
    assert EXACT.meet(left, right, t)
    assert EXACT.proves_one(left, right, t)
    assert not EXACT.agree(left, right)
    assert not LineEvidence(1e-6).proves_one(left, right, t)  # so few digits prove nothing


def test_two_breakpoints_do_not_meet_and_one_answer_between_fixes_both() -> None:
    line = bend_at([-0.2, 0.4])
    left, right = piece(line, -1.0, -0.9), piece(line, 0.9, 1.0)
    t = find_crossing(left, right)
    assert t is not None
    assert not EXACT.meet(left, right, t)
    between = EXACT.proves_two(left, right, 0.1, line(0.1))
    assert between is not None
    np.testing.assert_allclose(between.slope, (line(0.2) - line(0.0)) / 0.2, atol=1e-12)


def test_three_breakpoints_are_not_taken_for_two() -> None:
    line = bend_at([-0.3, 0.0, 0.4])
    left, right = piece(line, -1.0, -0.9), piece(line, 0.9, 1.0)
    assert EXACT.proves_two(left, right, 0.1, line(0.1)) is None


def test_a_step_is_a_jump_and_a_breakpoint_is_none() -> None:
    for height, expected in ((0.0, None), (1e-3, 1e-3)):
        line = bend_at([0.0])
        left, right = piece(line, -1.0, -1e-12), piece(line, 1e-12, 1.0)
        right.values = [value + height * np.eye(5)[0] for value in right.values]
        seen = EXACT.find_jump(left, right)
        assert seen is None if expected is None else abs(seen - expected) < 1e-9


def test_jumps_in_a_plane_are_not_is_generic() -> None:
    line = bend_at([-0.7, -0.4, 0.3, 0.6])
    pieces = [piece(line, t, t + 0.1) for t in (-1.0, 0.0, 1.0)]
    assert is_generic(pieces)
    flat = [AffinePiece(p.times, [value * [1, 1, 0, 0, 0] for value in p.values]) for p in pieces]
    assert not is_generic(flat)
