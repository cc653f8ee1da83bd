"""Additive errors in a ball: accuracy, budget, honest error bars, rigorous intervals."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import keyhole
from keyhole.learners.single_head.bounded_noise import (
    AlignedPairs,
    Intervals,
    PairAnswers,
    PairReading,
    find_most_likely,
)
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.wrappers.degrade import round_bits

NOISE = 1e-6


def drawn(width: int, seed: int, norm: float = 1.0) -> Attention:
    rng = np.random.default_rng([width, seed])
    score, value = rng.standard_normal((width, width)), rng.standard_normal(width)
    return Attention(
        [Head(score / np.linalg.norm(score, 2), None, norm * value / np.linalg.norm(value))]
    )


def noisy(model: Attention, level: float, seed: int):
    rng = np.random.default_rng(seed)

    def box(tokens: np.ndarray) -> np.ndarray:
        assert np.linalg.norm(tokens, axis=2).max() <= 1.0 + 1e-9  # never outside the ball
        return model(tokens) + level * rng.standard_normal(len(tokens))

    return box


def error(recovery: keyhole.Recovery, model: Attention) -> float:
    truth = model.heads[0].score
    return float(np.linalg.norm(recovery.model.heads[0].score - truth) / np.linalg.norm(truth))


def covered(recovery: keyhole.Recovery, model: Attention) -> float:
    gap = np.abs(recovery.model.heads[0].score - model.heads[0].score)
    return float(np.mean(gap <= 2 * recovery.errors.heads[0].score))


def test_noise_in_the_unit_ball_and_the_published_design() -> None:
    width, errors, published = 32, [], []
    for seed in range(3):
        model = drawn(width, seed)
        box = keyhole.open_oracle(noisy(model, NOISE, seed), width=width, max_norm=1.0)
        recovery = keyhole.recover(box, keyhole.SingleHead())
        errors.append(error(recovery, model))
        assert recovery.outcome is keyhole.Outcome.RECOVERED
        learning = recovery.ledger.paid - recovery.ledger.by_purpose["verification"]
        assert learning <= width * width + width + 74
        assert 0.85 <= covered(recovery, model) <= 0.995
        other = keyhole.recover(box, keyhole.SingleHead(method="paper"), throw=False)
        published.append(error(other, model))
    assert np.median(errors) <= 5e-4
    assert np.median(published) > 20 * np.median(errors)


def test_twenty_times_the_queries_quarter_the_error() -> None:
    width, model = 24, drawn(24, 5)
    once, often = (
        error(
            keyhole.recover(
                keyhole.open_oracle(noisy(model, NOISE, 1), width=width, max_norm=1.0),
                budget=budget,
            ),
            model,
        )
        for budget in (None, 20 * (width * width + width) + 100)
    )
    assert once / often >= 4.0


def test_exactly_as_many_queries_as_unknowns_with_a_stated_precision() -> None:
    width, model = 16, drawn(16, 2)
    box = keyhole.open_oracle(
        noisy(model, NOISE, 1),
        width=width,
        max_norm=1.0,
        precision=keyhole.NoiseModel(additive=NOISE),
    )
    recovery = keyhole.recover(box, budget=width * width + width)
    assert recovery.outcome is keyhole.Outcome.UNVERIFIED
    assert recovery.ledger.paid == width * width + width
    assert error(recovery, model) <= 5e-4


def test_a_budget_too_small_for_an_unknown_precision_says_so() -> None:
    box = keyhole.open_oracle(noisy(drawn(16, 2), NOISE, 1), width=16, max_norm=1.0)
    with pytest.raises(keyhole.BudgetExhausted, match="precision="):
        keyhole.recover(box, budget=16 * 16 + 16)


def test_asks_until_the_accuracy_is_reached() -> None:
    model = drawn(12, 3)
    box = keyhole.open_oracle(noisy(model, 1e-5, 1), width=12, max_norm=1.0)
    rough = keyhole.recover(box)
    fine = keyhole.recover(box, keyhole.SingleHead(accuracy=rough.details["cramer_rao"] / 3))
    assert fine.details["cramer_rao"] <= rough.details["cramer_rao"] / 3
    assert error(fine, model) < error(rough, model)


@pytest.mark.parametrize("decimals", [4, 3])
def test_rounded_answers_in_a_ball(decimals: int) -> None:
    model = drawn(32, 4, norm=5.0)
    box = keyhole.open_oracle(
        lambda tokens: np.round(model(tokens), decimals), width=32, max_norm=4.0
    )
    recovery = keyhole.recover(box)
    assert covered(recovery, model) >= 0.9
    assert error(recovery, model) <= 2 * recovery.details["cramer_rao"]


def test_rounding_does_not_protect_where_tokens_are_free() -> None:
    model = drawn(16, 5)
    recovery = keyhole.recover(lambda_box(lambda x: np.round(model(x), 2), 16))
    assert error(recovery, model) <= 1e-9


def lambda_box(function, width: int) -> keyhole.Oracle:
    return keyhole.open_oracle(function, width=width)


def test_relative_noise_is_told_from_additive() -> None:
    model, rng = drawn(24, 6), np.random.default_rng(0)
    box = lambda_box(lambda x: model(x) * (1 + 1e-6 * rng.standard_normal(len(x))), 24)
    recovery = keyhole.recover(box)
    assert error(recovery, model) <= 1e-4
    assert covered(recovery, model) >= 0.9


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.3), (11, 0.05)])
def test_short_number_formats_end_honestly(bits: int, limit: float) -> None:
    model = drawn(16, 7)
    box = lambda_box(lambda x: round_bits(model(round_bits(x, bits)), bits), 16)
    recovery = keyhole.recover(box, throw=False)
    assert recovery.outcome in (keyhole.Outcome.RECOVERED, keyhole.Outcome.ILL_CONDITIONED)
    assert error(recovery, model) <= limit
    assert covered(recovery, model) >= 0.9


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("worst_case", [False, True])
def test_intervals_contain_the_truth(worst_case: bool, biased: bool) -> None:
    tolerance, width, bounded = 1e-4, 6, 0
    for seed in range(10):
        plain, rng = drawn(width, seed, norm=3.0).heads[0], np.random.default_rng(seed)
        bias = 0.3 * rng.standard_normal(width) if biased else None
        model = Attention([Head(plain.score, bias, plain.value)], 0.7 if biased else 0.0)

        def box(tokens: np.ndarray, model=model, rng=rng) -> np.ndarray:
            off = rng.uniform(-1, 1, len(tokens))
            return model(tokens) + tolerance * (np.sign(off) if worst_case else off)

        recovery = keyhole.recover(
            keyhole.open_oracle(
                box, width=width, max_norm=4.0, precision=keyhole.NoiseModel(tolerance=tolerance)
            ),
            keyhole.SingleHead(),
            throw=False,
        )
        if recovery.outcome is keyhole.Outcome.NOT_IDENTIFIABLE:
            assert "not bounded" in recovery.reason
            continue
        found, errors, truth = recovery.model.heads[0], recovery.errors.heads[0], model.heads[0]
        assert (np.abs(found.score - truth.score) <= errors.score).all()
        assert (np.abs(found.value - truth.value) <= errors.value).all()
        if biased:
            assert (np.abs(found.key_bias - truth.key_bias) <= errors.key_bias).all()
        assert recovery.details["rigorous"]
        bounded += 1
    assert bounded >= 8


def in_torch(model: Attention, dtype: torch.dtype) -> tuple[Any, np.ndarray]:
    """The head computed in that format throughout, and the score as that format holds it."""
    score, value = (
        torch.tensor(part).to(dtype) for part in (model.heads[0].score, model.heads[0].value)
    )

    def box(tokens: np.ndarray) -> np.ndarray:
        x = torch.tensor(tokens).to(dtype)
        scores = ((x @ score) * x[:, -1:]).sum(-1)
        return ((torch.softmax(scores, -1) * (x @ value)).sum(-1)).double().numpy()

    return box, score.double().numpy()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_error_bars_of_boxes_that_compute_in_sixteen_bits(dtype: torch.dtype) -> None:
    shares = []
    for seed in range(8):
        box, score = in_torch(drawn(16, seed, norm=5.0), dtype)
        found = keyhole.recover(keyhole.open_oracle(box, width=16), keyhole.SingleHead())
        gap = np.abs(found.model.heads[0].score - score)
        shares.append(np.mean(gap <= 2.0 * found.errors.heads[0].score))
    assert 0.90 <= np.mean(shares) <= 0.99


def test_key_bias_and_offset_in_a_ball() -> None:
    rng = np.random.default_rng(9)
    plain = drawn(16, 8).heads[0]
    model = Attention([Head(plain.score, 0.3 * rng.standard_normal(16), plain.value)], 0.7)
    recovery = keyhole.recover(keyhole.open_oracle(noisy(model, NOISE, 2), width=16, max_norm=1.0))
    assert error(recovery, model) <= 2e-3
    bias = model.heads[0].key_bias
    assert np.linalg.norm(recovery.model.heads[0].key_bias - bias) <= 1e-3 * np.linalg.norm(bias)
    assert abs(recovery.model.offset - 0.7) <= 1e-5


def test_a_box_with_bounded_entries() -> None:
    model, rng = drawn(12, 10), np.random.default_rng(3)

    def box(tokens: np.ndarray) -> np.ndarray:
        assert np.abs(tokens).max() <= 1.0
        return model(tokens) + 1e-6 * rng.standard_normal(len(tokens))

    recovery = keyhole.recover(keyhole.open_oracle(box, width=12, low=-1.0, high=1.0))
    assert error(recovery, model) <= 2e-3


@pytest.mark.parametrize("outputs", [3, 12])
def test_vector_answers_are_read_along_what_a_probe_shows(outputs: int) -> None:
    shares = []
    for seed in range(4):
        rng = np.random.default_rng([seed, outputs])
        value = rng.standard_normal((12, outputs)) / np.sqrt(12)
        model = Attention([Head(drawn(12, seed).heads[0].score, None, value)])
        noise = np.random.default_rng(seed)

        def box(tokens: np.ndarray, model=model, noise=noise) -> np.ndarray:
            exact = model(tokens)
            return exact + NOISE * noise.standard_normal(exact.shape)

        found = keyhole.recover(
            keyhole.open_oracle(box, width=12, max_norm=1.0), keyhole.SingleHead(), seed=seed
        )
        assert error(found, model) <= 1e-3
        shares.append(covered(found, model))
    assert 0.9 <= np.mean(shares) <= 0.99


@pytest.mark.parametrize("precision", [{"additive": 1e-4}, {"tolerance": 1e-4}])
def test_vector_answers_without_a_query_to_spare(precision: dict[str, float]) -> None:
    width, outputs, rng = 6, 3, np.random.default_rng(0)
    score, value = rng.standard_normal((width, width)) / 2, rng.standard_normal((width, outputs))
    model = Attention([Head(score, None, value)])
    box = keyhole.open_oracle(
        lambda x: model(x) + 9e-5 * rng.uniform(-1.0, 1.0, (len(x), outputs)),
        width=width,
        max_norm=3.0,
        precision=keyhole.NoiseModel(**precision),
    )
    budget = width * width + width + 6
    recovery = keyhole.recover(box, keyhole.SingleHead(), budget=budget, seed=2)
    assert recovery.model.offset.shape == (outputs,)
    assert recovery.ledger.floor == (width * width + width * outputs) / outputs
    assert error(recovery, model) < 0.02


def test_low_rank_is_what_noise_does_not_explain() -> None:
    rng = np.random.default_rng(4)
    score = rng.standard_normal((24, 3)) @ rng.standard_normal((3, 24))
    value = drawn(24, 4).heads[0].value
    model = Attention([Head(score / np.linalg.norm(score, 2), None, value)])
    found, full = (
        keyhole.recover(
            keyhole.open_oracle(noisy(model, NOISE, 5), width=24, max_norm=1.0), learner
        )
        for learner in (keyhole.LowRank(), keyhole.SingleHead())
    )
    assert found.details["rank"] == 3
    assert found.model.heads[0].score_factors is not None
    assert error(found, model) <= 0.7 * error(full, model)
    assert covered(found, model) >= 0.9
    box = keyhole.open_oracle(noisy(model, NOISE, 5), width=24, max_norm=1.0)
    same = keyhole.recover(box, keyhole.SingleHead(rank="unknown"))
    assert same.details["rank"] == 3
    assert same.ledger.paid == found.ledger.paid  # one way to learn a head of unknown rank


@pytest.mark.parametrize("seed", range(6))
def test_noise_that_hides_a_score_is_not_another_family(seed: int) -> None:
    noise, width = 2e-2, 4
    secret, rng = attention(np.random.default_rng(seed), width), np.random.default_rng(100 + seed)
    box = keyhole.open_oracle(
        lambda tokens: secret(tokens) + noise * rng.standard_normal(len(tokens)),
        width=width,
        max_norm=2.0,
        precision=keyhole.NoiseModel(additive=noise),
    )
    learner, budget = keyhole.SingleHead(), width**2 + width + 6
    recovery = keyhole.recover(box, learner, budget=budget, throw=False, seed=seed)
    assert recovery.outcome in (keyhole.Outcome.RECOVERED, keyhole.Outcome.ILL_CONDITIONED)


@pytest.mark.parametrize("budget", [1, 19])
def test_a_budget_below_any_plan_is_refused_unspent_and_a_larger_one_goes_on(
    tmp_path: Path, budget: int
) -> None:
    """The plan depends on the budget: what had been asked for a smaller one would not fit."""
    model, path = drawn(4, 0), tmp_path / "run.journal"

    def run(budget: int) -> keyhole.Recovery:
        stated = keyhole.NoiseModel(additive=NOISE)
        box = keyhole.open_oracle(noisy(model, NOISE, 1), width=4, max_norm=1.0, precision=stated)
        return keyhole.recover(box, keyhole.SingleHead(), budget=budget, journal=path, throw=False)

    small = run(budget)
    assert small.outcome is keyhole.Outcome.BUDGET_EXHAUSTED
    assert small.ledger.paid == 0
    assert "20 queries are the least" in small.reason
    assert run(400).outcome is keyhole.Outcome.RECOVERED
    with pytest.raises(keyhole.JournalMismatch, match="another budget"):
        run(500)


def test_a_key_bias_that_was_not_planned_for_ends_the_passes_before_the_budget() -> None:
    model = attention(np.random.default_rng(0), 16, bias=True)
    box = keyhole.open_oracle(
        noisy(model, NOISE, 1),
        width=16,
        max_norm=1.0,
        precision=keyhole.NoiseModel(additive=NOISE),
    )
    unknowns = 16 * 16 + 16
    recovery = keyhole.recover(box, keyhole.SingleHead(), budget=2 * (unknowns + 1) + 14)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.details["passes"] == 1


# -- pairs stay in the ball, and their answers give back the score ----------------------------

WIDTH, RADIUS = 7, 2.0


@pytest.mark.parametrize("outputs", [1, 4])
def test_pairs_stay_in_the_ball_and_give_back_the_score(outputs: int) -> None:
    rng = np.random.default_rng(outputs)
    score, value = rng.standard_normal((WIDTH, WIDTH)) / 3, rng.standard_normal((WIDTH, outputs))
    offset, key_bias = rng.standard_normal(outputs), rng.standard_normal(WIDTH) / 3
    model = Attention([Head(score, key_bias, value)], offset)
    pairs = AlignedPairs.towards(value, outputs == 1, rng)
    np.testing.assert_allclose(np.linalg.norm(pairs.probes, axis=1), 1.0)
    anchor = pairs.longest(RADIUS)
    probe = pairs.probe_lengths(anchor)
    tokens = pairs.tokens(slice(None), probe, anchor)
    norms = np.linalg.norm(tokens, axis=2).max(axis=1)
    assert norms.max() <= RADIUS * (1 + 1e-12)
    assert norms.min() > RADIUS / 2  # no room is given away
    answers = model(tokens).reshape(WIDTH, WIDTH, outputs).transpose(1, 0, 2)
    asked, reading = [PairAnswers(answers, probe, anchor)], PairReading(pairs, value, offset)
    products, _ = find_most_likely(reading, asked, key_bias, 1e-9)
    np.testing.assert_allclose(pairs.score(products), score, atol=1e-10)
    low, high = Intervals(reading, np.full(value.shape, 1e-9), 1e-9).of_scores(
        asked, key_bias, np.zeros(WIDTH)
    )
    truth = pairs.probes @ score @ pairs.anchors.T
    assert ((low <= truth) & (truth <= high)).all()
    assert (high - low).max() < 1e-5


def test_single_pairs_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(3)
    pairs = AlignedPairs.towards(rng.standard_normal((WIDTH, 1)), True, rng)
    anchor = pairs.longest(RADIUS)
    probe = pairs.probe_lengths(anchor)
    every = pairs.tokens(slice(None), probe, anchor).reshape(WIDTH, WIDTH, 2, WIDTH)
    rows, columns = np.array([0, 4]), np.array([6, 1])
    some = pairs.some_tokens(rows, columns, probe, anchor)
    np.testing.assert_array_equal(some, every[columns, rows])
