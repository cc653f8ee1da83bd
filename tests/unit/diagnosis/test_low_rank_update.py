"""A low-rank update from its equations: rank, numbers, and errors that hold."""

import numpy as np
import pytest

from keyhole.diagnosis.localise import Traces
from keyhole.diagnosis.low_rank_update import (
    Equations,
    Measurement,
    find_rank,
    find_update,
    fit,
    is_less,
    solve,
)


def draw_traces(rng, rows, directions, inputs, outputs, shown=None):
    """Two tokens a row; inputs lie in `shown` directions where it is given."""
    owner = np.repeat(np.arange(rows), 2)
    given = rng.standard_normal((len(owner), inputs))
    if shown is not None:
        given[:, shown:] = 0.0
    gradients = rng.standard_normal((directions, len(owner), outputs))
    return Traces(given.astype(np.float32), gradients.astype(np.float32), owner)


def values_of(traces, delta):
    along = np.einsum("jto,oi,ti->tj", traces.gradients, delta, traces.inputs)
    return np.add.reduceat(along, np.arange(0, len(traces.row), 2), axis=0)


def draw_update(rng, rank, outputs, inputs):
    return rng.standard_normal((outputs, rank)) @ rng.standard_normal((rank, inputs))


def bend(rng, rank, noise, rows=60, inputs=9, outputs=10, curved=0.0, shown=None):
    """A box y = G(dW h) + curved (...)^2 with directions of answers that are its own numbers."""
    directions = 7
    traces = draw_traces(rng, rows, directions, inputs, outputs, shown)
    delta = draw_update(rng, rank, outputs, inputs)

    def answer(moved):
        linear = values_of(traces, moved)
        return linear + curved * linear**2

    answers = answer(delta) + noise * rng.standard_normal((rows, directions))

    def differentiate(at, along):
        slope = 1.0 + 2.0 * curved * values_of(traces, at)  # (rows, directions)
        mixed = np.einsum("xjd,xd->xjd", along, slope)
        pulled = np.einsum("tjd,dto->jto", mixed[traces.row], traces.gradients)
        return Traces(traces.inputs, pulled.astype(np.float32), traces.row)

    rest = lambda at: answers - answer(at)  # noqa: E731
    return Measurement(rest, differentiate, (outputs, inputs), max(noise, 1e-7)), delta


def test_conjugate_gradients_give_the_smallest_solution() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((12, 4)) @ rng.standard_normal((4, 6))  # rank 4 of 6 unknowns
    rest = rng.standard_normal((12, 1))
    (found,) = solve(lambda x: matrix @ x[0], lambda r: [matrix.T @ r], rest, 1e-6)
    assert found == pytest.approx(np.linalg.pinv(matrix) @ rest, abs=1e-4)


def test_the_map_and_its_adjoint() -> None:
    rng = np.random.default_rng(1)
    traces = draw_traces(rng, 8, 3, 5, 6)
    delta = draw_update(rng, 2, 6, 5)
    equations = Equations(traces, values_of(traces, delta), 1e-9)
    u, v = (rng.standard_normal((n, 2)).astype(np.float32) for n in equations.shape)
    left, right = equations.unfold(u, v)
    assert equations.give((u, v)) == pytest.approx(
        values_of(traces, left @ right.T), rel=1e-3, abs=1e-4
    )
    rest = rng.standard_normal((8, 3)).astype(np.float32)
    p, q = (rng.standard_normal((n, 2)).astype(np.float32) for n in equations.shape)
    forward = np.sum(rest * equations.give((p, v), (u, q)))
    back = equations.pull(rest, u, v)
    assert forward == pytest.approx(np.sum(back[0] * p) + np.sum(back[1] * q), rel=1e-3)


def test_a_fit_reaches_the_update_that_made_the_values() -> None:
    rng = np.random.default_rng(2)
    traces = draw_traces(rng, 60, 7, 9, 10)
    delta = draw_update(rng, 2, 10, 9)
    equations = Equations(traces, values_of(traces, delta), 1e-9)
    found, held = find_rank(equations)
    assert found[0].shape[1] == 2
    left, right = equations.unfold(*found)
    assert np.linalg.norm(left @ right.T - delta) < 1e-3 * np.linalg.norm(delta)
    assert np.sum(held) < 1e-5 * np.sum(equations.values**2)
    again = fit(equations, np.ones((60, 1), dtype=np.float32), found)
    assert again[0] @ again[1].T == pytest.approx(found[0] @ found[1].T, rel=1e-2, abs=0.1)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rank_and_update_are_found_with_honest_errors(rank) -> None:
    squares = []
    for seed in range(4):
        rng = np.random.default_rng([rank, seed])
        measurement, delta = bend(rng, rank, 1e-2)
        update = find_update(measurement, rng)
        assert update is not None
        assert update.rank == rank
        assert update.explains
        squares.append(np.mean(((update.delta - delta) / update.errors) ** 2))
    assert 0.6 < np.sqrt(np.mean(squares)) < 1.4


def test_a_large_update_is_followed_where_answers_bend() -> None:
    rng = np.random.default_rng(5)
    measurement, delta = bend(rng, 2, 1e-4, curved=0.004)
    update = find_update(measurement, rng)
    assert update is not None
    assert update.rank == 2
    assert np.linalg.norm(update.delta - delta) < 1e-3 * np.linalg.norm(delta)


def test_inputs_that_no_row_reaches_have_bars_as_wide_as_the_update() -> None:
    rng = np.random.default_rng(6)
    measurement, delta = bend(rng, 1, 1e-3, shown=6)
    update = find_update(measurement, rng)
    assert update is not None
    assert np.all(np.abs(update.delta[:, 6:]) < 1e-6)
    assert np.linalg.norm((update.delta - delta)[:, :6]) < 1e-2 * np.linalg.norm(delta)
    wide = np.sqrt(np.mean(update.errors[:, 6:] ** 2))
    assert 0.5 < wide / np.sqrt(np.mean(delta[:, :6] ** 2)) < 2
    assert np.all(update.errors[:, :6] < 0.1 * wide)


def test_answers_that_are_no_update_are_not_explained() -> None:
    rng = np.random.default_rng(7)
    measurement, _ = bend(rng, 1, 0.0)
    noise = rng.standard_normal((60, 7))
    update = find_update(
        Measurement(lambda at: noise, measurement.differentiate, (10, 9), 1e-6), rng
    )
    assert update is not None
    assert not update.explains
    assert not update.helps
    assert np.all(np.isinf(update.errors))


def test_too_few_equations_give_nothing() -> None:
    rng = np.random.default_rng(8)
    measurement, _ = bend(rng, 1, 0.0, rows=4)
    assert find_update(measurement, rng) is None


def test_less_beyond_chance() -> None:
    rng = np.random.default_rng(9)
    those = rng.random(20) + 1
    assert is_less(0.8 * those, those)
    assert not is_less(those * rng.choice([0.99, 1.01], 20), those)
