"""Weights, their derivative and their inverse with errors."""

import numpy as np
import pytest

from keyhole.linalg.softmax import (
    expit,
    log_ratio,
    logit,
    logit_with_error,
    softmax,
    softmax_jvp,
)


def test_weights_sum_to_one_whatever_the_size_of_the_scores() -> None:
    rng = np.random.default_rng(0)
    scores = 1e4 * rng.standard_normal((5, 3, 4))
    for axis in range(3):
        weights = softmax(scores, axis=axis)
        np.testing.assert_allclose(weights.sum(axis=axis), 1.0)
        np.testing.assert_allclose(softmax(scores + 7.0, axis=axis), weights, atol=1e-10)


def test_scores_are_overwritten_only_on_demand() -> None:
    scores = np.array([[1.0, 2.0]])
    weights = softmax(scores)
    assert scores.tolist() == [[1.0, 2.0]]
    assert softmax(scores, overwrite=True) is scores
    np.testing.assert_array_equal(scores, weights)


def test_single_precision_stays_single() -> None:
    assert softmax(np.zeros((2, 2), np.float32)).dtype == np.float32


def test_derivative_against_differences_and_its_symmetry() -> None:
    rng = np.random.default_rng(1)
    scores, change, other = rng.standard_normal((3, 6, 4))
    weights = softmax(scores)
    step = 1e-6
    difference = (softmax(scores + step * change) - softmax(scores - step * change)) / (2 * step)
    np.testing.assert_allclose(softmax_jvp(weights, change), difference, atol=1e-9)
    left = (other * softmax_jvp(weights, change)).sum()
    assert left == pytest.approx((change * softmax_jvp(weights, other)).sum())


def test_log_odds_invert_the_softmax_of_two() -> None:
    odds = np.linspace(-30, 30, 13)
    weight = expit(odds)
    np.testing.assert_allclose(logit(weight[:8]), odds[:8], atol=1e-12)
    np.testing.assert_allclose(log_ratio(weight, expit(-odds)).odds, odds, rtol=1e-12, atol=1e-12)
    assert np.isnan(logit(np.array([-0.1, 0.0, 1.0, 1.1]))).all()


def test_errors_are_those_of_repeated_measurements() -> None:
    rng = np.random.default_rng(2)
    odds, level = np.array([-2.0, 0.0, 1.5]), 1e-4
    weight, rest = expit(odds), expit(-odds)
    noise = level * rng.standard_normal((4000, 2, 3))
    shared = logit(weight + noise[:, 0])
    np.testing.assert_allclose(
        shared.std(axis=0), logit_with_error(weight, level).errors, rtol=0.05
    )
    apart = log_ratio(weight + noise[:, 0], rest + noise[:, 1]).odds
    expected = log_ratio(weight, rest, level, level).errors
    np.testing.assert_allclose(apart.std(axis=0), expected, rtol=0.05)
