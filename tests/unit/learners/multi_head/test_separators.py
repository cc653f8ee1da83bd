"""Separators hold by their margin, are not longer than needed, and refuse what cannot be separated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.errors import IllConditioned
from keyhole.learners.multi_head.separators import design_separators, measure_margins


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(2, 12), st.integers(0, 10**6))
def test_separators_hold(heads: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = rng.standard_normal((heads, width)) * rng.lognormal(0, 2, (heads, 1))
    separators = design_separators(keys)
    assert (measure_margins(separators, keys) >= np.linalg.norm(keys, axis=1) * (1 - 1e-6)).all()


def test_orthogonal_keys_need_separators_of_length_one() -> None:
    separators = design_separators(3 * np.eye(4))
    assert np.linalg.norm(separators, axis=1).max() < 1.0 + 1e-9


def test_more_heads_than_dimensions() -> None:
    angles = 2 * np.pi * np.arange(7) / 7
    keys = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    assert (measure_margins(design_separators(keys), keys) > 1 - 1e-9).all()


def test_parallel_keys_cannot_be_separated() -> None:
    keys = np.array([[1.0, 2.0, 0.0], [2.0, 4.0, 0.0]])
    with pytest.raises(IllConditioned):
        design_separators(keys)


def test_the_anchor_counts_as_a_competitor() -> None:
    keys, separators = np.array([[2.0, 0.0]]), np.array([[3.0, 0.0]])
    assert measure_margins(separators, keys)[0] == pytest.approx(6.0)
    assert measure_margins(separators, keys, np.array([1.0, 5.0]))[0] == pytest.approx(4.0)
