"""Wide networks from random rows, thinned out, on synthetic points."""

import numpy as np
import pytest

from keyhole.network.weights import Weights
from keyhole.network.wide import (
    Seen,
    WideOptions,
    find_wide,
    misfit_of,
    order_of_leaving,
    points_for,
    search_wide,
    thinned,
)

NOISE = 1e-7


def make(activation: str, neurons: int, seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    rows = np.column_stack(
        [rng.standard_normal((neurons, 8)) / 2, 0.3 * rng.standard_normal(neurons)]
    )
    outer = rng.standard_normal((8, neurons)) / np.sqrt(neurons)
    return Weights(rows, outer, np.column_stack([np.eye(8), np.ones(8)]), activation)


def look_at(true: Weights, count: int, direction: bool, seed: int = 1) -> Seen:
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((count, 8))
    points *= 3.0 / np.linalg.norm(points, axis=1, keepdims=True)
    answers = true(points)
    if direction:
        answers = answers / np.linalg.norm(answers, axis=1, keepdims=True)
    return Seen(points, answers * (1.0 + NOISE * rng.standard_normal((count, 1))), direction)


@pytest.mark.parametrize("direction", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_neurons_are_found_from_values_and_from_directions(activation, direction):
    true = make(activation, 16)
    seen = look_at(true, points_for(24, 8, 8, 4.0), direction)
    found, left = find_wide(seen, 24, activation, 2 * NOISE, 1e-5, np.random.default_rng(2))
    assert found.neurons == true.neurons
    assert left < 10 * NOISE
    assert misfit_of(found, look_at(true, 200, direction, seed=3)) < 1e-5


def test_wider_networks_follow_where_one_was_too_narrow():
    true, asked = make("relu", 20), []

    def look(count: int) -> Seen:
        asked.append(count)
        return look_at(true, count, direction=False)

    rng = np.random.default_rng(2)
    found, left = search_wide(look, ("relu",), 2 * NOISE, 1e-5, rng, WideOptions(shares=(1.0, 4.0)))
    assert found.neurons == true.neurons
    assert left < 1e-5
    assert asked == [8, points_for(8, 8, 8, 4.0), points_for(32, 8, 8, 4.0)]


def test_another_activation_is_said_not_to_explain():
    true = make("tanh", 12)
    seen = look_at(true, points_for(16, 8, 8, 4.0), direction=False)
    _, left = find_wide(seen, 16, "relu", 2 * NOISE, 1e-5, np.random.default_rng(2))
    assert left > 1e-4


def test_columns_leave_by_what_they_cost():
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((40, 5))
    columns[:, 3] = columns[:, 0] + columns[:, 1]  # one of these three can be spared
    answers = columns[:, [0, 1, 2, 4]] @ rng.standard_normal((4, 3))
    order, costs = order_of_leaving(columns / np.linalg.norm(columns, axis=0), answers)
    assert sorted(order) == [0, 1, 2, 3, 4]
    assert order[0] in (0, 1, 3)
    assert costs[0] < 1e-6
    assert costs[1] > 1e-2
    last = order[-1]  # alone, it costs all that it explains
    assert np.isclose(
        costs[-1], np.sum((columns[:, last] @ answers / np.linalg.norm(columns[:, last])) ** 2),
        rtol=1e-4,
    )  # fmt: skip


def test_neurons_that_repeat_others_leave():
    true = make("relu", 10)
    seen = look_at(true, 200, direction=False)
    twice = Weights(
        np.concatenate([true.inner, 2.0 * true.inner]),
        np.concatenate([0.5 * true.outer, 0.25 * true.outer], axis=1),
        true.affine,
        "relu",
    )
    first = next(thinned(twice, seen, NOISE, 10.0))
    assert first.neurons == 10
    assert misfit_of(first, seen) < 10 * NOISE
