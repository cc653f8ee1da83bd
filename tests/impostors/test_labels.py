"""Boxes whose labels are not those of one head must be rejected, with a counterexample."""

from collections.abc import Callable

import numpy as np
import pytest

import keyhole
from boxes import impostors
from keyhole.learners.label_only import LabelOnly
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.wrappers.degrade import BITS, Labels

WIDTH = 8
# a positive factor that drifts changes no label: seen through its labels, that box is a head
NAMES = [name for name in impostors(WIDTH) if name != "drift"]


def rejected(function: Callable[[np.ndarray], np.ndarray], seed: int = 0) -> keyhole.Recovery:
    box = Labels(keyhole.open_oracle(function, width=WIDTH), BITS if seed % 2 else Labels.coding)
    found = keyhole.recover(box, LabelOnly(), seed=seed, throw=False)
    assert found.outcome is keyhole.Outcome.REJECTED, (found.outcome, found.reason)
    example = found.verdict.counterexample
    assert example is not None
    assert example.input.shape[1] == WIDTH
    assert example.box_answer != example.model_answer
    return found


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_impostor_is_rejected(name: str, seed: int) -> None:
    function = impostors(WIDTH, seed=seed)[name]
    found = rejected(function, seed)
    example = found.verdict.counterexample
    sign = np.sign(function(example.input[None]))[0]
    assert example.box_answer == (sign if seed % 2 == 0 else float(sign > 0))


@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e3])
def test_an_offset_is_rejected_or_hides_everything(size: float) -> None:
    heads = attention(np.random.default_rng(1), WIDTH).heads
    found = keyhole.recover(
        Labels(keyhole.open_oracle(Attention(heads, size))), LabelOnly(), throw=False
    )
    hidden = keyhole.Outcome.NOT_IDENTIFIABLE
    assert found.outcome in (keyhole.Outcome.REJECTED, hidden if size > 10 else None)
    assert found.ledger.paid < 400


@pytest.mark.parametrize("size", [1e-5, 1e-2, 1.0])
def test_a_key_bias_is_rejected(size: float) -> None:
    head = attention(np.random.default_rng(2), WIDTH).heads[0]
    rejected(Attention([Head(head.score, size * np.ones(WIDTH), head.value)]))


def test_a_box_that_flips_some_labels_is_rejected() -> None:
    secret = attention(np.random.default_rng(3), WIDTH)

    def moody(x: np.ndarray) -> np.ndarray:
        hashed = np.modf(np.abs(x).sum(axis=(1, 2)) * 1e4)[0]
        return secret(x) * np.where(hashed < 0.03, -1.0, 1.0)

    rejected(moody)


def test_constant_labels_tell_nothing() -> None:
    head = attention(np.random.default_rng(3), WIDTH).heads[0]
    dead = Attention([Head(head.score, None, np.zeros(WIDTH))])
    for coding in (Labels.coding, BITS):
        box = Labels(keyhole.open_oracle(dead), coding)
        with pytest.raises(keyhole.NotIdentifiable, match="value"):
            keyhole.recover(box, LabelOnly())


def test_numbers_are_not_labels() -> None:
    with pytest.raises(keyhole.WrongFamily, match="not with labels"):
        keyhole.recover(attention(np.random.default_rng(0), WIDTH), LabelOnly())


def test_a_late_unknown_label_is_rejected() -> None:
    secret = attention(np.random.default_rng(0), WIDTH)

    def third(x: np.ndarray) -> np.ndarray:
        return np.sign(secret(x)) * (1.0 if x.shape[1] == 1 else 2.0)

    with pytest.raises(keyhole.WrongFamily, match="none of its labels"):
        keyhole.recover(keyhole.open_oracle(third, width=WIDTH), LabelOnly())
