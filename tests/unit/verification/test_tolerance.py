import numpy as np
import pytest

from boxes import in_float32
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.noise import NoiseModel
from keyhole.verification.tolerance import allowance

MODEL = attention(np.random.default_rng(0), 6, bias=True)
TOKENS = np.random.default_rng(1).standard_normal((50, 7, 6))


def allowed(**precision: float) -> np.ndarray:
    return allowance(MODEL, None, TOKENS, NoiseModel(**precision), np.random.default_rng(2))


def test_rounding_is_covered_but_little_more() -> None:
    gap = np.abs(in_float32(MODEL)(TOKENS) - MODEL(TOKENS))
    tolerance = allowed(relative=2.0**-24)
    assert (gap <= tolerance).all()
    assert np.median(tolerance) < 1e-4


def test_noise_and_steps_add_up() -> None:
    bare = allowed()
    np.testing.assert_allclose(allowed(additive=0.5) - bare, 3.0, atol=1e-9)
    np.testing.assert_allclose(allowed(step=0.5) - bare, 0.25, atol=1e-9)


def test_near_ties_of_large_scores_get_more() -> None:
    one = np.outer(np.eye(6)[0], np.eye(6)[0])
    strong, plain = (Attention([Head(s * one, None, np.ones(6))]) for s in (1e6, 1.0))
    tie = np.ones((1, 2, 6))
    tie[0, 0, 3] = 5.0  # the score does not see it, the value does
    precision, rng = NoiseModel(), np.random.default_rng(3)
    wide, narrow = (allowance(m, None, tie, precision, rng)[0] for m in (strong, plain))
    assert wide > 1e3 * narrow


def test_standard_errors_widen_the_tolerance() -> None:
    errors = Attention(
        [Head(np.full((6, 6), 1e-3), np.full(6, 1e-3), np.full(6, 1e-3))], np.array(1e-3)
    )
    loose = allowance(MODEL, errors, TOKENS, NoiseModel(), np.random.default_rng(4))
    assert np.median(loose) > 1e6 * np.median(allowed())


def test_a_model_without_parameters_is_disturbed_by_its_tokens_alone() -> None:
    def bare(tokens: np.ndarray) -> np.ndarray:
        return MODEL(tokens)

    tolerance = allowance(bare, None, TOKENS, NoiseModel(), np.random.default_rng(6))
    assert tolerance.shape == (50,)
    assert (tolerance > 0).all()
    assert np.median(tolerance) == pytest.approx(np.median(allowed()), rel=20.0)


def test_entrywise_errors_of_a_score_in_factors_count() -> None:
    factored = attention(np.random.default_rng(7), 6, rank=2)
    dense = Attention([Head(h.score, h.key_bias, h.value) for h in factored.heads])
    errors = Attention([Head(np.full((6, 6), 1e-3), np.zeros(6), np.zeros(6))], np.array(0.0))
    loose, same = (
        np.median(allowance(model, errors, TOKENS, NoiseModel(), np.random.default_rng(8)))
        for model in (factored, dense)
    )
    assert loose == pytest.approx(same, rel=1.0)
    assert loose > 1e6 * np.median(allowed())
