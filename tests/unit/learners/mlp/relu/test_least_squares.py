import numpy as np
import pytest

from keyhole.learners.mlp.relu.least_squares import (
    Doubts,
    Samples,
    balance_points,
    choose_informative,
    correct_all,
    correct_doubts,
    estimate_errors,
    fit_frozen_patterns,
    fit_network,
    fit_outputs,
    keep_neurons,
    rate_additions,
    solve_iteratively,
    unflatten_output,
    update_network,
)
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
    monkeypatch.setattr("keyhole.learners.mlp.relu.least_squares.DENSE_UNKNOWNS", limit)
    net = network(0, 6, 10)
    rng = np.random.default_rng(1)
    points = rng.standard_normal((200, 6))
    current = slightly_off(net, 1e-8)
    for _ in range(3):
        current = correct_all(current, points, net(points) - current(points))
    fresh = rng.standard_normal((500, 6))
    assert np.abs(current(fresh) - net(fresh)).max() < 1e-13


def test_mirrored_points_see_both_sides():
    net = ReluNetwork([[1.0, 0.0]], [-5.0], [1.0])
    points = balance_points(net, np.random.default_rng(0).standard_normal((100, 2)), 10)
    assert (points @ net.weight[0] + net.bias[0] > 0).sum() >= 10


def test_iterated_solution_solves():
    rng = np.random.default_rng(0)
    on = np.concatenate([np.ones((80, 1)), rng.random((80, 4)) < 0.5], axis=1)
    flat = rng.standard_normal((80, 3))
    truth = rng.standard_normal((5, 3))
    values = np.einsum("nm,nd,md->n", on, flat, truth)
    first = solve_iteratively(on, flat, values).reshape(5, 3)
    assert first == pytest.approx(truth, abs=1e-4)
    left = values - np.einsum("nm,nd,md->n", on, flat, first)  # every solve takes six digits off
    assert first + solve_iteratively(on, flat, left).reshape(5, 3) == pytest.approx(truth, abs=1e-9)


def test_frozen_patterns_reach_the_last_digits():
    net = network(0, 6, 10)
    points = np.random.default_rng(1).standard_normal((200, 6))
    start = unflatten_output(slightly_off(net, 1e-8))
    found = fit_frozen_patterns(start, points, net(points))
    fresh = np.random.default_rng(2).standard_normal((500, 6))
    assert np.abs(found(fresh)[:, 0] - net(fresh)).max() < 1e-13


def test_a_doubtful_piece_is_corrected_between_its_two_neurons():
    """The gradient of piece 1 is off by 1e-6: neuron 0 has too much of it, neuron 1 too little."""
    net = network(0, 4, 3)
    shift = 1e-6 * np.random.default_rng(0).standard_normal(4)
    rows = net.output[:, None] * net.weight
    rows[0] += shift
    rows[1] -= shift
    off = ReluNetwork(rows / net.output[:, None], net.bias, net.output)
    doubts = Doubts(np.array([0.0, 1e-6, 0.0, 0.0]), np.zeros((4, 4)), 1.0)
    candidates = np.random.default_rng(1).standard_normal((100, 4))
    points = choose_informative(off, doubts, candidates, 12)
    assert len(np.unique(points, axis=0)) == len(points) <= 12
    found = correct_doubts(off, doubts, points, net(points) - off(points), 1e-15)
    fresh = np.random.default_rng(2).standard_normal((300, 4))
    before = np.abs(off(fresh) - net(fresh)).max()
    assert np.abs(found(fresh) - net(fresh)).max() < 0.1 * before


def test_an_update_uses_errors_known_before():
    secret = unflatten_output(network(0, 5, 4))
    points = np.random.default_rng(0).standard_normal((120, 5))
    off = unflatten_output(slightly_off(network(0, 5, 4), 1e-9))
    noise = np.full(120, 1e-15)
    found, errors = update_network(
        off, np.full(5, 1e-7), points, secret(points) - off(points), noise
    )
    fresh = np.random.default_rng(1).standard_normal((300, 5))
    assert np.abs(found(fresh) - secret(fresh)).max() < 1e-12
    assert (errors < 1e-13).all()


NOISE = 1e-6


def sample(secret, count=600, seed=0):
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((count, secret.width))
    noise = np.full(count, NOISE)
    return Samples(points, secret(points) + NOISE * rng.standard_normal((count, 1)), noise)


def moved(secret, size, seed=1):
    rng = np.random.default_rng(seed)
    shift = size * rng.standard_normal(secret.weight.shape)
    return ReluNetwork(secret.weight + shift, secret.bias, secret.output)


def test_a_network_that_is_off_by_percents_is_fitted_to_the_noise():
    secret = unflatten_output(network(0, 8, 12))
    data = sample(secret)
    found = fit_network(moved(secret, 0.02), data)
    assert 0.5 < data.misfit(found) < 1.5
    fresh = sample(secret, seed=5)
    assert fresh.misfit(found) < 3


def test_errors_are_those_that_repetition_shows():
    secret = unflatten_output(network(0, 6, 5))
    entries = []
    for seed in range(30):
        found = fit_network(secret, sample(secret, 200, seed))
        entries.append(found.output * found.weight)
    seen = np.sqrt(np.mean(np.var(entries, axis=0), axis=1))
    data = sample(secret, 200)
    claimed = estimate_errors(fit_network(secret, data), data)[1:]
    assert np.all((claimed > 0.5 * seen) & (claimed < 3 * seen))


def test_outputs_tell_wrong_neurons_from_right_ones():
    secret, other = unflatten_output(network(0, 8, 6)), unflatten_output(network(3, 8, 2))
    mixed = ReluNetwork(
        *(
            np.concatenate([getattr(net, name) for net in (secret, other)])
            for name in ("weight", "bias", "output")
        )
    )
    best, kept = fit_outputs(mixed, sample(secret))
    assert np.abs(kept[:6] - 1).max() < 1e-4
    assert np.abs(kept[6:]).max() < 1e-4
    assert np.abs(best.skip).max() < 1e-5


def test_the_missing_neuron_helps_most():
    secret, other = unflatten_output(network(0, 8, 6)), unflatten_output(network(3, 8, 4))
    data = sample(secret)
    known, _ = fit_outputs(keep_neurons(secret, np.arange(5)), data)
    missing = keep_neurons(secret, np.array([5]))
    assert rate_additions(known, missing, data)[0] > 3 * rate_additions(known, other, data).max()
