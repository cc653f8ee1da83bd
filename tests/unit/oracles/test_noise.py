import numpy as np
import pytest

from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF
from keyhole.errors import InvalidArgument
from keyhole.oracles.noise import DETECTION, REJECTION, ROUNDINGS, NoiseModel


def test_sigma_adds_what_scales_and_what_does_not() -> None:
    noise = NoiseModel(relative=1e-3, additive=3.0, step=4.0 * np.sqrt(12.0))
    assert noise.error_floor == pytest.approx(5.0)
    np.testing.assert_allclose(noise.sigma(np.array([0.0, -2000.0])), [5.0, 7.0])


def test_a_signal_is_seen_before_it_contradicts() -> None:
    noise = NoiseModel(additive=1.0)
    seen = DETECTION + 0.1
    assert noise.detects(seen, 0.0)
    assert not noise.rejects(seen, 0.0)
    assert noise.rejects(np.array([0.0, -REJECTION - 0.1]), 0.0)
    assert not noise.detects(np.array([1.0, -2.0]), 0.0)


def test_two_evaluations_of_one_sum_may_differ_by_roundings() -> None:
    noise = NoiseModel(relative=1e-7)
    assert not noise.rejects(0.9 * ROUNDINGS * 1e-7, 1.0)
    assert noise.rejects(1.1 * ROUNDINGS * 1e-7, 1.0)
    assert noise.apart(2.0) == pytest.approx(2.0 * ROUNDINGS * 1e-7)


def test_few_digits_and_error_floors_are_low_precision() -> None:
    assert not NoiseModel().low_precision
    assert not NoiseModel(SINGLE_ROUNDOFF).low_precision
    assert NoiseModel(2.0**-11).low_precision
    assert NoiseModel(step=0.01).low_precision


def test_numbers_end_where_those_of_the_format_end() -> None:
    assert NoiseModel().underflow < 1e-307
    assert 1e-38 < NoiseModel(SINGLE_ROUNDOFF).underflow < 2e-38
    assert NoiseModel(2.0**-8, format="bfloat16").underflow < 2e-38
    assert 5e-8 < NoiseModel(2.0**-11, format="float16").underflow < 6e-8


def test_the_name_tells_noise_first() -> None:
    assert NoiseModel(format="float32").name == "float32"
    assert NoiseModel(format="float32", repeatable=False).name == "noisy"


@pytest.mark.parametrize("wrong", [{"relative": 0.0}, {"additive": -1.0}, {"step": np.nan}])
def test_impossible_noise_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument):
        NoiseModel(**wrong)


def test_tokens_are_rounded_by_boxes_that_compute_in_short_numbers_alone() -> None:
    assert NoiseModel(1e-12).token_roundoff == UNIT_ROUNDOFF
    assert NoiseModel(SINGLE_ROUNDOFF).token_roundoff == SINGLE_ROUNDOFF
    assert NoiseModel(2.0**-8, format="bfloat16").token_roundoff == 2.0**-8
