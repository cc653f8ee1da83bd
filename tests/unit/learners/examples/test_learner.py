"""The learner from examples: exact, noisy, scarce, reproducible."""

from pathlib import Path

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from example_layers import boolean, layer
from keyhole.errors import InvalidArgument, NotIdentifiable
from keyhole.learners.examples.data import build_examples
from keyhole.learners.examples.learner import ENOUGH, FromExamples
from keyhole.models.attention import Attention, Head, every_position
from keyhole.models.canonical import distance
from keyhole.models.random import attention
from keyhole.recovery import learn
from keyhole.results import Outcome, load


@pytest.mark.parametrize(
    ("d", "k", "heads", "scale", "n"),
    [
        (8, 4, 1, 1.0, 24),
        (8, 2, 2, 0.3, 128),
        (8, 4, 3, 1.0, 48),
        (8, 8, 2, 5.0, 16),
        (16, 8, 2, 1.0, 32),
        (16, 4, 3, 5.0, 96),
    ],
)
def test_recovers_at_four_times_the_floor(d: int, k: int, heads: int, scale: float, n: int) -> None:
    rng = np.random.default_rng(d + k + heads)
    truth = layer(rng, d, heads, scale)
    X = boolean(rng, n, k, d)
    found = learn(X, every_position(truth, X))
    assert found.outcome is Outcome.RECOVERED
    assert distance(found.model, truth) < 1e-11
    assert found.details["ratio"] == pytest.approx(4.0, rel=0.15)
    assert found.verdict is not None
    assert found.verdict.agrees
    assert found.verdict.queries >= 3


def test_last_position_and_scalar_outputs() -> None:
    rng = np.random.default_rng(5)
    for outputs in (3, None):
        truth = attention(rng, 4, outputs=outputs)
        X = rng.standard_normal((160, 5, 4))
        found = learn(X, truth(X))
        assert found.model.outputs == outputs
        assert distance(found.model, truth) < 1e-10


def test_key_bias_and_offset_are_fitted_on_demand() -> None:
    rng = np.random.default_rng(6)
    truth = attention(rng, 4, heads=2, outputs=3, scale=0.5, bias=True)
    X = rng.standard_normal((120, 4, 4))
    found = learn(X, every_position(truth, X), FromExamples(bias=True))
    assert found.outcome is Outcome.RECOVERED
    assert distance(found.model, truth) < 1e-10


def test_several_lengths_and_odd_units() -> None:
    rng = np.random.default_rng(7)
    truth = layer(rng, 6, 2)
    units = np.geomspace(1e-2, 1e3, 6)
    heads = [
        Head(h.score / units[:, None] / units, None, 1e5 * h.value / units[:, None])
        for h in truth.heads
    ]
    scaled = Attention(heads, truth.offset)
    X = [boolean(rng, 1, int(k), 6)[0] * units for k in rng.integers(1, 6, 80)]
    found = learn(X, [every_position(scaled, x[None])[0] for x in X])
    assert found.outcome is Outcome.RECOVERED
    assert distance(found.model, scaled) < 1e-9


def test_noise_gives_honest_errors() -> None:
    rng = np.random.default_rng(8)
    truth = layer(rng, 8, 2)
    X = boolean(rng, 80, 4, 8)
    Y = every_position(truth, X)
    within, sizes = [], []
    for trial in range(4):
        noise = 0.01 * np.sqrt(np.mean(Y**2)) * rng.standard_normal(Y.shape)
        found = learn(X, Y + noise, seed=trial)
        assert found.outcome is Outcome.RECOVERED
        assert found.details["noise"] == pytest.approx(0.01, rel=0.1)
        pairs = [
            min(range(2), key=lambda j, h=h: np.linalg.norm(h.score - found.model.heads[j].score))
            for h in truth.heads
        ]
        assert sorted(pairs) == [0, 1]
        for h, j in zip(truth.heads, pairs, strict=True):
            gap = found.model.heads[j].score - h.score
            within.append(np.abs(gap) < 2 * found.errors.heads[j].score)
            sizes.append(np.linalg.norm(gap) / np.linalg.norm(found.errors.heads[j].score))
    assert 0.90 < np.mean(within) < 0.99
    assert 0.8 < np.mean(sizes) < 1.2


