"""Boxes that are something else must be rejected, with a counterexample."""

import numpy as np
import pytest

import keyhole
from boxes import impostors
from keyhole.models.random import attention

NAMES = list(impostors(8))


@pytest.mark.parametrize("width", [8, 24])
@pytest.mark.parametrize("name", NAMES)
def test_impostor_is_rejected_with_a_counterexample(name: str, width: int) -> None:
    box = keyhole.open_oracle(impostors(width, seed=width)[name], width=width)
    recovery = keyhole.recover(box, keyhole.SingleHead(), throw=False)
    assert recovery.outcome is keyhole.Outcome.REJECTED, recovery.reason
    assert recovery.verdict is not None
    assert not recovery.verdict.agrees
    example = recovery.verdict.counterexample
    assert example is not None
    assert example.input.shape[1] == width
    assert not np.allclose(example.box_answer, example.model_answer, rtol=1e-9, atol=0)


def test_noise_beyond_the_stated_precision_is_rejected() -> None:
    secret, rng = attention(np.random.default_rng(0), 12), np.random.default_rng(1)

    def noisy(tokens: np.ndarray) -> np.ndarray:
        return secret(tokens) + 1e-6 * rng.standard_normal(len(tokens))

    box = keyhole.open_oracle(noisy, width=12, precision=keyhole.NoiseModel())
    recovery = keyhole.recover(box, keyhole.SingleHead(), throw=False)
    assert recovery.outcome is keyhole.Outcome.REJECTED
    assert recovery.verdict is not None
    assert recovery.verdict.counterexample is not None


def test_throwing_carries_the_recovery() -> None:
    box = keyhole.open_oracle(impostors(8)["two heads"], width=8)
    with pytest.raises(keyhole.WrongFamily) as caught:
        keyhole.recover(box, keyhole.SingleHead())
    assert caught.value.recovery.outcome is keyhole.Outcome.REJECTED
