"""Descents end at the truth from nearby, dense and matrix-free alike, and respect their limits."""

import time

import numpy as np
import pytest

from keyhole.fitting.attention_rows import Rows, average_tokens, compute_patterns
from keyhole.fitting.initial_guess import solve_one_head, whiten_tokens
from keyhole.fitting.levenberg_marquardt import DescentOptions, descend


def labelled(
    seed: int, d: int = 6, length: int = 3, heads: int = 2, n: int = 60
) -> tuple[Rows, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens = rng.choice([-1.0, 1.0], (n, length, d))
    theta = rng.standard_normal((d, heads, d)) / d
    blank = Rows(tokens, tokens, None, np.ones((n, length)), np.zeros((n, length, d)))
    values = rng.standard_normal((heads * d, d))
    targets = (average_tokens(blank, compute_patterns(blank, theta)) @ values).reshape(n, length, d)
    return Rows(tokens, tokens, None, np.ones((n, length)), targets), theta


@pytest.mark.parametrize("dense_unknowns", [0, 320])
def test_descends_to_the_truth(dense_unknowns: int) -> None:
    rows, theta = labelled(0)
    start = theta + 0.02 * np.random.default_rng(1).standard_normal(theta.shape)
    end = descend(rows, start, DescentOptions(dense_unknowns=dense_unknowns))
    assert end.relative < 1e-26
    np.testing.assert_allclose(end.at.theta, theta, atol=1e-11)
    assert (end.products > 0) == (dense_unknowns == 0)


def test_limits_are_kept() -> None:
    rows, theta = labelled(0)
    assert descend(rows, 0 * theta, DescentOptions(iterations=3)).iterations == 3
    assert descend(rows, 0 * theta, DescentOptions(deadline=time.monotonic() - 1)).iterations == 0


@pytest.mark.parametrize(("d", "length"), [(6, 2), (6, 4), (8, 5)])
def test_one_head_in_closed_form(d: int, length: int) -> None:
    rows, theta = labelled(3, d, length, 1, 150)
    found = solve_one_head(rows)
    assert found is not None
    np.testing.assert_allclose(found, theta, atol=1e-8)


def test_closed_form_declines_what_it_cannot_do() -> None:
    rows, _ = labelled(3, 4, 6, 1, 50)  # more tokens than outputs
    assert solve_one_head(rows) is None
    rows, _ = labelled(3, 6, 3, 1, 3)  # too few examples
    assert solve_one_head(rows) is None


def test_whitening_changes_coordinates_only() -> None:
    rows, theta = labelled(5)
    stretch = np.diag(np.geomspace(1e-3, 1e3, 6))
    scaled = Rows(rows.anchors @ stretch, rows.tokens @ stretch, None, rows.weights, rows.targets)
    white, back = whiten_tokens(scaled)
    moment = np.einsum("nld,nle->de", white.tokens, white.tokens) / white.weights.size
    np.testing.assert_allclose(moment, np.eye(6), atol=1e-10)
    inner = np.random.default_rng(0).standard_normal(theta.shape)
    np.testing.assert_allclose(
        compute_patterns(white, inner), compute_patterns(scaled, back(inner)), atol=1e-9
    )
