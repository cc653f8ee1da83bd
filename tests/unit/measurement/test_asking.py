"""One way to ask for all kinds of boxes."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF
from keyhole.measurement.asking import Asker, few_digits
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.noise import DETECTION, NoiseModel

TOKENS = np.ones((3, 2, 4))


def test_scalars_are_vectors_of_one_output() -> None:
    ask = Asker(FunctionOracle(lambda tokens: tokens.sum(axis=(1, 2)), Spec(4)))
    np.testing.assert_array_equal(ask(TOKENS, "test"), np.full((3, 1), 8.0))
    assert ask.scalar
    vector = Asker(FunctionOracle(lambda tokens: tokens[:, 0], Spec(4)))
    assert vector(TOKENS, "test").shape == (3, 4)
    assert not vector.scalar
    assert vector(TOKENS[:0], "test").shape == (0, 4)


def test_an_offset_is_subtracted_by_another_asker_of_the_same_box() -> None:
    ask = Asker(FunctionOracle(lambda tokens: tokens[:, 0], Spec(4)))
    other = ask.subtracting(np.ones(4))
    np.testing.assert_array_equal(other(TOKENS, "test"), np.zeros((3, 4)))
    assert ask.offset == 0.0
    assert ask.outputs == 4  # what one has seen, the other knows


def test_answers_are_kept_as_they_came() -> None:
    ask = Asker(FunctionOracle(lambda tokens: tokens[:, 0], Spec(4)), np.ones(4))
    ask(TOKENS, "test")
    assert ask.transcript.queries == []
    replace(ask, recording=True)(TOKENS, "test")
    (kept,) = ask.transcript.queries
    np.testing.assert_array_equal(kept[1], TOKENS[:, 0])


def test_precision_is_what_was_seen_or_stated() -> None:
    single = Asker(FunctionOracle(lambda tokens: tokens[:, 0].astype(np.float32), Spec(4)))
    assert single.unit == UNIT_ROUNDOFF
    single(TOKENS, "test")
    assert single.unit == SINGLE_ROUNDOFF
    assert single.low_precision
    spec = Spec(4, precision=NoiseModel(relative=1e-3, additive=0.1))
    stated = Asker(FunctionOracle(lambda tokens: tokens[:, 0], spec))
    assert stated.unit == 1e-3
    assert stated.undetected == pytest.approx(DETECTION * 0.1)
    assert few_digits(spec)
    assert not few_digits(Spec(4))
