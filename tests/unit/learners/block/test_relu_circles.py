import numpy as np
import pytest

from keyhole.learners.block import relu_circles
from keyhole.learners.block.box import Unclear
from keyhole.learners.block.direction_fit import Directed
from keyhole.learners.block.relu_circles import (
    CircleOptions,
    Piece,
    Pool,
    SphereBox,
    find_circle,
    find_circles,
    find_hidden,
    find_neurons,
    join_networks,
    make_noise,
    off_by,
    pair_kinks,
    prune_hidden,
    refine_hidden,
    solve_circle,
    unit_vectors,
    waves,
)

WIDTH = 9
RADIUS = np.sqrt(WIDTH + 1.0)


def network(rng, neurons=12, numbers=WIDTH):
    rows = np.column_stack(
        [rng.standard_normal((neurons, WIDTH)), 0.5 * rng.standard_normal(neurons)]
    )
    outer = rng.standard_normal((numbers, neurons)) / np.sqrt(neurons)
    affine = np.column_stack([np.eye(numbers, WIDTH), 0.3 * rng.standard_normal(numbers)])
    return Directed(affine, outer, rows, "relu")


def box_of(net, lengths, asked=None):
    def ask(points):
        z = net(points)
        if asked is not None:
            asked.append(len(points))
        return z if lengths else z / np.linalg.norm(z, axis=1, keepdims=True)

    return SphereBox(ask, WIDTH, RADIUS, 1e-15, lengths)


def pool_of(net, rng, box, count=150):
    points = rng.standard_normal((count, WIDTH))
    points *= RADIUS / np.linalg.norm(points, axis=1, keepdims=True)
    return Pool(points, box.ask(points))


def off_at(net, home):
    """The same network with neurons that are off at this point."""
    on = net.rows @ np.append(home, 1.0) > 0
    rows = np.where(on, -1.0, 1.0)[:, None] * net.rows
    return Directed(net.affine + (net.outer * on) @ net.rows, net.outer, rows, "relu")


def row_errors(found, truth):
    """Of every true neuron's plane, for the nearest one that was found."""
    one, other = (
        net.rows / np.linalg.norm(net.rows[:, :-1], axis=1, keepdims=True) for net in (truth, found)
    )
    gaps = [np.linalg.norm(one[:, None] - sign * other, axis=2) for sign in (1.0, -1.0)]
    return np.minimum(*gaps).min(axis=1)


@pytest.mark.parametrize("lengths", [True, False])
def test_a_piece_tells_z_up_to_a_factor(lengths):
    rng = np.random.default_rng(0)
    table = rng.standard_normal((WIDTH, 3))
    angles = np.array([0.0, 0.1, 0.17, 0.24, 0.3])
    z = waves(angles) @ table.T
    seen = z if lengths else z / np.linalg.norm(z, axis=1, keepdims=True)
    piece = Piece(angles, seen, 1e-16, lengths, make_noise(seen, 1e-16, 2, rng))
    assert piece.solved[1] < 1e-14
    ahead, wanted = piece.predict(np.array([0.5]))[0, 0], waves(np.array([0.5]))[0] @ table.T
    assert np.isclose(abs(ahead @ wanted), np.linalg.norm(ahead) * np.linalg.norm(wanted))


def test_kinks_are_paired_by_their_jumps():
    rng = np.random.default_rng(1)
    jumps = rng.standard_normal((4, WIDTH))
    order = np.array([0, 1, 2, 3, 2, 0, 3, 1])
    around = rng.standard_normal((8, WIDTH))
    along = around / np.linalg.norm(around, axis=1, keepdims=True)
    pairs = pair_kinks(along, jumps[order] + 0.7 * along, False, 0.2)
    assert sorted(tuple(sorted(pair)) for pair in pairs) == [(0, 5), (1, 7), (2, 4), (3, 6)]
    with pytest.raises(Unclear):
        pair_kinks(along, around, False, 0.2)
    with pytest.raises(Unclear):
        pair_kinks(along[:3], around[:3], False, 0.2)


def test_the_lengths_of_all_answers_of_a_circle_are_one_eigenvector():
    rng = np.random.default_rng(2)
    angles = np.sort(rng.uniform(0.0, 2.0 * np.pi, 80))
    middle, half = rng.uniform(0.0, 2.0 * np.pi, 5), rng.uniform(1.0, 2.0, 5)
    planes = np.column_stack([-np.cos(half), np.cos(middle), np.sin(middle)])
    waves_of = np.column_stack([np.ones(80), np.cos(angles), np.sin(angles)])
    table = np.hstack([waves_of, np.maximum(waves_of @ planes.T, 0.0)])
    truth = rng.standard_normal((8, WIDTH))
    z = table @ truth
    found, rest = solve_circle(angles, z / np.linalg.norm(z, axis=1, keepdims=True), planes, False)
    scale = np.sum(found * truth) / np.sum(truth**2)
    assert rest < 1e-9
    assert np.allclose(found, scale * truth, atol=1e-6 * abs(scale))


