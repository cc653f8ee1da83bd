"""What a budget buys where digits are few."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole
from keyhole.fitting.layer_gauss_newton import FactoredLayer
from keyhole.learners.base import Hypothesis, Inconclusive
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.multi_head.least_squares import (
    affords_least_squares,
    collect_answers,
    cut_map,
    draw_independent_tokens,
    draw_short_moves,
    estimate_answer_errors,
    estimate_edge,
    factor_layer,
    is_seen,
    polish_draft,
    refine_by_least_squares,
)
from keyhole.learners.multi_head.validation import MultiHeadDiagnostics
from keyhole.linalg.low_rank_fit import Factored
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import match_heads
from keyhole.models.random import attention
from multi_head_boxes import ask_all, asker, layer_box, layer_truth, random_layer


def errors(recovery: keyhole.Recovery, truth: Attention) -> tuple[float, float]:
    """Worst relative error of a score, and in units of its error bar."""
    bars = dict(zip(map(id, recovery.model.heads), recovery.errors.heads, strict=True))
    worst, units = 0.0, 0.0
    for found, true in match_heads(recovery.model.heads, truth.heads):
        gap = float(np.linalg.norm(found.score - true.score))
        worst = max(worst, gap / float(np.linalg.norm(true.score)))
        units = max(units, gap / float(np.linalg.norm(bars[id(found)].score)))
    return worst, units


def test_a_float32_layer() -> None:
    layer = random_layer(16, 2, 0).float()
    truth, floor = layer_truth(layer), 4 * 16 + 2 - 16
    box = keyhole.open_oracle(layer_box(layer), width=16)
    plain = errors(keyhole.recover(box, MultiHead()), truth)
    recovery = keyhole.recover(box, MultiHead(), budget=5 * floor)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.paid <= 5 * floor
    assert recovery.ledger.by_purpose["refinement"] > 0
    worst, units = errors(recovery, truth)
    assert worst < 0.6 * plain[0]
    assert worst < 1e-6
    assert units < 3


def test_a_small_budget_goes_into_soft_queries() -> None:
    """At 2.2 times the floor a rough start and a fit beat the careful start, at the same price."""
    layer = random_layer(32, 4, 1).float()
    truth, floor = layer_truth(layer), 4 * 32 + 2 - 16
    box = keyhole.open_oracle(layer_box(layer), width=32)
    recovery = keyhole.recover(box, MultiHead(), budget=int(2.2 * floor))
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.paid <= 2.2 * floor
    assert recovery.details["ranks"] == (8,) * 4
    worst, units = errors(recovery, truth)
    assert worst < 5e-5
    assert units < 2


def test_an_impostor_in_float32_does_not_get_through_the_fit() -> None:
    truth = attention(np.random.default_rng(3), 12, heads=2, outputs=12)

    def box(tokens: np.ndarray) -> np.ndarray:
        answers = truth(tokens) + 0.05 * np.tanh(tokens[:, -1])
        return answers.astype(np.float32)

    recovery = keyhole.recover(
        keyhole.open_oracle(box, width=12), MultiHead(), budget=400, throw=False
    )
    assert recovery.outcome is not keyhole.Outcome.RECOVERED


def test_without_a_budget_a_fit_takes_seconds_or_is_left_out() -> None:
    for width, worthwhile in ((6, True), (384, False)):
        model = attention(np.random.default_rng(4), width, heads=2, outputs=width, rank=3)
        ask = replace(asker(model.astype(np.float32), width), recording=True)
        assert affords_least_squares(ask) == worthwhile


def test_float32_layers_are_fitted_to_all_answers() -> None:
    layer = random_layer(32, 4, 1).float()
    recovery = keyhole.recover(keyhole.open_oracle(layer_box(layer), width=32), MultiHead())
    assert recovery.ledger.by_purpose["refinement"] > recovery.ledger.floor
    worst, units = errors(recovery, layer_truth(layer))
    assert worst < 2e-5
    assert units < 3


def test_independent_tokens_are_as_many_as_a_head_has_dimensions() -> None:
    model = attention(np.random.default_rng(4), 12, heads=3, outputs=12)
    (tokens,) = draw_independent_tokens(model, 7, asker(model, 12), np.random.default_rng(5))
    assert tokens.shape == (7, 4, 12)
    sizes = np.linalg.norm(tokens, axis=2) / model.natural_length()
    assert 0.2 < sizes.min() < sizes.max() < 2.0


@pytest.mark.parametrize("seed", [0, 1])
def test_float32_scalar_answers(seed: int) -> None:
    truth = attention(np.random.default_rng(seed), 6, heads=2)
    recovery = keyhole.recover(
        truth.astype(np.float32), MultiHead(), seed=seed, budget=4 * 2 * (36 + 6)
    )
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    worst, units = errors(recovery, truth)
    assert worst < 1e-5
    assert units < 3


def test_an_exact_box_spends_nothing_more() -> None:
    truth = attention(np.random.default_rng(2), 6, heads=2)
    free, bounded = (keyhole.recover(truth, MultiHead(), budget=b) for b in (None, 10_000))
    assert free.ledger.paid == bounded.ledger.paid


@pytest.mark.parametrize(("heads", "outputs"), [(1, 8), (2, 16)])
def test_a_float32_layer_without_biases(heads: int, outputs: int) -> None:
    truth = attention(np.random.default_rng(3), 8, heads=heads, outputs=outputs)
    recovery = keyhole.recover(truth.astype(np.float32), MultiHead(), budget=900)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.by_purpose["refinement"] > 0
    assert errors(recovery, truth)[1] < 3


def test_soft_queries_have_log_odds_of_order_one() -> None:
    model = attention(np.random.default_rng(4), 6, heads=2, bias=True)
    batches = draw_short_moves(model, 50, np.random.default_rng(5))
    assert sum(len(batch) for batch in batches) == 50
    for batch in batches:
        anchor = batch[:, -1]
        for head in model.heads:
            odds = np.einsum("nld,nd->nl", batch - anchor[:, None], head.keys(anchor))
            assert np.abs(odds).max() <= 1.5 + 1e-9


@pytest.mark.parametrize("bias", [True, False])
def test_a_hypothesis_in_factors_is_the_same_layer(bias: bool) -> None:
    """The keys of a biased layer of rank 2 have rank 3: both are in the factors."""
    secret = attention(np.random.default_rng(6), 6, heads=2, rank=2, bias=bias)
    found, _ = ask_all(secret, 6, MultiHead())
    layer = factor_layer(found)
    for part, head in zip(layer.scores, found.model.heads, strict=True):
        dense = (part.left * part.singular) @ part.right
        assert part.rank == 2 + bias
        np.testing.assert_allclose(dense[:, :6], head.score, atol=1e-10)
        if bias:
            np.testing.assert_allclose(dense[:, 6], head.key_bias, atol=1e-10)


def test_recorded_answers_come_with_their_errors() -> None:
    model = attention(np.random.default_rng(7), 6, heads=2)
    ask = replace(asker(model.astype(np.float32), 6), recording=True)
    rng = np.random.default_rng(8)
    for length in (2, 3, 100):
        ask(rng.standard_normal((5, length, 6)), "test")
    data = collect_answers(ask, model)
    assert [part.tokens.shape for part in data] == [(5, 2, 6), (5, 3, 6)]  # the long ones are left
    errors = estimate_answer_errors(ask, model, data[0].tokens)
    off = np.abs(data[0].answers[:, 0] - model(data[0].tokens))
    assert (errors > 0).all()
    assert off.max() < 30 * errors.max()


def test_without_a_budget_nothing_is_asked() -> None:
    secret = attention(np.random.default_rng(9), 6, heads=2)
    found, oracle = ask_all(secret, 6, MultiHead())
    before = oracle.paid
    assert refine_by_least_squares(asker(secret, 6), found, np.random.default_rng(0)) is found
    assert oracle.paid == before


def rank_three(width: int, seed: int) -> Attention:
    """Two heads in float32, scores of rank 3, values of full rank: answers do not keep them
    apart."""
    rng = np.random.default_rng([seed, width])

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / np.sqrt(shape[-1])

    heads = [Head(draw(width, 3) @ draw(3, width), None, draw(width, width)) for _ in range(2)]
    return Attention(heads).astype(np.float32)


@pytest.mark.parametrize("width", [6, 8])
def test_heads_that_answers_do_not_keep_apart_are_recovered_in_float32(width: int) -> None:
    within = []
    for seed in range(4):
        secret = rank_three(width, seed)
        found = keyhole.recover(secret, seed=seed)
        assert found.outcome is keyhole.Outcome.RECOVERED
        assert found.details["ranks"] == (3, 3)
        assert keyhole.distance(found.model, secret.astype(np.float64)) < 3e-6
        assert found.ledger.by_purpose["refinement"] < 60
        bars = dict(zip(map(id, found.model.heads), found.errors.heads, strict=True))
        for one, true in match_heads(found.model.heads, secret.heads):
            within.append(np.abs(one.score - true.score) <= 2.0 * bars[id(one)].score)
    assert np.mean(within) > 0.9


def test_a_draft_of_too_low_a_rank_is_given_more() -> None:
    secret = rank_three(6, 9)
    found, _ = ask_all(secret, 6, MultiHead())
    assert isinstance(found.diagnostics, MultiHeadDiagnostics)
    low = replace(found.diagnostics, key_ranks=(2, 2), value_ranks=(6, 6))
    ask, rng = asker(secret, 6), np.random.default_rng(1)
    ask(np.zeros((1, 1, 6)), "test")
    better = polish_draft(ask, replace(found, diagnostics=low), rng)
    assert isinstance(better, Hypothesis)
    assert better.diagnostics.as_dict()["ranks"] == (3, 3)
    other = attention(rng, 6, heads=3, outputs=6)
    wrong = polish_draft(asker(other.astype(np.float32), 6), found, rng)
    assert isinstance(wrong, Inconclusive)
    assert "least squares leave" in wrong.reason


def test_ranks_and_biases_are_cut_to_what_is_seen() -> None:
    rng = np.random.default_rng(3)
    block = rng.standard_normal((6, 7))
    assert is_seen(block, np.full_like(block, 0.1))
    assert not is_seen(block, np.ones_like(block))
    assert estimate_edge(np.full((4, 9), 2.0)) == pytest.approx(10.0)
    part = Factored.of(np.eye(6), rng.standard_normal((6, 6)), 3)
    layer = cut_map(FactoredLayer((part, part), (part, part), np.zeros(6)), 2)
    assert [each.rank for each in (*layer.scores, *layer.values)] == [3, 3, 2, 3]
