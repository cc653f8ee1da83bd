"""The nuclear norm program against the truth, and against its own dual."""

import numpy as np

from keyhole.learners.published.nuclear_norm import least_nuclear_norm


def measured(seed: int, width: int, rank: int, count: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width))
    left, right = rng.standard_normal((2, count, width))
    return matrix, left, right, np.einsum("md,de,me->m", left, matrix, right)


def test_enough_measurements_give_the_matrix() -> None:
    matrix, left, right, products = measured(0, 12, 1, 72)
    found = least_nuclear_norm(left, right, products)
    assert np.linalg.norm(found.matrix - matrix) <= 1e-6 * np.linalg.norm(matrix)
    assert found.rank == 1
    assert found.gap < 1e-6
    assert found.unique


def test_too_few_measurements_give_another_matrix_of_smaller_norm() -> None:
    matrix, left, right, products = measured(1, 12, 2, 60)
    found = least_nuclear_norm(left, right, products)
    again = np.einsum("md,de,me->m", left, found.matrix, right)
    np.testing.assert_allclose(again, products, atol=1e-5 * np.abs(products).max())
    norms = [np.linalg.svd(m, compute_uv=False).sum() for m in (found.matrix, matrix)]
    assert norms[0] < norms[1]
    assert found.rank > 2


def test_the_scale_of_the_matrix_does_not_matter() -> None:
    matrix, left, right, products = measured(2, 8, 1, 48)
    for scale in (1e-8, 1e8):
        found = least_nuclear_norm(left, right, scale * products)
        assert np.linalg.norm(found.matrix / scale - matrix) <= 1e-6 * np.linalg.norm(matrix)
