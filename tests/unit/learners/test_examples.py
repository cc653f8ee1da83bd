"""The learner from examples: exact, noisy, scarce, reproducible."""

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from keyhole.errors import InvalidArgument, NotIdentifiable
from keyhole.learn import learn
from keyhole.learners.example_data import examples
from keyhole.learners.example_fit import held_rows, ratio
from keyhole.learners.examples import FromExamples
from keyhole.models.attention import Attention, Head
from keyhole.models.draw import attention
from keyhole.models.every_position import every_position
from keyhole.models.symmetry import distance
from keyhole.results import Outcome


def layer(rng: np.random.Generator, d: int, heads: int, scale: float = 1.0) -> Attention:
    """Scores of Frobenius norm `scale`: the standard deviation of a score on Boolean tokens."""
    members = []
    for _ in range(heads):
        score = rng.standard_normal((d, d))
        value = rng.standard_normal((d, d)) / np.sqrt(d)
        members.append(Head(scale * score / np.linalg.norm(score), None, value))
    return Attention(members, np.zeros(d))


def boolean(rng: np.random.Generator, n: int, k: int, d: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], (n, k, d))


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
        X = boolean(rng, int(np.ceil(rng.uniform(0.5, 1.3) * floor)), k, d)
        found = learn(X, every_position(truth, X), FromExamples(seconds=0.5), throw=False)
        if found.outcome is Outcome.RECOVERED:
            clean += 1
            assert distance(found.model, truth) < 1e-8
    assert clean < 25


def test_a_vocabulary_too_small_is_not_identifiable() -> None:
    rng = np.random.default_rng(11)
    words = boolean(rng, 1, 3, 6)[0]
    X = words[rng.integers(0, 3, (60, 4))]
    found = learn(X, every_position(layer(rng, 6, 1), X), throw=False)
    assert found.outcome is Outcome.NOT_IDENTIFIABLE
    assert "span" in found.reason


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


def test_ratio_is_the_note_s_floor() -> None:
    rng = np.random.default_rng(14)
    X = boolean(rng, 100, 4, 8)
    rows = examples(X, X).rows
    assert 100 / ratio(rows, 1) == pytest.approx(max(2 * 8 / 4, 64 / 12))
    assert 100 / ratio(rows, 3) == pytest.approx(2 * 3 * 8 / 4)
    kept = held_rows(rows, rng)
    assert 0.04 < kept.mean() < 0.06
