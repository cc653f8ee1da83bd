import numpy as np
import pytest

from keyhole.linalg import bases
from keyhole.linalg.bases import (
    DenseBasis,
    KroneckerBasis,
    complement_rows,
    equal_overlap,
    random_basis,
    reflect_rows,
)


def matrix(basis: bases.Basis) -> np.ndarray:
    return basis.rows(np.arange(basis.width))


def orthonormal(rng: np.random.Generator, width: int, rank: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((width, rank)))[0]


@pytest.fixture(params=["dense", "kronecker"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type:
    """Both representations at small width."""
    if request.param == "kronecker":
        monkeypatch.setattr(bases, "DENSE_LIMIT", 0)
        return KroneckerBasis
    return DenseBasis


@pytest.mark.parametrize("width", [1, 2, 7, 12])
def test_a_basis_is_orthonormal_and_knows_its_coordinates(kind: type, width: int) -> None:
    rng = np.random.default_rng(width)
    first = orthonormal(rng, width, 1)[:, 0]
    for basis in (
        random_basis(rng, width),
        random_basis(rng, width, first),
        equal_overlap(rng, first[:, None]),
    ):
        assert isinstance(basis, kind)
        members = matrix(basis)
        np.testing.assert_allclose(members @ members.T, np.eye(width), atol=1e-14)
        vectors = rng.standard_normal((3, width))
        np.testing.assert_allclose(basis.coordinates(vectors), vectors @ members.T, atol=1e-14)
        np.testing.assert_allclose(basis.combine(vectors), vectors @ members, atol=1e-14)
        again = basis.combine(basis.coordinates(vectors))
        np.testing.assert_allclose(again, vectors, atol=1e-14)


def test_the_first_member_is_the_one_asked_for(kind: type) -> None:
    rng = np.random.default_rng(0)
    for first in (orthonormal(rng, 12, 1)[:, 0], np.eye(12)[3], -np.eye(12)[0]):
        basis = random_basis(rng, 12, first)
        np.testing.assert_allclose(basis.rows(np.zeros(1, dtype=np.int64))[0], first, atol=1e-15)


@pytest.mark.parametrize(
    "value", [np.eye(12)[0], np.ones(12) / np.sqrt(12), -np.ones(12) / np.sqrt(12)]
)
def test_every_probe_overlaps_equally_with_the_value(kind: type, value: np.ndarray) -> None:
    overlap = matrix(equal_overlap(np.random.default_rng(1), value[:, None])) @ value
    np.testing.assert_allclose(np.abs(overlap), 1 / np.sqrt(12), atol=1e-15)


@pytest.mark.parametrize(("width", "rank"), [(12, 3), (12, 12), (13, 4), (5, 2), (3, 3)])
def test_every_group_overlaps_equally_with_the_value_map(width: int, rank: int) -> None:
    rng = np.random.default_rng(2)
    value = orthonormal(rng, width, rank)
    members = matrix(equal_overlap(rng, value))
    np.testing.assert_allclose(members @ members.T, np.eye(width), atol=1e-13)
    for start in range(0, width - rank + 1, rank):  # whole groups
        singular = np.linalg.svd(members[start : start + rank] @ value, compute_uv=False)
        assert singular[-1] > 0.5 * np.sqrt(rank / width)
        if width % rank == 0:
            np.testing.assert_allclose(singular, np.sqrt(rank / width), atol=1e-13)


def test_variances_travel_with_the_squares(kind: type) -> None:
    basis = random_basis(np.random.default_rng(3), 12)
    variances = np.random.default_rng(4).random((2, 12))
    np.testing.assert_allclose(
        basis.combine_squared(variances), variances @ matrix(basis) ** 2, atol=1e-14
    )


def test_random_means_random_and_seeded() -> None:
    one, same, other = (random_basis(np.random.default_rng(seed), 6) for seed in (0, 0, 1))
    assert one.digest() == same.digest() != other.digest()
    assert np.array_equal(matrix(one), matrix(same))


def test_a_large_basis_is_small_in_memory() -> None:
    basis = random_basis(np.random.default_rng(0), 4096)
    assert isinstance(basis, KroneckerBasis)
    assert basis.outer.size + basis.inner.size + basis.mirror.size < 4 * 4096


def test_a_prime_width_still_has_a_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bases, "DENSE_LIMIT", 0)
    members = matrix(random_basis(np.random.default_rng(0), 13))
    np.testing.assert_allclose(members @ members.T, np.eye(13), atol=1e-14)


def orthonormal_rows(rng: np.random.Generator, count: int, width: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((width, count)))[0].T


@pytest.mark.parametrize("taken", [1, 3, 7])
@pytest.mark.parametrize("where", ["anywhere", "last", "first"])
def test_what_is_taken_out_is_gone_and_the_rest_is_there(taken: int, where: str) -> None:
    rng = np.random.default_rng(taken)
    rows = orthonormal_rows(rng, 7, 10)
    eye = np.eye(7)
    weights = {
        "anywhere": orthonormal_rows(rng, taken, 7),
        "last": -eye[7 - taken :],
        "first": eye[:taken],
    }[where]
    left = complement_rows(rows.copy(), weights)
    whole = np.vstack([left, weights @ rows])
    assert left.shape == (7 - taken, 10)
    np.testing.assert_allclose(whole @ whole.T, np.eye(7), atol=1e-14)
    np.testing.assert_allclose(whole.T @ whole, rows.T @ rows, atol=1e-14)


def test_reflected_rows_see_a_vector_as_they_should() -> None:
    rng = np.random.default_rng(0)
    rows, vector = orthonormal_rows(rng, 5, 8), rng.standard_normal(8)
    even = reflect_rows(rows.copy(), rows @ vector, np.ones(5))
    seen = even @ vector
    np.testing.assert_allclose(seen, np.full(5, np.linalg.norm(rows @ vector) / np.sqrt(5.0)))
    np.testing.assert_allclose(even @ even.T, np.eye(5), atol=1e-14)
    assert reflect_rows(rows, np.zeros(5), np.ones(5)) is rows
    assert reflect_rows(rows, np.ones(5), 2.0 * np.ones(5)) is rows
