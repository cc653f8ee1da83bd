"""Scores, tolerances and the digits that answers are sent in."""

import numpy as np
import pytest

from keyhole.diagnosis.scores import FLOORS, Tolerance, read_digits, rounding_floor, score

ANSWERS = np.random.default_rng(0).standard_normal((6, 40)) * 0.2


def test_what_explains_everything_scores_nothing() -> None:
    assert score(np.full(5, 1e-6), 1e-6) == pytest.approx(0, abs=1e-9)
    assert score(np.full(5, 1e-3), 1e-6) == pytest.approx(3, abs=0.01)
    one_row = np.array([1e-3, 1e-7, 1e-7, 1e-7])
    assert 0.7 < score(one_row, 1e-6) < 0.76
    assert np.isfinite(score(np.array([np.inf, 0.0]), 1e-6))


def test_below_the_tolerance_the_smaller_wins() -> None:
    assert score(np.full(4, 2e-7), 1e-6) < score(np.full(4, 9e-7), 1e-6)


def test_formats_of_answers() -> None:
    assert read_digits(ANSWERS.astype(np.float16).astype(float))[0] == "float16"
    rounded = (ANSWERS.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    assert read_digits(rounded.astype(float))[0] == "bfloat16"
    assert read_digits(ANSWERS.astype(np.float32).astype(float)) == ("float32", 0.0)


@pytest.mark.parametrize("decimals", [3, 5, 6])
def test_decimals_bound_the_rounding(decimals) -> None:
    sent = np.round(ANSWERS, decimals)
    name, digits = read_digits(sent)
    assert name == f"{decimals} decimals"
    actual = np.linalg.norm(sent - ANSWERS, axis=1) / np.linalg.norm(ANSWERS, axis=1)
    assert np.all(actual < 1.5 * digits)
    assert digits < 5 * actual.max()


def test_a_floor_of_ones_own_only_widens() -> None:
    tolerance = Tolerance(1e-7, 1e-5, "5 decimals")
    assert tolerance.value == pytest.approx(FLOORS * 1e-7 + 1e-5)
    assert tolerance.with_floor(1e-8).value == tolerance.value
    assert tolerance.with_floor(1e-6).value > tolerance.value


def test_the_floor_is_the_worst_row() -> None:
    double = np.ones((2, 4))
    single = double.copy()
    single[1] *= 1 + 1e-6
    assert rounding_floor(single, double) == pytest.approx(1e-6)
