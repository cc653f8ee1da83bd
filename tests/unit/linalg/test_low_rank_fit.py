"""Low-rank matrices from rank-one measurements by Gauss–Newton on the factors."""

import numpy as np
import pytest

from keyhole.linalg.low_rank_fit import (
    Factored,
    Measured,
    count_unknowns,
    find_leading,
    fit,
    fit_by_rank,
    scatter,
)


def measured(
    seed: int, width: int, singular: np.ndarray, count: int, error: float = 1e-15
) -> tuple[np.ndarray, Measured]:
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.standard_normal((width, len(singular))))[0] for _ in range(2))
    matrix = (left * singular) @ right.T
    a, b = rng.standard_normal((2, count, width))
    exact = np.einsum("md,de,me->m", a, matrix, b)
    noise = error * rng.standard_normal(count)
    return matrix, Measured(a, b, exact + noise, np.full(count, error))


def dense(found: Factored) -> np.ndarray:
    return (found.left * found.singular) @ found.right


def gap(found: Factored, matrix: np.ndarray) -> float:
    return float(np.linalg.norm(dense(found) - matrix) / np.linalg.norm(matrix))


@pytest.mark.parametrize("decades", [0.0, 4.0])
@pytest.mark.parametrize("seed", range(4))
def test_growing_rank_finds_the_matrix_at_its_rank(seed: int, decades: float) -> None:
    singular = 10.0 ** -np.linspace(0.0, decades, 3)
    matrix, data = measured(seed, 32, singular, 6 * 3 * 32)
    for found in fit_by_rank(data, 3, np.random.default_rng(seed)):
        if found.matrix.rank == 3:
            assert gap(found.matrix, matrix) <= 1e-12
        else:
            assert gap(found.matrix, matrix) >= 1e-5


def test_a_rank_too_high_still_gives_the_matrix() -> None:
    matrix, data = measured(0, 32, np.ones(2), 500)
    *_, found = fit_by_rank(data, 4, np.random.default_rng(0))
    assert found.matrix.rank == 4
    assert gap(found.matrix, matrix) <= 1e-12
    assert found.matrix.singular[2] <= 1e-12


def test_a_measurement_with_a_large_error_counts_little() -> None:
    matrix, data = measured(1, 24, np.ones(2), 400)
    products, errors = data.products.copy(), data.errors.copy()
    products[::10] += 1.0
    errors[::10] = 1e3
    data = Measured(data.left, data.right, products, errors)
    *_, found = fit_by_rank(data, 2, np.random.default_rng(1))
    assert gap(found.matrix, matrix) <= 1e-10


def test_scatter_is_what_noise_does() -> None:
    matrix, exact = measured(2, 24, np.ones(2), 400)
    rng, errors = np.random.default_rng(2), np.full(400, 1e-6)
    start = fit(exact, find_leading(exact, exact.products, 2, rng)).matrix
    noisy = []
    for _ in range(8):
        products = exact.products + errors * rng.standard_normal(400)
        data = Measured(exact.left, exact.right, products, errors)
        noisy.append(np.linalg.norm(dense(fit(data, start).matrix) - matrix))
    data = Measured(exact.left, exact.right, exact.products, errors)
    said = [np.linalg.norm(change.singular) for change in scatter(data, start, 8, rng)]
    assert 0.7 <= np.mean(noisy) / np.mean(said) <= 1.4


def test_leading_directions_of_a_residual() -> None:
    rng = np.random.default_rng(3)
    _, data = measured(3, 20, np.ones(1), 300)
    total = np.einsum("m,md,me->de", data.products, data.left, data.right)
    u, s, vt = np.linalg.svd(total)
    found = find_leading(data, data.products, 1, rng)
    assert abs(found.left[:, 0] @ u[:, 0]) > 1 - 1e-3 * s[1] / s[0]
    assert abs(found.right[0] @ vt[0]) > 1 - 1e-3 * s[1] / s[0]


def test_unknowns() -> None:
    assert count_unknowns(24, 2) == 92
    assert count_unknowns(5, 5) == 25


def test_factors_are_found_where_divide_and_conquer_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def give_up(matrix: np.ndarray) -> None:
        raise np.linalg.LinAlgError("SVD did not converge")

    monkeypatch.setattr(np.linalg, "svd", give_up)
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((6, 2)), rng.standard_normal((2, 5))
    found = Factored.of(left, right, 2)
    product = (found.left * found.singular) @ found.right
    np.testing.assert_allclose(product, left @ right, atol=1e-12)
