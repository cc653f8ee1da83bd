from typing import Any

import numpy as np
import pytest

import keyhole
from boxes import CountingBox, impostors, in_float32
from keyhole.measurement.noise import LOOKS
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.degrade import Noisy, Rounded
from keyhole.verification.verify import verify

MODEL = attention(np.random.default_rng(0), 8, bias=True)
BOX = open_oracle(MODEL)


def nudged(factor: float, part: str = "score") -> Attention:
    (head,) = MODEL.heads
    parts = {"score": head.score, "key_bias": head.key_bias, "value": head.value}
    parts[part] = parts[part] * (1.0 + factor)
    return Attention([Head(**parts)], MODEL.offset)


def test_the_model_itself_agrees_and_the_claim_is_modest() -> None:
    box = CountingBox(MODEL, 8)
    verdict = verify(open_oracle(box), MODEL)
    assert verdict.agrees
    assert verdict.queries == 59
    assert box.seen == 59 + LOOKS
    assert verdict.worst <= 1.0
    assert verdict.counterexample is None
    assert "All 59 fresh answers" in verdict.bound
    assert "at most 5% of ordinary queries" in verdict.bound  # 1 - 0.05 ** (1 / 59)
    assert "nothing is claimed" in verdict.bound


def test_other_precisions_agree() -> None:
    assert verify(open_oracle(in_float32(MODEL), width=8), MODEL).agrees
    stated = open_oracle(MODEL, precision=keyhole.NoiseModel(additive=1e-3))
    assert verify(Noisy(stated, additive=1e-3), MODEL).agrees
    stated = open_oracle(MODEL, precision=keyhole.NoiseModel(step=1e-3))
    assert verify(Rounded(stated, decimals=3), MODEL).agrees


@pytest.mark.parametrize("part", ["score", "key_bias", "value"])
def test_a_small_change_is_seen_with_the_query_that_shows_it(part: str) -> None:
    other = nudged(1e-9, part)
    verdict = verify(BOX, other)
    assert not verdict.agrees
    assert verdict.worst > 1.0
    example = verdict.counterexample
    assert example is not None
    assert example.box_answer == MODEL(example.input[None])[0]
    assert example.model_answer == other(example.input[None])[0]
    assert "differ" in verdict.bound


@pytest.mark.parametrize("name", ["a window", "a score cap", "a position bias"])
def test_what_looks_like_the_head_on_short_queries_is_told(name: str) -> None:
    rng = np.random.default_rng(0)
    score = rng.standard_normal((8, 8)) / np.sqrt(8)
    rng.standard_normal((8, 8))
    model = Attention([Head(score, None, rng.standard_normal(8))])
    box = impostors(8)[name]
    pair = rng.standard_normal((4, 2, 8)) / 8
    np.testing.assert_allclose(box(pair), model(pair), rtol=0.05)
    assert not verify(open_oracle(box, width=8), model).agrees


def test_answers_of_another_shape_differ() -> None:
    verdict = verify(open_oracle(lambda tokens: MODEL(tokens)[:, None], width=8), MODEL)
    assert not verdict.agrees
    assert verdict.counterexample is not None
    assert "shape" in verdict.counterexample.reason


def test_past_answers_are_compared_for_free_and_one_is_asked_again() -> None:
    queries = QueryBatch.of(np.random.default_rng(1).standard_normal((40, 2, 8)), "score")
    box = CountingBox(MODEL, 8)
    verdict = verify(open_oracle(box), MODEL, queries=6, past=[(queries, BOX.ask(queries))])
    assert verdict.agrees
    assert (verdict.queries, verdict.replayed, box.seen) == (6, 40, 6 + LOOKS + 1)
    wrong = BOX.ask(queries).copy()
    wrong[17] *= 1.0 + 1e-6
    verdict = verify(BOX, MODEL, queries=6, past=[(queries, wrong)])
    assert not verdict.agrees
    assert verdict.counterexample is not None
    assert np.array_equal(verdict.counterexample.input, queries[17:18].tokens()[0])


def test_a_box_that_changed_meanwhile_is_told() -> None:
    queries = QueryBatch.of(np.random.default_rng(2).standard_normal((3, 2, 8)), "score")
    before = BOX.ask(queries) * (1 + 1e-9)
    verdict = verify(BOX, MODEL, queries=6, past=[(queries, before)])
    assert verdict.counterexample is not None
    assert "differently before" in verdict.counterexample.reason


