"""A low-rank update from linear equations, with errors that hold."""

import numpy as np
import pytest

from keyhole.diagnosis.localise import Traces
from keyhole.diagnosis.low_rank_update import features, features_right, find_update


def problem(rank, noise, seed=0, rows=40, directions=6, inputs=7, outputs=8):
    rng = np.random.default_rng([rank, seed])
    owner = np.repeat(np.arange(rows), 2)
    gradients = rng.standard_normal((directions, len(owner), outputs))
    traces = Traces(rng.standard_normal((len(owner), inputs)), gradients, owner)
    delta = rng.standard_normal((outputs, rank)) @ rng.standard_normal((rank, inputs))
    along = np.einsum("jto,oi,ti->tj", traces.gradients, delta, traces.inputs)
    values = np.add.reduceat(along, np.arange(0, len(owner), 2), axis=0).ravel()
    return traces, values + noise * rng.standard_normal(len(values)), delta, rows


def test_both_sets_of_equations_are_those_of_the_update() -> None:
    traces, values, delta, rows = problem(2, 0.0)
    u, s, v = np.linalg.svd(delta)
    left, right = u[:, :2] * s[:2], v[:2].T
    assert features(traces, right, rows) @ left.ravel() == pytest.approx(values)
    assert features_right(traces, left, rows) @ right.ravel() == pytest.approx(values)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_rank_and_update_are_found_with_honest_errors(rank) -> None:
    squares = []
    for seed in range(6):
        traces, values, delta, rows = problem(rank, 1e-3, seed)
        update = find_update(lambda _, both=(traces, values): both, rows)
        assert update is not None
        assert update.left.shape[1] == rank
        squares.append(np.mean(((update.delta - delta) / update.errors) ** 2))
    assert 0.6 < np.sqrt(np.mean(squares)) < 1.4


def test_too_few_equations_give_nothing() -> None:
    traces, values, _, rows = problem(1, 0.0, rows=2, directions=2)
    assert find_update(lambda _: (traces, values), rows) is None
