"""Rows that stay orthonormal whatever is taken out of them."""

import numpy as np
import pytest

from keyhole.linalg.reflections import turned, without


def orthonormal(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((width, count)))[0].T


@pytest.mark.parametrize("taken", [1, 3, 7])
@pytest.mark.parametrize("where", ["anywhere", "last", "first"])
def test_what_is_taken_out_is_gone_and_the_rest_is_there(taken: int, where: str) -> None:
    rng = np.random.default_rng(taken)
    rows = orthonormal(rng, 7, 10)
    eye = np.eye(7)
    weights = {
        "anywhere": orthonormal(rng, taken, 7),
        "last": -eye[7 - taken :],
        "first": eye[:taken],
    }[where]
    left = without(rows.copy(), weights)
    whole = np.vstack([left, weights @ rows])
    assert left.shape == (7 - taken, 10)
    np.testing.assert_allclose(whole @ whole.T, np.eye(7), atol=1e-14)
    np.testing.assert_allclose(whole.T @ whole, rows.T @ rows, atol=1e-14)


def test_turned_rows_see_a_vector_as_they_should() -> None:
    rng = np.random.default_rng(0)
    rows, vector = orthonormal(rng, 5, 8), rng.standard_normal(8)
    even = turned(rows.copy(), rows @ vector, np.ones(5))
    seen = even @ vector
    np.testing.assert_allclose(seen, np.full(5, np.linalg.norm(rows @ vector) / np.sqrt(5.0)))
    np.testing.assert_allclose(even @ even.T, np.eye(5), atol=1e-14)
    assert turned(rows, np.zeros(5), np.ones(5)) is rows
    assert turned(rows, np.ones(5), 2.0 * np.ones(5)) is rows
