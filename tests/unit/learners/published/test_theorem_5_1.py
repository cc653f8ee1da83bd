"""A fixed set of measurements: enough of them give the score, too few an honest answer."""

import sys
from typing import Any

import numpy as np
import pytest

import keyhole
from boxes import CountingBox
from keyhole.learners.published.theorem_5_1 import minimise_nuclear_norm
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.base import Spec

MODEL = attention(np.random.default_rng(0), 24, rank=2)


def test_the_promise_of_the_paper() -> None:
    box = CountingBox(MODEL, 24)
    learner = keyhole.LowRank("convex", measurements=6 * 2 * 24)
    recovery = keyhole.recover(box, learner)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.details["rank"] == 2
    assert keyhole.distance(recovery.model, MODEL) <= 1e-12
    assert recovery.details["program_rank"] == 2  # the program itself found it
    assert recovery.details["program_gap"] < 1e-6
    spare = 12 + 12 + recovery.ledger.by_purpose["verification"]  # calibration, prelude
    assert recovery.ledger.paid == box.seen <= 6 * 2 * 24 + 24 + spare


def test_nothing_after_the_calibration_depends_on_the_answers() -> None:
    """Two boxes of the same scale are asked the same pairs, up to the common length."""
    asked: list[np.ndarray] = []
    for seed in (1, 2):
        model, heard = attention(np.random.default_rng(seed), 12, rank=1), []

        def box(tokens: np.ndarray, model: Attention = model, heard: list = heard) -> np.ndarray:
            heard.append(tokens)
            return model(tokens)

        keyhole.recover(
            keyhole.open_oracle(box, width=12),
            keyhole.LowRank("convex", measurements=100),
            verify=False,
            throw=False,
        )
        batch = max(heard, key=len)  # the fixed set but for the calibration
        assert batch.shape == (88, 2, 12)
        anchors = batch[:, 1]
        asked.append(anchors / np.linalg.norm(anchors, axis=1, keepdims=True))
    np.testing.assert_allclose(asked[0], asked[1], atol=1e-12)


@pytest.mark.parametrize("measurements", [30, 60, 90, 110, 140, 200])
def test_fewer_and_fewer_measurements_never_give_a_wrong_answer(measurements: int) -> None:
    learner = keyhole.LowRank("convex", measurements=measurements)
    recovery = keyhole.recover(MODEL, learner, throw=False)
    if recovery.outcome is keyhole.Outcome.RECOVERED:
        assert keyhole.distance(recovery.model, MODEL) <= 1e-6
    else:
        assert recovery.outcome is keyhole.Outcome.ILL_CONDITIONED
        assert recovery.model is None
        assert "measurements" in recovery.reason
    if measurements < 2 * 2 * 24:  # about as many as the score has unknowns
        assert recovery.outcome is keyhole.Outcome.ILL_CONDITIONED


def test_hopeless_numbers_cost_nothing() -> None:
    box = CountingBox(MODEL, 24)
    with pytest.raises(keyhole.IllConditioned, match="measurements=288"):
        keyhole.recover(box, keyhole.LowRank("convex", rank=2, measurements=90))
    assert box.seen == 0


@pytest.mark.parametrize("width", [1, 2, 3])
def test_small_widths_are_asked_enough(width: int) -> None:
    secret = attention(np.random.default_rng(width), width, rank=1)
    found = keyhole.recover(secret, keyhole.LowRank("convex"))
    assert keyhole.distance(found.model, secret) < 1e-8
    with pytest.raises(keyhole.IllConditioned, match="Take measurements=") as caught:
        keyhole.recover(secret, keyhole.LowRank("convex", measurements=10))
    advised = int(str(caught.value).partition("measurements=")[2].partition(",")[0])
    keyhole.recover(secret, keyhole.LowRank("convex", measurements=advised))


def test_a_score_of_full_rank_is_not_mistaken_for_one_of_low_rank() -> None:
    model = attention(np.random.default_rng(1), 12)
    for learner in (keyhole.LowRank("convex", rank=2), keyhole.LowRank("convex")):
        recovery = keyhole.recover(model, learner, throw=False)
        assert recovery.outcome is keyhole.Outcome.ILL_CONDITIONED
        assert recovery.model is None
    everything = keyhole.LowRank("convex", measurements=200)  # more than unknowns
    assert keyhole.distance(keyhole.recover(model, everything).model, model) <= 1e-10


