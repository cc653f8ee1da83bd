"""Rows: the floor they are measured by, and samples of them."""

import numpy as np
import pytest

from example_layers import boolean
from keyhole.learners.examples.data import build_examples
from keyhole.learners.examples.hypothesis import hold_rows


def test_ratio_is_the_note_s_floor() -> None:
    rng = np.random.default_rng(14)
    X = boolean(rng, 100, 4, 8)
    rows = build_examples(X, X).rows
    assert 100 / rows.ratio(1) == pytest.approx(max(2 * 8 / 4, 64 / 12))
    assert 100 / rows.ratio(3) == pytest.approx(2 * 3 * 8 / 4)
    kept = hold_rows(rows, rng)
    assert 0.04 < kept.mean() < 0.06


def test_a_sample_leaves_out_no_rare_token() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((4000, 4, 4))
    rows = build_examples(X, np.ones(X.shape)).rows
    assert len(rows.sample(1, 12.0, rng).tokens) == 24  # 12 times the floor of 2
    X[:, :, 3] *= rng.random(X.shape[:2]) < 0.001
    rows = build_examples(X, np.ones(X.shape)).rows
    some = rows.sample(1, 12.0, rng)
    assert np.count_nonzero(some.tokens[:, :, 3]) >= 1
    share = len(some.tokens) / len(rows.tokens)
    assert (some.tokens[:, :, 3] ** 2).sum() >= 0.4 * share * (rows.tokens[:, :, 3] ** 2).sum()