def test_too_few_examples_are_said_to_be_too_few() -> None:
    rng = np.random.default_rng(9)
    X = boolean(rng, 4, 4, 8)
    Y = every_position(layer(rng, 8, 1), X)
    with pytest.raises(NotIdentifiable, match="too few") as caught:
        learn(X, Y)
    assert caught.value.recovery.outcome is Outcome.NOT_IDENTIFIABLE
    assert learn(X, Y, throw=False).model is None


def test_never_a_clean_verdict_for_a_wrong_model_near_the_floor() -> None:
    rng = np.random.default_rng(10)
    clean = 0
    for _ in range(25):
        d, k, heads = int(rng.choice([4, 6])), int(rng.choice([2, 4])), int(rng.integers(1, 3))
        truth = layer(rng, d, heads, float(rng.choice([0.3, 1.0, 5.0])))
        floor = max(2 * heads * d / k, d * d / (k * (k - 1)))
        X = boolean(rng, int(np.ceil(rng.uniform(0.5, 2.5) * floor)), k, d)
        found = learn(X, every_position(truth, X), FromExamples(restarts=6), throw=False)
        if found.outcome is Outcome.RECOVERED:
            clean += 1
            assert distance(found.model, truth) < 1e-8
    assert 0 < clean < 25


def test_a_vocabulary_too_small_is_not_identifiable() -> None:
    rng = np.random.default_rng(11)
    words = boolean(rng, 1, 3, 6)[0]
    X = words[rng.integers(0, 3, (60, 4))]
    found = learn(X, every_position(layer(rng, 6, 1), X), throw=False)
    assert found.outcome is Outcome.NOT_IDENTIFIABLE
    assert "span" in found.reason


@pytest.mark.parametrize(("d", "k", "n", "copies"), [(6, 4, 2, 12), (26, 6, 15, 6)])
def test_copies_of_examples_do_not_pass_for_examples(d: int, k: int, n: int, copies: int) -> None:
    rng = np.random.default_rng(15)
    X = np.repeat(boolean(rng, n, k, d), copies, axis=0)
    found = learn(X, every_position(layer(rng, d, 1), X), FromExamples(restarts=20), throw=False)
    assert found.outcome is Outcome.NOT_IDENTIFIABLE


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_constant_labels_tell_nothing(constant: float) -> None:
    X = boolean(np.random.default_rng(16), 40, 4, 6)
    found = learn(X, np.full(X.shape, constant), FromExamples(restarts=4), throw=False)
    assert found.outcome is not Outcome.RECOVERED


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
def test_tokens_beyond_all_arithmetic_end_in_a_sentence() -> None:
    X = 1e200 * boolean(np.random.default_rng(0), 40, 3, 4)
    recovery = learn(X, X[:, 0, 0], FromExamples(heads=1, seconds=1.0), throw=False)
    assert recovery.outcome is Outcome.ILL_CONDITIONED
    assert "scale tokens and answers" in recovery.reason


def test_too_many_heads_asked_for_are_not_given() -> None:
    rng = np.random.default_rng(17)
    X = boolean(rng, 60, 4, 6)
    Y = every_position(layer(rng, 6, 2), X)
    assert learn(X, Y, FromExamples(heads=2)).outcome is Outcome.RECOVERED
    wide = learn(X, Y, FromExamples(heads=3, restarts=6), throw=False)
    assert wide.outcome in (Outcome.NOT_IDENTIFIABLE, Outcome.ILL_CONDITIONED)
    narrow = learn(X, Y, FromExamples(heads=1, restarts=10), throw=False)
    assert narrow.outcome is Outcome.REJECTED


def test_single_precision_and_rounded_labels() -> None:
    rng = np.random.default_rng(18)
    truth = layer(rng, 6, 2)
    X = boolean(rng, 60, 4, 6)
    Y = every_position(truth, X)
    single = learn(X.astype(np.float32), Y.astype(np.float32))
    assert single.details["ending"] == "exact"
    assert distance(single.model, truth) < 1e-6
    rounded = learn(X, np.round(Y, 3))
    assert rounded.outcome is Outcome.RECOVERED
    assert rounded.details["ending"] == "noise"
    assert distance(rounded.model, truth) < 5e-3