def test_the_same_seed_asks_the_same_queries() -> None:
    asked: list[list[bytes]] = []

    def watched(tokens: np.ndarray) -> np.ndarray:
        asked[-1].append(tokens.tobytes())
        return MODEL(tokens)

    for seed in (3, 3, 4):
        asked.append([])
        verify(open_oracle(watched, width=8), MODEL, seed=seed, queries=12)
    assert asked[0] == asked[1] != asked[2]


def test_any_callable_may_be_the_model_and_the_box() -> None:
    verdict = verify(CountingBox(MODEL, 8), lambda tokens: MODEL(tokens))
    assert verdict.agrees
    assert not verify(CountingBox(MODEL, 8), lambda tokens: 1.001 * MODEL(tokens)).agrees


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (np.full(1, np.nan), "not finite"),
        (np.zeros(3), "3 answers"),
        (np.zeros((1, 1, 1)), "shape"),
    ],
)
def test_malformed_answers_are_the_boxs_fault(answer: Any, words: str) -> None:
    with pytest.raises(keyhole.OracleError, match=words):
        verify(open_oracle(lambda tokens: answer, width=8), MODEL)


def test_nonsense_is_refused() -> None:
    with pytest.raises(keyhole.InvalidArgument, match="queries"):
        verify(BOX, MODEL, queries=0)
    with pytest.raises(keyhole.InvalidArgument, match="width 9, the box 8"):
        verify(BOX, attention(np.random.default_rng(0), 9))


@pytest.mark.parametrize("last", [60, 100, 150])
def test_a_mask_at_long_lengths_is_met(last: int) -> None:
    box = open_oracle(lambda tokens: MODEL(tokens[:, -last:]), width=8)
    verdict = verify(box, MODEL, queries=200)
    assert not verdict.agrees
    assert verdict.counterexample is not None
    assert len(verdict.counterexample.input) > last


@pytest.mark.parametrize("cap", [20.0, 100.0])
def test_a_cap_that_only_large_scores_reach_is_met(cap: float) -> None:
    (head,) = MODEL.heads

    def box(tokens: np.ndarray) -> np.ndarray:
        scores = np.clip(np.einsum("nld,nd->nl", tokens, head.keys(tokens[:, -1])), -cap, cap)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return np.asarray(MODEL.offset + np.einsum("nl,nl->n", weights, tokens @ head.value))

    assert not verify(open_oracle(box, width=8), MODEL, queries=200).agrees


def test_a_vector_whose_terms_cancel_is_not_wronged() -> None:
    """A component far below the others carries their rounding."""
    value = np.random.default_rng(5).standard_normal((4, 3))
    value[:, 2] = 0.0
    model = Attention([Head(np.eye(4), None, value)], np.array([1.0, -2.0, 0.0]))
    noise = np.array([0.0, 0.0, 2.0**-52])
    assert verify(open_oracle(lambda x: model(x) + noise, width=4), model, queries=6).agrees
    assert not verify(open_oracle(lambda x: model(x) + 1e9 * noise, width=4), model).agrees


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        (lambda answers: answers[:, None], "shape"),
        (lambda answers: np.where(np.arange(len(answers)) == 7, np.nan, answers), "learning"),
    ],
)
def test_past_answers_that_no_number_is_compared_with_count_against(lie: Any, words: str) -> None:
    """A model that fails on the long batch of past queries alone, and is right on fresh ones."""
    queries = QueryBatch.of(np.random.default_rng(1).standard_normal((40, 2, 8)), "score")

    def model(tokens: np.ndarray) -> np.ndarray:
        answers = MODEL(tokens)
        return np.asarray(lie(answers) if len(tokens) == 40 else answers)

    verdict = verify(BOX, model, queries=4, past=[(queries, BOX.ask(queries))])
    assert not verdict.agrees
    assert verdict.counterexample is not None
    assert words in verdict.counterexample.reason


def test_fresh_predictions_that_are_no_numbers_differ() -> None:
    verdict = verify(BOX, lambda tokens: np.full(len(tokens), np.nan), queries=4)
    assert not verdict.agrees
    assert verdict.worst == np.inf


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 1e-1])
@pytest.mark.parametrize("seed", range(3))
def test_noise_does_not_let_an_unrelated_model_pass(noise: float, seed: int) -> None:
    wrong = attention(np.random.default_rng(9), 8)
    for queries in (4, 20):
        verdict = verify(Noisy(BOX, noise, seed=seed), wrong, queries=queries, seed=seed)
        assert not verdict.agrees
        assert verdict.counterexample is not None


