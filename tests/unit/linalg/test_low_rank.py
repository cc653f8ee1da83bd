"""The range of a matrix, and what noise leaves of its singular values."""

import numpy as np
import pytest

from keyhole.linalg.low_rank import RangeFinder, separate_errors, truncate_noise

WIDTH = 12


def test_a_range_grows_orthonormally_however_close_the_columns_are() -> None:
    rng, found = np.random.default_rng(0), RangeFinder(WIDTH)
    first = rng.standard_normal(WIDTH)
    columns = [first, first + 1e-10 * rng.standard_normal(WIDTH), rng.standard_normal(WIDTH)]
    for column in columns:
        found.add(column)
    assert found.rank == 3
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(3), atol=1e-14)
    assert np.abs(found.outside(np.array(columns))).max() < 1e-14
    found.become(np.eye(WIDTH)[:, :2])
    np.testing.assert_array_equal(found.outside(np.ones(WIDTH))[:3], [0.0, 0.0, 1.0])


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_noise_explains_all_but_the_singular_values_that_are_there(rank: int) -> None:
    rng, level = np.random.default_rng(rank), 1e-3
    truth = rng.standard_normal((WIDTH, rank)) @ rng.standard_normal((rank, WIDTH))
    noisy = truth + level * rng.standard_normal(truth.shape)
    draws = [level * rng.standard_normal(truth.shape) for _ in range(64)]
    kept = truncate_noise(noisy, np.full(truth.shape, level), draws)
    assert len(kept.singular) == rank
    estimate = (kept.left * kept.singular) @ kept.right
    off = np.linalg.norm(estimate - truth)
    assert off <= 2.0 * np.linalg.norm(kept.error)
    assert np.linalg.norm(kept.error) < level * WIDTH  # less than without the truncation


def test_a_given_rank_is_kept() -> None:
    matrix = np.diag(np.arange(WIDTH, 0.0, -1.0))
    kept = truncate_noise(matrix, np.full(matrix.shape, 10.0), [np.zeros_like(matrix)], rank=3)
    np.testing.assert_allclose(kept.singular, [WIDTH, WIDTH - 1, WIDTH - 2])


def test_errors_as_a_product_keep_their_size() -> None:
    rng = np.random.default_rng(1)
    error = np.outer(1 + rng.random(WIDTH), 1 + rng.random(WIDTH))
    rows, columns = separate_errors(error)
    np.testing.assert_allclose(rows @ columns, error)
    other = rng.random((WIDTH, WIDTH))
    rows, columns = separate_errors(other)
    assert np.linalg.norm(rows @ columns) == pytest.approx(np.linalg.norm(other))
