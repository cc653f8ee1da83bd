"""One way to ask for all kinds of boxes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF
from keyhole.measurement.asker import Asker, few_digits, round_to_format
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.noise import DETECTION, NoiseModel
from keyhole.oracles.queries import QueryBatch

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


def test_queries_are_counted_and_rows_have_the_shape_of_answers() -> None:
    ask = Asker(FunctionOracle(lambda tokens: tokens.sum(axis=(1, 2)), Spec(4)), np.ones(1))
    first = ask(TOKENS, "test")
    assert ask.as_answered(first[0]).shape == ()
    again = ask.send(QueryBatch.of(TOKENS[:2], "test"))
    np.testing.assert_array_equal(again, np.full((2, 1), 8.0))  # as they came
    assert ask.spent == 5
    vector = Asker(FunctionOracle(lambda tokens: tokens[:, 0], Spec(4)))
    assert vector.as_answered(vector(TOKENS, "test")[0]).shape == (4,)


def test_precision_is_what_was_seen_or_stated() -> None:
    single = Asker(FunctionOracle(lambda tokens: tokens[:, 0].astype(np.float32), Spec(4)))
    assert single.unit == UNIT_ROUNDOFF
    single(TOKENS, "test")
    assert single.unit == SINGLE_ROUNDOFF
    assert single.affords(0.1)
    assert not single.affords(1e4)
    spec = Spec(4, precision=NoiseModel(relative=1e-3, additive=0.1))
    stated = Asker(FunctionOracle(lambda tokens: tokens[:, 0], spec))
    assert stated.unit == 1e-3
    assert stated.undetected == pytest.approx(DETECTION * 0.1)
    assert few_digits(spec)
    assert not few_digits(Spec(4))


FORMATS = {"bfloat16": 8, "float16": 11, "float32": 24, "float64": 53}


def make_box(name: str, scalar: bool) -> FunctionOracle:
    """Answers in float64, whose numbers are those of a format."""

    def answer(tokens: np.ndarray) -> np.ndarray:
        sums = np.tanh(tokens.sum(axis=1))
        rounded = sums if name == "float64" else round_to_format(sums, 2.0 ** -FORMATS[name])
        return rounded[:, 0] if scalar else rounded

    return FunctionOracle(answer, Spec(4))


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_the_number_format_is_seen_and_tokens_are_rounded_to_it(name: str, scalar: bool) -> None:
    ask = Asker(make_box(name, scalar), rounding=True, recording=True)
    assert ask.noise == NoiseModel()
    tokens = np.random.default_rng(0).standard_normal((20, 3, 4))
    assert ask(tokens, "test").shape == (20, 1 if scalar else 4)
    assert (ask.noise.format, ask.unit) == (name, 2.0 ** -FORMATS[name])
    ask(tokens, "test")
    first, second = (kept for kept, _ in ask.transcript.queries)
    np.testing.assert_array_equal(first, tokens)  # the format was not yet known
    np.testing.assert_array_equal(second, ask.representable(tokens))
    np.testing.assert_array_equal(second, ask.representable(second))


def test_one_round_number_is_no_short_format() -> None:
    ask = Asker(FunctionOracle(lambda tokens: tokens[:, 0, 0] + 0.5, Spec(4)))
    ask(np.zeros((1, 1, 4)), "test")
    assert ask.unit == UNIT_ROUNDOFF
    ask(np.random.default_rng(0).standard_normal((9, 1, 4)), "test")
    assert ask.noise.format == "float64"


def test_answers_in_a_stated_format_are_taken_for_no_finer_ones() -> None:
    spec = Spec(4, precision=NoiseModel(2.0**-8, format="bfloat16"))
    ask = Asker(FunctionOracle(lambda tokens: np.tanh(tokens[:, 0]), spec))
    ask(np.random.default_rng(0).standard_normal((9, 1, 4)), "test")
    assert ask.noise == spec.precision


def test_records_are_joined_by_length() -> None:
    ask = Asker(FunctionOracle(lambda tokens: tokens[:, -1], Spec(4)), offset=1.0)
    ask(TOKENS, "test")
    recorder = ask.recording_anew()
    for count, length in ((2, 3), (1, 1), (4, 3), (1, 4)):
        recorder(np.full((count, length, 4), float(length)), "test")
    pairs = recorder.pairs(longest=3)
    assert [tokens.shape for tokens, _ in pairs] == [(1, 1, 4), (6, 3, 4)]
    assert all(np.array_equal(answers, tokens[:, -1]) for tokens, answers in pairs)
    assert len(recorder.pairs()) == 3
    assert not ask.pairs()


def test_points_are_sequences_of_one_token() -> None:
    ask = Asker(FunctionOracle(lambda tokens: tokens[:, 0], Spec(4)))
    np.testing.assert_array_equal(ask.points(np.eye(4), "test"), np.eye(4))


@given(st.floats(-1e30, 1e30), st.sampled_from([8, 11, 24]))
def test_rounding_moves_a_number_by_a_unit_at_most_and_only_once(number: float, bits: int) -> None:
    once = round_to_format(np.array([number]), 2.0**-bits)
    assert abs(once[0] - number) <= 2.0**-bits * abs(number)
    np.testing.assert_array_equal(round_to_format(once, 2.0**-bits), once)