def test_the_tolerance_is_what_was_allowed() -> None:
    exact, noisy = verify(BOX, MODEL, queries=6), verify(Noisy(BOX, 1e-3), MODEL, queries=6)
    assert exact.tolerance < 1e-10
    assert noisy.agrees
    assert 1e-3 < noisy.tolerance < 0.2


def test_noise_as_large_as_the_answers_lets_nobody_agree_and_wrongs_nobody() -> None:
    box = Noisy(open_oracle(MODEL, max_norm=1.0), 3.0)
    for model in (MODEL, attention(np.random.default_rng(9), 8)):
        verdict = verify(box, model, queries=6)
        assert not verdict.agrees
        assert verdict.counterexample is None
        assert verdict.word == "hides in noise"
        assert "More queries are needed" in verdict.bound


def test_a_run_brings_its_own_errors_and_may_stand_on_either_side() -> None:
    box = open_oracle(in_float32(MODEL), width=8)
    run = keyhole.recover(box, keyhole.SingleHead())
    assert verify(box, run).agrees
    assert verify(run, box).agrees
    assert verify(run, box).format == "float32"
    assert not verify(open_oracle(nudged(0.05)), run).agrees


def test_a_redeployment_in_another_number_format_is_told() -> None:
    run = keyhole.recover(MODEL, keyhole.SingleHead())
    verdict = verify(Rounded(BOX, bits=11), run)
    assert "answers in float16; when the model was recovered, it did so in float64" in verdict.bound
    assert "recovered, it did" not in verify(BOX, run).bound


def test_the_format_before_is_part_of_the_verdict() -> None:
    run = keyhole.recover(MODEL, keyhole.SingleHead())
    again = verify(BOX, run)
    assert (again.format, again.format_before, again.format_changed) == (
        "float64", "float64", False,
    )  # fmt: skip
    changed = verify(Rounded(BOX, bits=11), run)
    assert (changed.format_before, changed.format_changed) == ("float64", True)


def test_a_query_map_off_by_half_a_percent_is_noticed_or_said_to_be_too_small() -> None:
    """A float32 layer of two heads, recovered, and redeployed with one head's queries × 1.005."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    run = keyhole.recover(layer)
    verdict = verify(layer, run)
    assert verdict.agrees
    assert verdict.format == "float32"
    assert verdict.absolute > 0
    with torch.no_grad():
        layer.in_proj_weight[:4] *= 1.005
        layer.in_proj_bias[:4] *= 1.005
    moved = verify(layer, run)
    unseen = max(change for name, change in verdict.noticed.items() if "score" in name)
    assert not moved.agrees or unseen > 0.005
    if moved.agrees:
        assert "would go unnoticed" in moved.bound


def test_a_run_without_a_model_cannot_be_compared() -> None:
    run = keyhole.recover(
        open_oracle(lambda x: np.sin(x).sum(axis=(1, 2)), width=3),
        keyhole.SingleHead(),
        throw=False,
    )
    with pytest.raises(keyhole.InvalidArgument, match="ended without a model"):
        verify(BOX, run)


@pytest.mark.parametrize(
    ("stands_by_it", "words"), [(False, "contradicts itself"), (True, "learn")]
)
def test_an_old_answer_that_contradicts_is_asked_again_and_shown(
    stands_by_it: bool, words: str
) -> None:
    queries = QueryBatch.of(np.random.default_rng(1).standard_normal((300, 3, 8)), "score")
    told, lied = MODEL(queries.tokens()), queries.tokens()[211]
    told[211] += 1e-6
    asked: list[int] = []

    def box(tokens: np.ndarray) -> np.ndarray:
        asked.append(len(tokens))
        same = stands_by_it and tokens.shape[1:] == lied.shape
        lies = (tokens == lied).all(axis=(1, 2)) if same else np.zeros(len(tokens), dtype=bool)
        return MODEL(tokens) + 1e-6 * lies

    verdict = verify(open_oracle(box, width=8), MODEL, queries=6, past=[(queries, told)])
    assert not verdict.agrees
    assert words in verdict.bound
    example = verdict.counterexample
    assert example is not None
    np.testing.assert_array_equal(example.input, lied)
    assert sum(asked) == 6 + LOOKS + 2  # two old queries again: the usual one, and this
