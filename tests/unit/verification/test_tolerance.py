import numpy as np
import pytest

from boxes import in_float32
from keyhole.models.attention import Attention, Head
from keyhole.models.base import replace_parameters
from keyhole.models.random import attention
from keyhole.oracles.noise import VERDICT, NoiseModel
from keyhole.verification.tolerance import OLD, Case, allow, judge, rate_changes, tell_noticed

MODEL = attention(np.random.default_rng(0), 6, bias=True)
TOKENS = np.random.default_rng(1).standard_normal((50, 7, 6))


def allowed(**precision: float) -> np.ndarray:
    return allow(MODEL, None, [TOKENS], NoiseModel(**precision), np.random.default_rng(2))[0]


def test_rounding_is_covered_but_little_more() -> None:
    gap = np.abs(in_float32(MODEL)(TOKENS) - MODEL(TOKENS))
    tolerance = allowed(relative=2.0**-24)
    assert (gap <= tolerance).all()
    assert np.median(tolerance) < 1e-4


def test_noise_and_steps_add_up() -> None:
    bare = allowed()
    np.testing.assert_allclose(allowed(additive=0.5) - bare, 0.5 * VERDICT, atol=1e-9)
    np.testing.assert_allclose(allowed(step=0.5) - bare, 0.25, atol=1e-9)


def test_near_ties_of_large_scores_get_more() -> None:
    one = np.outer(np.eye(6)[0], np.eye(6)[0])
    strong, plain = (Attention([Head(s * one, None, np.ones(6))]) for s in (1e6, 1.0))
    tie = np.ones((1, 2, 6))
    tie[0, 0, 3] = 5.0  # the score does not see it, the value does
    precision, rng = NoiseModel(), np.random.default_rng(3)
    wide, narrow = (allow(m, None, [tie], precision, rng)[0][0] for m in (strong, plain))
    assert wide > 1e3 * narrow


def test_standard_errors_widen_the_tolerance() -> None:
    errors = Attention(
        [Head(np.full((6, 6), 1e-3), np.full(6, 1e-3), np.full(6, 1e-3))], np.array(1e-3)
    )
    loose = allow(MODEL, errors, [TOKENS], NoiseModel(), np.random.default_rng(4))[0]
    assert np.median(loose) > 1e6 * np.median(allowed())


def test_a_model_without_parameters_is_disturbed_by_its_tokens_alone() -> None:
    def bare(tokens: np.ndarray) -> np.ndarray:
        return MODEL(tokens)

    tolerance = allow(bare, None, [TOKENS], NoiseModel(), np.random.default_rng(6))[0]
    assert tolerance.shape == (50,)
    assert (tolerance > 0).all()
    assert np.median(tolerance) == pytest.approx(np.median(allowed()), rel=20.0)


def test_entrywise_errors_of_a_score_in_factors_count() -> None:
    factored = attention(np.random.default_rng(7), 6, rank=2)
    dense = Attention([Head(h.score, h.key_bias, h.value) for h in factored.heads])
    errors = Attention([Head(np.full((6, 6), 1e-3), np.zeros(6), np.zeros(6))], np.array(0.0))
    loose, same = (
        np.median(allow(model, errors, [TOKENS], NoiseModel(), np.random.default_rng(8))[0])
        for model in (factored, dense)
    )
    assert loose == pytest.approx(same, rel=1.0)
    assert loose > 1e6 * np.median(allowed())


def test_a_change_beyond_the_noticed_one_is_noticed_and_a_smaller_one_is_not() -> None:
    noise, rng = NoiseModel(relative=1e-7), np.random.default_rng(9)
    judged = judge(MODEL, None, [Case.of(MODEL, TOKENS, MODEL(TOKENS), "fresh")], noise, rng)
    noticed = tell_noticed(rate_changes(MODEL, judged, rng))
    assert set(noticed) == {name for name, array in MODEL.to_arrays().items() if array.any()}
    for name, smallest in noticed.items():
        for factor, seen in ((4.0, True), (0.01, False)):
            array = np.asarray(MODEL.to_arrays()[name] * (1.0 + factor * smallest))
            other = replace_parameters(MODEL, {name: array})
            case = Case.of(MODEL, TOKENS, other(TOKENS), "fresh")
            (one,) = judge(MODEL, None, [case], noise, np.random.default_rng(10))
            assert (one.ratios.max() > 1.0) == seen, (name, factor)


@pytest.mark.parametrize("reason", [OLD, "fresh"])
def test_a_weight_below_the_smallest_number_of_the_format_may_be_zero(reason: str) -> None:
    """exp(-329) is a double, and zero in single precision."""
    head = Attention([Head(np.zeros((2, 2)), np.array([-1.0, 0.0]), np.ones(2))])
    faint = np.array([[[329.0, 1.0], [0.0, 0.0]]])
    plain = np.random.default_rng(11).standard_normal((3, 2, 2))
    assert 0.0 < head(faint)[0] < 1e-138

    def ratio(answer: float, precision: NoiseModel) -> float:
        cases = [
            Case.of(head, plain, head(plain), reason),
            Case.of(head, faint, np.array([answer]), reason),
        ]
        return float(judge(head, None, cases, precision, np.random.default_rng(12))[1].ratios[0])

    single = NoiseModel(relative=2.0**-24, format="float32")
    assert ratio(0.0, single) < 1.0
    assert ratio(1e-30, single) > 1.0
    assert ratio(0.0, NoiseModel()) > 1.0  # doubles have it
