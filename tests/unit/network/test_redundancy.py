"""Networks from random rows, on synthetic points."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.arrays import UNIT_ROUNDOFF, Array
from keyhole.network.observation import Direction
from keyhole.network.redundancy import (
    Data,
    costs_of_leaving,
    descend,
    eliminate,
    fit_likely,
    fit_network,
    has_open_gates,
    merge_gates,
    repair,
    step_matrix,
    without_cheap,
)
from keyhole.network.weights import Weights, chosen, with_one


def make(neurons: int, seed: int = 0, gated: bool = False) -> tuple[Weights, Array, Array]:
    """A network, points of a sphere, and its answers."""
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((40 * neurons, 5))
    points *= np.sqrt(6.0) / np.linalg.norm(points, axis=1, keepdims=True)

    def rows() -> Array:
        inner = rng.standard_normal((neurons, 5)) / np.sqrt(6.0)
        return np.column_stack([inner, 0.3 * rng.standard_normal(neurons)])

    network = Weights(
        rows(),
        rng.standard_normal((6, neurons)),
        0.1 * rng.standard_normal((6, 6)),
        "silu" if gated else "gelu",
        rows() if gated else None,
    )
    return network, points, network(points)


@pytest.mark.parametrize("gated", [False, True])
def test_the_network_is_found_with_its_number_of_neurons(gated: bool) -> None:
    true, points, answers = make(4, gated=gated)
    names = (true.activation,)
    # some starts end with a gate that is turned the wrong way, and others are drawn then
    starts = [np.random.default_rng(seed) for seed in range(8)]
    tried = [fit_network(points, answers, 12, names, gated, 1e-9, rng) for rng in starts]
    networks = [one.network for one in tried if one.network is not None]
    assert len(networks) >= (4 if gated else 8)
    for found in networks:
        assert found.neurons == true.neurons
        assert np.abs(found(points) - answers).max() < 1e-7


def test_of_activations_that_are_alike_the_right_one_is_taken() -> None:
    true, points, _ = make(4)
    other = Weights(true.inner, true.outer, true.affine, "gelu_tanh")
    tried = fit_network(
        points, other(points), 12, ("gelu", "gelu_tanh"), False, 1e-9, np.random.default_rng(1)
    )
    assert tried.network is not None
    assert tried.network.activation == "gelu_tanh"


@pytest.mark.parametrize("activation", ["gelu", "tanh"])
def test_the_activation_is_found(activation: str) -> None:
    true, points, _ = make(4)
    other = replace(true, activation=activation)
    names, rng = ("gelu", "silu", "tanh"), np.random.default_rng(0)
    found = fit_likely(points, other(points), 12, names, False, UNIT_ROUNDOFF, rng)
    assert found is not None
    assert found.activation == activation
    assert found.neurons == true.neurons
    assert fit_likely(points, other(points), 12, ["silu"], False, UNIT_ROUNDOFF, rng) is None


def test_too_few_neurons_are_told_at_once() -> None:
    _, points, answers = make(8)
    tried = fit_network(points, answers, 4, ("gelu",), False, 1e-9, np.random.default_rng(1))
    assert tried.network is None
    assert tried.left > 1e-3


def test_what_is_linear_is_eliminated() -> None:
    true, points, answers = make(4)
    state = eliminate(true, Data(with_one(points), answers), 0.0)
    assert state.left < 1e-12
    assert np.abs(state.weights.outer - true.outer).max() < 1e-9
    ridged = eliminate(true, Data(with_one(points), answers), 1e-6)
    assert ridged.left < 0.1 * ridged.cost
    matrix, gradient = step_matrix(state, Data(with_one(points), answers), single=False)
    assert matrix.shape == (24, 24)
    assert np.abs(matrix - matrix.T).max() < 1e-9
    assert np.abs(gradient).max() < 1e-9


def test_a_neuron_that_is_silent_at_all_points_takes_no_part() -> None:
    true, points, answers = make(4)
    silent = replace(true, inner=np.vstack([true.inner[:3], [0, 0, 0, 0, 0, -1e2]]))
    state = eliminate(silent, Data(with_one(points), answers), 0.0)
    assert np.abs(state.weights.outer[:, 3]).max() < 1e30
    matrix, _ = step_matrix(state, Data(with_one(points), answers), single=False)
    assert np.isfinite(matrix).all()


def test_leaving_costs_what_least_squares_says() -> None:
    true, points, answers = make(4)
    data = Data(with_one(points), answers)
    costs, left = costs_of_leaving(true, data)
    assert left < 1e-20
    _, alone = costs_of_leaving(chosen(true, np.arange(1, 4)), data)
    assert alone == pytest.approx(costs[0], rel=1e-6)


def test_a_known_network_is_completed() -> None:
    true, points, answers = make(6)
    most, rng = chosen(true, np.arange(5)), np.random.default_rng(1)
    found = repair(most, points, answers, UNIT_ROUNDOFF, rng)
    assert found is not None
    assert found.neurons == 6


def test_a_neuron_that_is_there_twice_leaves() -> None:
    true, points, answers = make(4)
    twice = Weights(
        np.vstack([true.inner, true.inner[:1]]),
        np.column_stack([true.outer, true.outer[:, 0]]),
        true.affine,
        "gelu",
    )
    data = Data(with_one(points), answers)
    assert costs_of_leaving(twice, data)[0].argmin() in (0, 4)
    state = eliminate(twice, data, 0.0)
    assert without_cheap(state, data, 1e-6).neurons == 4


def test_gates_that_are_the_same_become_one() -> None:
    true, points, answers = make(3, gated=True)
    assert true.gate is not None
    half = np.vstack([true.inner, true.inner[:1] + 1.0])
    split = Weights(
        half,
        np.column_stack([true.outer, 0.0 * true.outer[:, 0]]),
        true.affine,
        "silu",
        np.vstack([true.gate, true.gate[:1]]),
    )
    merged = merge_gates(split)
    assert merged.neurons == 3
    assert np.abs(descend(merged, Data(with_one(points), answers), 0.0, 3).residual).max() < 1e-9
    assert not has_open_gates(merged, with_one(points))
    shift = np.zeros(6)
    shift[-1] = 50.0
    wide = Weights(true.inner, true.outer, true.affine, "silu", true.gate + shift)
    assert has_open_gates(wide, with_one(points))


def test_answers_that_lack_a_direction_each_tell_the_network() -> None:
    true, points, answers = make(4)
    rng = np.random.default_rng(2)
    hidden = rng.standard_normal(answers.shape)
    hidden /= np.linalg.norm(hidden, axis=1, keepdims=True)
    seen = answers - (answers * hidden).sum(axis=1, keepdims=True) * hidden
    state = eliminate(true, Data(with_one(points), seen, Direction(hidden)), 0.0)
    assert state.left < 1e-12
    assert np.abs(state.weights.outer - true.outer).max() < 1e-9
    found = fit_network(points, seen, 12, ("gelu",), False, 1e-9, rng, Direction(hidden)).network
    assert found is not None
    assert found.neurons == true.neurons
    assert np.abs(found(points) - answers).max() < 1e-7


def test_the_normal_matrix_loses_what_rows_do_along_hidden_directions() -> None:
    true, points, answers = make(2)
    hidden = np.zeros_like(answers)
    hidden[:, 0] = 1.0
    data = Data(with_one(points), answers * (1.0 - hidden), Direction(hidden))
    state = eliminate(true, data, 0.0)
    matrix, _ = step_matrix(state, data, single=False)
    fewer = Data(data.points, answers[:, 1:])
    other, _ = step_matrix(eliminate(true, fewer, 0.0), fewer, single=False)
    assert np.abs(matrix - other).max() < 1e-9 * np.abs(other).max()