@pytest.mark.parametrize("lengths", [True, False])
def test_a_circle_and_arcs_tell_the_whole_network(lengths):
    rng = np.random.default_rng(3)
    truth, asked = network(rng), []
    box = box_of(truth, lengths, asked)
    pool = pool_of(truth, rng, box)
    net = find_hidden(box, find_circles(box, rng)[0], pool, rng)
    assert net.neurons == truth.neurons
    assert row_errors(net, truth).max() < 1e-5
    assert off_by(net, pool, lengths).max() < 1e-5
    assert sum(asked) < 900


def test_a_neuron_that_misses_the_circle_is_found_by_an_arc():
    rng = np.random.default_rng(4)
    truth = network(rng)
    box = box_of(truth, False)
    circle, kinks = find_circle(box, CircleOptions(), rng)
    assert len(kinks) == 2 * len(circle.planes)
    fewer = Directed(truth.affine, truth.outer[:, :-1], truth.rows[:-1], "relu")
    pool = pool_of(truth, rng, box)
    assert off_by(fewer, pool, False).max() > 1e-2
    net = find_hidden(box, fewer, pool, rng)
    assert net.neurons == truth.neurons
    assert row_errors(net, truth).max() < 1e-5


def test_another_circle_adds_the_neurons_that_it_meets():
    rng = np.random.default_rng(6)
    truth = network(rng)
    home = RADIUS * np.eye(WIDTH)[0]
    # as two circles tell it: neurons that a circle misses, turned off there, are part of the rest
    whole = off_at(truth, home)
    affine, rows = whole.affine, whole.rows
    one = Directed(affine, truth.outer[:, :8], rows[:8], "relu")
    other = Directed(3.0 * affine, 3.0 * truth.outer[:, 4:] / 2.0, -2.0 * rows[4:], "relu")
    joined = join_networks(one, other, home, CircleOptions())
    assert joined.neurons == truth.neurons
    points = pool_of(truth, rng, box_of(truth, True)).points
    assert np.allclose(joined(points), whole(points))
    apart = Directed(affine, truth.outer[:, 8:], rows[8:], "relu")
    with pytest.raises(Unclear, match="no neuron in common"):
        join_networks(one, apart, home, CircleOptions())


def test_neurons_that_are_hardly_ever_on_take_several_circles():
    rng = np.random.default_rng(7)
    truth = network(rng, neurons=24)
    shift = 1.4 * np.linalg.norm(truth.rows[:, :-1], axis=1)
    rows = np.column_stack([truth.rows[:, :-1], -np.abs(truth.rows[:, -1]) - shift])
    rare = Directed(truth.affine, truth.outer, rows, "relu")
    box = box_of(rare, False)
    net = find_neurons(box, lambda count: pool_of(rare, np.random.default_rng(8), box, count), rng)
    assert net.neurons == truth.neurons
    assert row_errors(net, rare).max() < 1e-3


def test_another_circle_is_asked_where_arcs_do_not_find_the_rest(monkeypatch):
    rng = np.random.default_rng(10)
    home = RADIUS * np.eye(WIDTH)[0]
    truth = off_at(network(rng), home)
    fewer = Directed(truth.affine, truth.outer[:, :-2], truth.rows[:-2], "relu")
    circles = iter([(fewer, home), (truth, home)])

    def find_none(box, net, *_):
        if net.neurons < truth.neurons:
            raise Unclear("2 neurons are not seen alone")
        return net

    monkeypatch.setattr(relu_circles, "find_circles", lambda *_: next(circles))
    monkeypatch.setattr(relu_circles, "find_hidden", find_none)
    box = box_of(truth, False)

    def draw(count):
        return pool_of(truth, np.random.default_rng(11), box, count)

    net = find_neurons(box, draw, rng, CircleOptions(explained=0.0))
    assert net.neurons == truth.neurons


def test_neurons_that_cancel_are_taken_out():
    rng = np.random.default_rng(5)
    truth = network(rng)
    box = box_of(truth, False)
    pool = pool_of(truth, rng, box)
    twice = Directed(
        truth.affine,
        np.column_stack([truth.outer, truth.outer[:, :1], -truth.outer[:, :1]]),
        np.concatenate([truth.rows, truth.rows[:1], truth.rows[:1]]),
        "relu",
    )
    assert prune_hidden(twice, 12, pool, False, 1e-6).neurons == 12


def test_a_neuron_that_is_on_at_no_point_stays_as_it_was_read():
    rng = np.random.default_rng(0)
    rows = np.array([[0.0, 0.0, 1.0, 0.1], [0.1, 0.0, 0.0, -9.0]])  # the second is never on
    net = Directed(rng.standard_normal((3, 4)), rng.standard_normal((3, 2)), rows, "relu")
    points = unit_vectors(rng.standard_normal((20, 3)))
    refined = refine_hidden(net, 1, Pool(points, net(points)), True, 1e-6)
    np.testing.assert_array_equal(refined.rows, rows)
