import numpy as np
import pytest

from keyhole.learners.single_head.operating_point import (
    STRETCH,
    Shape,
    Stretched,
    bias_length,
    evening,
    free_lengths,
    stretch,
)
from keyhole.linalg.bases import random_basis
from keyhole.measurement.linear_response import LinearPart, measure_values
from keyhole.measurement.log_odds import TARGET_SPREAD
from keyhole.models.attention import Attention
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle

WIDTH = 6


def linear(offset: float = 0.0) -> LinearPart:
    drawn = attention(np.random.default_rng(0), WIDTH)
    return measure_values(open_oracle(Attention(drawn.heads, offset)), np.random.default_rng(0))


def shape() -> Shape:
    left = np.linalg.qr(np.random.default_rng(1).standard_normal((WIDTH, 2)))[0]
    return evening(left, np.array([3.0, 0.01]))


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("axis", [False, True])
def test_products_and_solve_are_what_rows_say(axis: bool, shaped: bool) -> None:
    rng = np.random.default_rng(2)
    direction = np.linalg.qr(rng.standard_normal((WIDTH, 1)))[0][:, 0] if axis else np.zeros(WIDTH)
    probes = Stretched(random_basis(rng, WIDTH), 50.0, 2.0, direction, shape() if shaped else None)
    rows, vectors = probes.rows(np.arange(WIDTH)), rng.standard_normal((3, WIDTH))
    np.testing.assert_allclose(probes.products(vectors), rows @ vectors.T, rtol=1e-9)
    np.testing.assert_allclose(probes.solve((rows @ vectors.T).T), vectors, rtol=1e-9)


@pytest.mark.parametrize("axis", [0.0, 1.0])
def test_solve_variance_is_that_of_independent_errors(axis: float) -> None:
    rng = np.random.default_rng(3)
    direction = axis * rng.standard_normal(WIDTH)
    direction /= max(float(np.linalg.norm(direction)), 1.0)
    basis = random_basis(rng, WIDTH)
    shaped = Stretched(basis, 4.0, 4.0, np.zeros(WIDTH), shape())
    for probes in (shaped, Stretched(basis, 4.0, 0.25 if axis else 4.0, direction)):
        errors = 1.0 + 0.1 * rng.random((1, WIDTH))
        draws = probes.solve(errors * rng.standard_normal((20_000, WIDTH)))
        stated = np.sqrt(probes.solve_variance(errors**2)[0])
        np.testing.assert_allclose(np.std(draws, axis=0), stated, rtol=0.05)


def test_digests_tell_probes_apart() -> None:
    basis, axis = random_basis(np.random.default_rng(4), WIDTH), np.eye(WIDTH)[0]
    probes = [
        Stretched(basis, 1.0, 2.0, axis),
        Stretched(basis, 2.0, 1.0, axis),
        Stretched(basis, 1.0, 2.0, -axis),
        Stretched(basis, 1.0, 2.0, axis, shape()),
    ]
    assert len({p.digest() for p in probes}) == 4


def test_evening_lengthens_what_is_weak() -> None:
    even = shape()
    np.testing.assert_allclose(even.matrix @ even.inverse, np.eye(WIDTH), atol=1e-12)
    singular = np.linalg.svd(even.matrix, compute_uv=False)
    assert singular[0] / singular[-1] == pytest.approx(np.sqrt(300.0))


@pytest.mark.parametrize("product", [1e-6, 1.0, 1e6])
def test_free_lengths_make_probes_long_and_keep_the_product(product: float) -> None:
    probe, anchor = free_lengths(product, linear(), 0.3, np.inf)
    assert probe * anchor == pytest.approx(product)
    assert probe > 1e5 * anchor
    probe, anchor = free_lengths(product, linear(offset=1e9), 0.3, np.inf)
    assert probe * 0.3 > 1e5 * 1e9  # the offset is small beside the probe's value
    probe, anchor = free_lengths(product, linear(), 0.3, 2.0)
    assert max(probe, anchor) <= 2.0


def test_the_stretch_has_limits() -> None:
    for offset in (0.0, 1e12):
        length = stretch(1.0, 0.5, linear(offset), 0.3, 8.0, np.inf)
        assert 1.0 <= length <= STRETCH
    assert stretch(1.0, 0.5, linear(1e12), 0.3, 8.0, 3.0) <= 3.0


def test_a_probe_along_the_key_bias_scores_the_target() -> None:
    assert bias_length(10.0, 16, np.inf) * 10.0 / 4.0 == pytest.approx(TARGET_SPREAD)
    assert bias_length(1e-9, 16, 2.0) == 2.0