def test_many_examples_are_searched_in_part_and_used_in_full() -> None:
    rng = np.random.default_rng(19)
    truth = layer(rng, 6, 1)
    X = boolean(rng, 3000, 4, 6)
    Y = every_position(truth, X)
    Y = Y + 0.1 * rng.standard_normal(Y.shape)
    found = learn(X, Y)
    assert len(build_examples(X, Y).rows.sample(8, ENOUGH, rng).tokens) < 1000
    gap = found.model.heads[0].score - truth.heads[0].score
    assert np.linalg.norm(gap) < 1.3 * np.linalg.norm(found.errors.heads[0].score)
    assert np.linalg.norm(gap) < 0.03


@pytest.mark.parametrize("other", [0.0, 1.0])
def test_a_head_that_attends_to_all_alike_is_recovered(other: float) -> None:
    rng = np.random.default_rng(23)
    value = rng.standard_normal((2, 6, 6))
    score = other * rng.standard_normal((6, 6)) / 6
    heads = [Head(np.zeros((6, 6)), None, value[0]), Head(score, None, value[1])]
    truth = Attention(heads[: 1 + int(other)], np.zeros(6))
    X = rng.standard_normal((60, 4, 6))
    found = learn(X, every_position(truth, X))
    assert found.outcome is Outcome.RECOVERED
    assert distance(found.model, truth) < 1e-10


def test_a_saved_run_reads_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(20)
    X = boolean(rng, 40, 4, 6)
    found = learn(X, every_position(layer(rng, 6, 1), X))
    again = load(found.save(tmp_path / "run"))
    assert again.outcome is Outcome.RECOVERED
    assert distance(again.model, found.model) == 0.0
    assert again.details["heads"] == 1


def test_same_seed_same_result_whatever_the_workers() -> None:
    rng = np.random.default_rng(12)
    truth = layer(rng, 6, 2)
    X = boolean(rng, 30, 4, 6)
    Y = every_position(truth, X)
    one = learn(X, Y, seed=3)
    again = learn(X, Y, FromExamples(workers=2), seed=3)
    for a, b in zip(one.model.heads, again.model.heads, strict=True):
        np.testing.assert_array_equal(a.score, b.score)
    assert one.details["restarts"] == again.details["restarts"]


def test_an_interrupted_search_hands_over_its_best_fit() -> None:
    rng = np.random.default_rng(12)
    X = boolean(rng, 64, 8, 8)
    told = []

    def stop_at_the_third(progress: object) -> None:
        told.append(progress)
        if len(told) == 3:
            raise KeyboardInterrupt

    Y = every_position(layer(rng, 8, 4, 5.0), X)
    found = learn(X, Y, progress=stop_at_the_third, throw=False)
    assert found.outcome is Outcome.INTERRUPTED
    assert found.model is not None
    assert "stopped after 3 restarts" in found.reason


def test_strong_attention_on_few_examples() -> None:
    rng = np.random.default_rng(1)
    truth, X = layer(rng, 8, 1, 5.0), boolean(rng, 4, 16, 8)
    found = learn(X, every_position(truth, X))
    assert len(found.model.heads) == 1
    assert distance(found.model, truth) <= 1e-9


def test_progress_tells_heads_restarts_and_residual() -> None:
    rng = np.random.default_rng(13)
    X = boolean(rng, 30, 4, 6)
    told: list[object] = []
    learn(X, every_position(layer(rng, 6, 2), X), progress=told.append)
    assert [p.restarts for p in told] == list(range(1, len(told) + 1))  # type: ignore[attr-defined]
    assert told[-1].residual < 1e-9  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "wrong",
    [{"heads": 0}, {"heads": True}, {"method": "magic"}, {"seconds": 0}, {"workers": 1.5}],
)
def test_wrong_configuration_gets_a_sentence(wrong: dict[str, object]) -> None:
    with pytest.raises((InvalidArgument, TypeCheckError), match=next(iter(wrong))):
        FromExamples(**wrong)  # type: ignore[arg-type]
