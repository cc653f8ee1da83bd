"""Evidence: wrong decisions are as rare as their level says, and derivatives are within their bars."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.linalg.decisions import record_decisions
from keyhole.measurement.evidence import Estimate, Evidence
from keyhole.oracles.noise import NoiseModel

SINGLE = Evidence(NoiseModel(2.0**-24, format="float32"))
DOUBLE = Evidence(NoiseModel())
seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=50, deadline=None)
@given(seed=seeds, scale=st.floats(-20, 20))
def test_noise_is_zero_and_signals_are_not(seed: int, scale: float) -> None:
    rng, size = np.random.default_rng(seed), 10.0**scale
    error = np.full(30, size)
    noise = size * rng.standard_normal(30)
    assert DOUBLE.is_zero(Estimate(noise, error))
    noise[7] += 20.0 * size
    assert not DOUBLE.is_zero(Estimate(noise, error))
    assert DOUBLE.differs(Estimate(noise, error), Estimate(0.0 * noise, error))
    assert not DOUBLE.differs(Estimate(noise, error), Estimate(noise + 2.0 * size, error))


@settings(max_examples=30, deadline=None)
@given(seed=seeds, rank=st.integers(0, 3), scale=st.floats(-10, 10))
def test_ranks_within_known_errors(seed: int, rank: int, scale: float) -> None:
    rng, size = np.random.default_rng(seed), 10.0**scale
    left = np.linalg.qr(rng.standard_normal((12, 4)))[0][:, :rank]
    right = np.linalg.qr(rng.standard_normal((9, 4)))[0][:, :rank]
    noisy = 1e3 * size * left @ right.T + size * rng.standard_normal((12, 9))
    assert DOUBLE.rank(noisy, error=size) == rank


def test_a_rank_without_errors_is_where_the_spectrum_ends() -> None:
    assert DOUBLE.rank(np.diag([3.0, 2.0, 1e-9, 5e-10])) == 2
    assert DOUBLE.rank(np.diag([3.0, 2.0, 1.0])) == 3


@settings(max_examples=200, deadline=None)
@given(seed=seeds, order=st.sampled_from([1, 2]), single=st.booleans())
def test_derivatives_are_within_their_errors(seed: int, order: int, single: bool) -> None:
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((3, 5))
    evidence = SINGLE if single else DOUBLE

    def ask(tokens: np.ndarray) -> np.ndarray:
        answers = np.sin(tokens.reshape(len(tokens), -1)[:, :5] @ weight.T)
        return answers.astype(np.float32).astype(np.float64) if single else answers

    point, direction = rng.standard_normal((2, 1, 5))
    if single:
        point = point.astype(np.float32).astype(np.float64)
    direction /= np.linalg.norm(direction)
    found = evidence.difference(ask, point, direction, order, reach=0.5)
    slope, phase = weight @ direction[0], weight @ point[0]
    truth = slope * np.cos(phase) if order == 1 else -(slope**2) * np.sin(phase)
    assert (np.abs(found.value - truth) <= 5.0 * found.error).all()
    assert (found.error <= (5e-2 if single else 1e-3) * (1.0 + np.abs(truth))).all()


def test_directions() -> None:
    rng = np.random.default_rng(0)
    vector = rng.standard_normal(6)
    error = np.full(6, 1e-4)
    beside = Estimate(-3.0 * (vector + 1e-4 * rng.standard_normal(6)), 3.0 * error)
    assert DOUBLE.same_direction(Estimate(vector, error), beside)
    assert not DOUBLE.same_direction(Estimate(vector, error), Estimate(vector + 0.1, error))
    assert not DOUBLE.same_direction(Estimate(vector, error), Estimate(0.0 * vector, error))


def test_repetitions() -> None:
    assert DOUBLE.enough(0.1) == 6
    assert DOUBLE.enough(1e-9) == 1
    with pytest.raises(ValueError, match="chance"):
        DOUBLE.enough(1.0)


def test_every_decision_is_reported() -> None:
    estimate = Estimate(np.array([6.0]), np.array([1.0]))
    with record_decisions() as tally:
        DOUBLE.is_zero(estimate, "the skip is zero")
        DOUBLE.differs(estimate, estimate)
        DOUBLE.explains(np.array([1e-15]), 1.0)
        DOUBLE.rank(np.eye(2), 1e-3)
        DOUBLE.same_direction(estimate, estimate)
    assert tally.count == 5
    assert tally.closest is not None
    assert str(tally.closest) == "the skip is zero: False, by a factor of 1.2"


def test_a_block_vanishes_within_its_errors_where_it_does_not_matter() -> None:
    evidence = Evidence(NoiseModel())
    errors = np.full(4, 1e-10)
    assert evidence.vanishes(Estimate(5.0 * errors, errors), 1.0)
    assert not evidence.vanishes(Estimate(10.0 * errors, errors), 1.0)
    assert not evidence.vanishes(Estimate(5e5 * errors, 1e6 * errors), 1.0)  # it may matter
    assert evidence.vanishes(Estimate(5e5 * errors, 1e6 * errors))