@pytest.mark.parametrize(
    ("width", "rank", "options"),
    [
        (16, 1, {"bias": True}),
        (16, 2, {"outputs": 3}),
        (48, 3, {}),
        (48, 2, {"bias": True, "outputs": 4}),
    ],
)
def test_key_bias_vector_answers_and_larger_widths(
    width: int, rank: int, options: dict[str, Any]
) -> None:
    model = attention(np.random.default_rng(width), width, rank=rank, **options)
    recovery = keyhole.recover(model, keyhole.LowRank("convex", rank=rank))
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.details["rank"] == rank
    assert keyhole.distance(recovery.model, model) <= 1e-11


def test_singular_values_over_four_decades() -> None:
    rng = np.random.default_rng(3)
    left, right = (np.linalg.qr(rng.standard_normal((40, 3)))[0] for _ in range(2))
    score = (left * np.array([1.0, 1e-2, 1e-4]), right.T)
    model = Attention([Head(score, None, rng.standard_normal(40))])
    recovery = keyhole.recover(model, keyhole.LowRank("convex", measurements=6 * 3 * 40))
    assert recovery.details["rank"] == 3
    assert keyhole.distance(recovery.model, model) <= 1e-11


def test_float32_and_the_size_of_the_errors() -> None:
    single = attention(np.random.default_rng(4), 40, rank=2).astype(np.float32)
    box = keyhole.open_oracle(lambda tokens: single(tokens.astype(np.float32)), width=40)
    recovery = keyhole.recover(box, keyhole.LowRank("convex", rank=2))
    truth, found = single.astype(np.float64).heads[0].score, recovery.model.heads[0].score
    left, right = recovery.errors.heads[0].score_factors
    stated = np.linalg.norm(np.sqrt(left**2 @ right**2))
    assert np.linalg.norm(found - truth) <= 1e-5 * np.linalg.norm(truth)
    assert 0.05 * stated <= np.linalg.norm(found - truth) <= 4.0 * stated


def test_tolerance_accepts_a_tail() -> None:
    rng = np.random.default_rng(5)
    left, right = (np.linalg.qr(rng.standard_normal((40, 40)))[0] for _ in range(2))
    tail = np.concatenate([[1.0, 0.7], np.full(38, 1e-6)])
    model = Attention([Head((left * tail) @ right.T, None, rng.standard_normal(40))])
    plain = keyhole.LowRank("convex", rank=2)
    assert keyhole.recover(model, plain, throw=False).outcome is keyhole.Outcome.ILL_CONDITIONED
    loose = keyhole.LowRank("convex", rank=2, tolerance=1e-4)
    recovery = keyhole.recover(model, loose, throw=False)
    assert recovery.outcome is keyhole.Outcome.RECOVERED, recovery.reason
    assert keyhole.distance(recovery.model, model) <= 1e-4
    assert recovery.details["truncation"] > 0


def test_without_cvxpy_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvxpy", None)  # importing it raises ImportError
    box = CountingBox(MODEL, 24)
    with pytest.raises(keyhole.MissingExtra, match="pip install"):
        keyhole.recover(box, keyhole.LowRank("convex", rank=2))
    assert box.seen == 0


def test_the_forecast() -> None:
    assert keyhole.LowRank("convex", rank=2).expected_queries(Spec(24)) == 6 * 2 * 24 + 24 + 4
    assert keyhole.LowRank().expected_queries(Spec(24)) is None


# -- the program: against the truth, and against its own dual ----------------------------------


def measured(seed: int, width: int, rank: int, count: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width))
    left, right = rng.standard_normal((2, count, width))
    return matrix, left, right, np.einsum("md,de,me->m", left, matrix, right)


def test_enough_measurements_give_the_matrix() -> None:
    matrix, left, right, products = measured(0, 12, 1, 72)
    found = minimise_nuclear_norm(left, right, products)
    assert np.linalg.norm(found.matrix - matrix) <= 1e-6 * np.linalg.norm(matrix)
    assert found.rank == 1
    assert found.gap < 1e-6
    assert found.unique


def test_too_few_measurements_give_another_matrix_of_smaller_norm() -> None:
    matrix, left, right, products = measured(1, 12, 2, 60)
    found = minimise_nuclear_norm(left, right, products)
    again = np.einsum("md,de,me->m", left, found.matrix, right)
    np.testing.assert_allclose(again, products, atol=1e-5 * np.abs(products).max())
    norms = [np.linalg.svd(m, compute_uv=False).sum() for m in (found.matrix, matrix)]
    assert norms[0] < norms[1]
    assert found.rank > 2


def test_the_scale_of_the_matrix_does_not_matter() -> None:
    matrix, left, right, products = measured(2, 8, 1, 48)
    for scale in (1e-8, 1e8):
        found = minimise_nuclear_norm(left, right, scale * products)
        assert np.linalg.norm(found.matrix / scale - matrix) <= 1e-6 * np.linalg.norm(matrix)
