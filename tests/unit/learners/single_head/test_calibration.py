import numpy as np
import pytest

from boxes import CountingBox
from keyhole.learners.single_head.calibration import (
    LONGEST_ACROSS,
    Equilibration,
    KeyBias,
    Probes,
    choose_length_across,
    choose_length_along,
    choose_lengths,
    draw_probes,
    measure_key_bias,
)
from keyhole.linalg.bases import random_basis
from keyhole.measurement.linear_response import LinearPart, measure_values
from keyhole.measurement.log_odds import TARGET_SPREAD
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle

WIDTH = 6


def linear(offset: float = 0.0) -> LinearPart:
    drawn = attention(np.random.default_rng(0), WIDTH)
    return measure_values(open_oracle(Attention(drawn.heads, offset)), np.random.default_rng(0))


def equilibration() -> Equilibration:
    left = np.linalg.qr(np.random.default_rng(1).standard_normal((WIDTH, 2)))[0]
    return Equilibration.of(left, np.array([3.0, 0.01]))


@pytest.mark.parametrize("shaped", [False, True])
@pytest.mark.parametrize("axis", [False, True])
def test_products_and_solve_are_what_rows_say(axis: bool, shaped: bool) -> None:
    rng = np.random.default_rng(2)
    direction = np.linalg.qr(rng.standard_normal((WIDTH, 1)))[0][:, 0] if axis else np.zeros(WIDTH)
    probes = Probes(
        random_basis(rng, WIDTH), 50.0, 2.0, direction, equilibration() if shaped else None
    )
    rows, vectors = probes.rows(np.arange(WIDTH)), rng.standard_normal((3, WIDTH))
    np.testing.assert_allclose(probes.products(vectors), rows @ vectors.T, rtol=1e-9)
    np.testing.assert_allclose(probes.solve((rows @ vectors.T).T), vectors, rtol=1e-9)


@pytest.mark.parametrize("axis", [0.0, 1.0])
def test_solve_variance_is_that_of_independent_errors(axis: float) -> None:
    rng = np.random.default_rng(3)
    direction = axis * rng.standard_normal(WIDTH)
    direction /= max(float(np.linalg.norm(direction)), 1.0)
    basis = random_basis(rng, WIDTH)
    shaped = Probes(basis, 4.0, 4.0, np.zeros(WIDTH), equilibration())
    for probes in (shaped, Probes(basis, 4.0, 0.25 if axis else 4.0, direction)):
        errors = 1.0 + 0.1 * rng.random((1, WIDTH))
        draws = probes.solve(errors * rng.standard_normal((20_000, WIDTH)))
        stated = np.sqrt(probes.solve_variance(errors**2)[0])
        np.testing.assert_allclose(np.std(draws, axis=0), stated, rtol=0.05)


def test_digests_tell_probes_apart() -> None:
    basis, axis = random_basis(np.random.default_rng(4), WIDTH), np.eye(WIDTH)[0]
    probes = [
        Probes(basis, 1.0, 2.0, axis),
        Probes(basis, 2.0, 1.0, axis),
        Probes(basis, 1.0, 2.0, -axis),
        Probes(basis, 1.0, 2.0, axis, equilibration()),
    ]
    assert len({p.digest() for p in probes}) == 4


def test_equilibration_lengthens_what_is_weak() -> None:
    even = equilibration()
    np.testing.assert_allclose(even.matrix @ even.inverse, np.eye(WIDTH), atol=1e-12)
    singular = np.linalg.svd(even.matrix, compute_uv=False)
    assert singular[0] / singular[-1] == pytest.approx(np.sqrt(300.0))


@pytest.mark.parametrize("product", [1e-6, 1.0, 1e6])
def test_lengths_make_probes_long_and_keep_the_product(product: float) -> None:
    probe, anchor = choose_lengths(product, linear(), 0.3, np.inf)
    assert probe * anchor == pytest.approx(product)
    assert probe > 1e5 * anchor
    probe, anchor = choose_lengths(product, linear(offset=1e9), 0.3, np.inf)
    assert probe * 0.3 > 1e5 * 1e9  # the offset is small beside the probe's value
    probe, anchor = choose_lengths(product, linear(), 0.3, 2.0)
    assert max(probe, anchor) <= 2.0


def test_the_length_across_a_key_bias_has_limits() -> None:
    for offset in (0.0, 1e12):
        length = choose_length_across(1.0, 0.5, linear(offset), 0.3, 8.0, np.inf)
        assert 1.0 <= length <= LONGEST_ACROSS
    assert choose_length_across(1.0, 0.5, linear(1e12), 0.3, 8.0, 3.0) <= 3.0


def test_a_probe_along_the_key_bias_scores_the_target() -> None:
    assert choose_length_along(10.0, 16, np.inf) * 10.0 / 4.0 == pytest.approx(TARGET_SPREAD)
    assert choose_length_along(1e-9, 16, 2.0) == 2.0


WIDE = 16


def measured(model: Attention) -> tuple[KeyBias, int]:
    box = CountingBox(model, WIDE)
    oracle = open_oracle(box)
    linear = measure_values(oracle, np.random.default_rng(0))
    group = 1 if model.outputs is None else min(model.outputs, WIDE)
    overlap = draw_probes(oracle.spec, linear, np.random.default_rng(0))
    assert overlap.group == group
    box.seen = 0
    return measure_key_bias(oracle, linear, overlap), box.seen


@pytest.mark.parametrize("offset", [0.0, 1.0, 1e3])
@pytest.mark.parametrize("outputs", [None, 4])
def test_no_key_bias_costs_one_query(outputs: int | None, offset: float) -> None:
    drawn = attention(np.random.default_rng(1), WIDE, outputs=outputs, scale=1e3)
    found, asked = measured(Attention(drawn.heads, offset))
    assert asked == 1
    assert not found.vector.any()


@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("outputs", [None, 4])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_key_bias_is_found_near_the_floor(
    size: float, outputs: int | None, offset: float
) -> None:
    rng = np.random.default_rng(2)
    (head,) = attention(rng, WIDE, outputs=outputs).heads
    bias = size * rng.standard_normal(WIDE)
    found, asked = measured(Attention([Head(head.score, bias, head.value)], offset))
    floor = WIDE if outputs is None else WIDE // outputs
    assert asked <= floor + 8
    error = np.abs(found.vector - bias)
    # a strong bias against an offset shortens the probes, and the offset's rounding shows
    assert np.linalg.norm(error) < 1e-13 * max(1.0, size) * np.linalg.norm(bias)
    assert np.linalg.norm(error) < 4 * np.linalg.norm(found.error)


def test_a_sparse_key_bias() -> None:
    (head,) = attention(np.random.default_rng(3), WIDE).heads
    bias = np.zeros(WIDE)
    bias[5] = 2.0
    found, _ = measured(Attention([Head(head.score, bias, head.value)]))
    np.testing.assert_allclose(found.vector, bias, atol=1e-14)
