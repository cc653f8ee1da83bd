import numpy as np
import pytest

from keyhole.learners.block.box import Unclear, open_block
from keyhole.learners.block.pre_norm_attention import (
    Ball,
    Line,
    Lines,
    ask_pre_norm_attention,
    ask_sizes,
    count_heads,
    label_heads,
    line_points,
    line_rank,
    read_line,
    separate_heads,
    solve_pre_norm_attention,
    solve_sizes,
    split_maps,
    value_errors,
    weigh_values,
)
from keyhole.models.canonical import distance
from keyhole.models.norm import Norm, kept_plane
from keyhole.models.random import block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle

UNIT = 2.0**-53


def box_of(secret):
    return open_block(FunctionOracle(secret, Spec(secret.width)))


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_every_point_of_the_ball_has_a_token(kind):
    ball = Ball(kept_plane(6, kind), 1e-4, kind)
    points = np.random.default_rng(0).standard_normal((5, ball.plane.shape[1]))
    points *= 0.9 * ball.radius / np.linalg.norm(points, axis=1).max()
    tokens = ball.tokens(points)
    assert np.allclose(ball.points(tokens), points, atol=1e-13)
    assert np.allclose(Norm(np.ones(6), None, 1e-4, kind)(tokens) @ ball.plane, points, atol=1e-13)


@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-12])
def test_kind_epsilon_and_offset(kind, epsilon):
    secret = block(np.random.default_rng(3), 8, heads=2, norm="pre", kind=kind, epsilon=epsilon)
    found = solve_sizes(ask_sizes(box_of(secret), np.random.default_rng(0)), UNIT)
    assert found[0] == pytest.approx(epsilon, rel=1e-8)
    assert found[1] == kind
    assert np.allclose(found[2], secret(np.zeros((1, 1, 8)))[0], atol=1e-14)


def test_without_epsilon_zero_has_no_answer():
    secret = block(np.random.default_rng(3), 8, heads=2, norm="pre", epsilon=0.0)
    with pytest.raises(Unclear, match="epsilon"):
        ask_sizes(box_of(secret), np.random.default_rng(0))


def line_of(rates, values, direction, count=11, seed=0):
    rng = np.random.default_rng(seed)
    steps = np.array([3.0, -3.0]) * rng.uniform(0.6, 1.0, (count, 2))
    empty = Line(direction, steps, rng.integers(1, 9, (count, 2)), np.zeros((count, 7)))
    return Line(direction, steps, empty.copies, empty.shapes(np.array(rates)) @ values)


def test_heads_are_separated_on_a_line():
    rng = np.random.default_rng(1)
    rates, values = [-0.7, 0.2, 0.9], rng.standard_normal((3, 7))
    line, alone = line_of(rates, values, np.ones(5)), np.zeros(7)
    assert count_heads(line, alone, UNIT) == 3
    found, maps, rest = separate_heads(line, alone, 3)
    assert rest < 1e-13
    assert np.allclose(found, rates, atol=1e-9)
    assert np.allclose(maps, values, atol=1e-8)


def test_two_heads_at_almost_one_rate():
    rng = np.random.default_rng(1)
    rates, values = [-0.7, 0.2, 0.205], rng.standard_normal((3, 7))
    read = read_line(line_of(rates, values, np.ones(5)), np.zeros(7), 3, UNIT)
    assert read is not None
    assert np.allclose(read[0], rates, atol=1e-6)


def test_too_few_heads_do_not_explain_a_line():
    rng = np.random.default_rng(1)
    line = line_of([-0.7, 0.2, 0.9], rng.standard_normal((3, 7)), np.ones(5))
    assert read_line(line, np.zeros(7), 2, UNIT) is None


def test_maps_from_ranges_and_their_sum():
    rng = np.random.default_rng(2)
    maps = rng.standard_normal((2, 7, 3)) @ rng.standard_normal((2, 3, 5))
    keys = rng.standard_normal((2, 5)) / 3.0
    first = rng.standard_normal(5)
    lines = []
    for k in range(5):
        v = first + (0.3 * rng.standard_normal(5) if k else 0.0)
        lines.append(line_of(keys @ v, maps @ v, v, seed=k))
    found = split_maps(Lines(np.zeros(5), 2, tuple(lines)), np.zeros(7), maps.sum(axis=0), UNIT)
    order = np.argsort(keys @ first)
    assert np.allclose(found, maps[order], atol=1e-7)


def test_ranks_in_units_of_the_errors():
    rng = np.random.default_rng(0)
    flat = rng.standard_normal((5, 2)) @ rng.standard_normal((2, 7))
    assert line_rank(1e6 * flat + rng.standard_normal((5, 7))) == 2
    assert line_rank(1e6 * rng.standard_normal((3, 7))) == 3


def test_heads_at_almost_one_rate_are_known_less():
    rng = np.random.default_rng(1)
    values = rng.standard_normal((2, 7))
    errors = []
    for rates in ([-1.0, 1.0], [0.99, 1.0]):
        line = line_of(np.array(rates), values, np.ones(5))
        errors.append(value_errors(line, np.array(rates), 1e-7))
    assert (errors[1] > 30.0 * errors[0]).all()
    weighed = weigh_values([line], [(np.array(rates), values)], 1e-7)
    assert np.allclose(weighed[:, 0], values / errors[1][:, None])


def test_heads_keep_their_labels():
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 7))
    moved = values + 0.1 * rng.standard_normal((2, 7))
    labelled = label_heads([(np.array([-1.0, 1.0]), values), (np.array([0.9, -1.1]), moved[::-1])])
    assert [order.tolist() for order in labelled] == [[0, 1], [1, 0]]


def test_points_of_a_line():
    line = Line(np.array([1.0, 0.0]), np.array([[2.0, -1.0]]), np.array([[2, 1]]), np.zeros((1, 2)))
    points = line_points(line, np.array([0.0, 1.0]), np.array([0]))
    assert points.tolist() == [[[2.0, 1.0], [2.0, 1.0], [-1.0, 1.0], [0.0, 1.0]]]


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_all_of_it(kind):
    secret = block(np.random.default_rng(5), 8, heads=2, norm="pre", kind=kind)
    data = ask_pre_norm_attention(box_of(secret), np.random.default_rng(6))
    found = solve_pre_norm_attention(data, UNIT)
    assert found.kind == kind
    assert [head.rank_bound for head in found.attention.heads] == [4, 4]
    assert distance(found, secret) < 1e-8
    for tokens, answers in data.pairs():
        assert np.allclose(found(tokens), answers, atol=1e-8)
