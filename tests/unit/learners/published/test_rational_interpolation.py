"""Exact for few heads, honest about losing its digits with many."""

import numpy as np
import pytest

from keyhole.errors import InvalidArgument, KeyholeError
from keyhole.learners.published.rational_interpolation import find_logistic_terms


def sampled(odds: np.ndarray, weights: np.ndarray, copies: np.ndarray) -> np.ndarray:
    return (copies[:, None] / (copies[:, None] + np.exp(-odds))) @ weights


@pytest.mark.parametrize(("heads", "allowed"), [(1, 1e-13), (2, 1e-9), (3, 1e-4)])
def test_few_heads(heads: int, allowed: float) -> None:
    errors = []
    for seed in range(11):
        rng = np.random.default_rng(seed)
        odds, weights = np.sort(rng.standard_normal(heads)), rng.standard_normal(heads)
        copies = np.arange(1.0, 2 * heads + 1)
        found, _ = find_logistic_terms(copies, sampled(odds, weights, copies), heads)
        errors.append(np.abs(found - odds).max())
    assert np.median(errors) < allowed


def test_digits_are_gone_with_eight_heads() -> None:
    lost = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        odds, weights = np.sort(rng.standard_normal(8)), rng.standard_normal(8)
        copies = np.arange(1.0, 17.0)
        try:
            found, _ = find_logistic_terms(copies, sampled(odds, weights, copies), 8)
            lost += bool(np.abs(found - odds).max() > 1e-2)
        except KeyholeError:
            lost += 1
    assert lost >= 9


def test_too_few_samples() -> None:
    with pytest.raises(InvalidArgument):
        find_logistic_terms(np.ones(3), np.ones(3), 2)
