"""Huge tokens: who attends where, in which order tokens are told apart, and what the values are."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.errors import Counterexample, DomainError, NotIdentifiable, WrongFamily
from keyhole.learners.multi_head.hard_attention import (
    CandidateTokens,
    HardAttentionPattern,
    Overcomplete,
    arrange_halves,
    count_candidates,
    explain_candidates,
    explain_moments,
    find_selected_tokens,
    find_selected_tokens_by_vectors,
    find_side,
    halve_candidates,
    measure_values,
    split_selected_token,
)
from keyhole.linalg.linear_system import LinearSystem
from keyhole.linalg.sparse_moments import build_trigonometric_patterns
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.base import Domain
from multi_head_boxes import asker

WIDTH = 6


def layer(heads: int, seed: int = 0, **kind: object) -> Attention:
    return attention(np.random.default_rng(seed), WIDTH, heads=heads, **kind)  # type: ignore[arg-type]


def total_of(model: Attention) -> np.ndarray:
    return sum(h.value.reshape(WIDTH, -1) for h in model.heads)  # type: ignore[return-value]


def keys_at(model: Attention, anchor: np.ndarray) -> np.ndarray:
    return np.stack([h.score @ anchor + h.key_bias for h in model.heads])


def shared_pattern(model: Attention, anchor: np.ndarray, scale: float) -> HardAttentionPattern:
    """One token that all heads attend to, and the equations of their common value."""
    token = keys_at(model, anchor).sum(axis=0)
    token /= np.linalg.norm(token)
    rows = np.eye(WIDTH)[:, None]
    system = LinearSystem.of(rows, total_of(model))
    return HardAttentionPattern(anchor, token[None], np.array([3e-3]), scale, system, False)


def test_moments_of_synthetic_answers_name_the_tokens() -> None:
    """Answers to shifted candidates, computed from the choices, give back the choices."""
    rng, count, chosen = np.random.default_rng(0), 40, np.array([3, 17, 29])
    tokens, shift = rng.standard_normal((count, WIDTH)), rng.standard_normal(WIDTH)
    values, step = rng.standard_normal((3, WIDTH, 1)), 1e-4
    patterns = build_trigonometric_patterns(3, 2 * np.pi * np.arange(count) / count)[1:]
    shifted = tokens + step * patterns[:, :, None] * shift
    answers = np.einsum("khd,hdo->ko", shifted[:, chosen], values)
    base = np.einsum("hd,hdo->o", tokens[chosen], values)[None]
    whole = float(shift @ values.sum(axis=0)[:, 0])
    seen = CandidateTokens(
        np.ones(WIDTH), 1e10, tokens, shift, np.ones(1), whole, step, base, shifted, answers
    )
    support, uniform = explain_moments(seen.moments, seen.angles, 1e-8)
    np.testing.assert_array_equal(support.nodes, chosen)
    assert not uniform
    pattern = seen.select(support.nodes, uniform)
    np.testing.assert_array_equal(pattern.tokens, tokens[chosen])
    np.testing.assert_allclose(
        pattern.system.answers[1:], np.einsum("khd,hdo->ko", pattern.system.rows[1:], values)
    )
    example = seen.build_counterexample(seen.fit_fewer(support, 2))
    assert isinstance(example, Counterexample)
    assert example.input.shape == (count + 1, WIDTH)


def test_a_constant_shift_of_the_moments_is_a_uniform_head() -> None:
    angles = 2 * np.pi * np.arange(50) / 50
    moments = build_trigonometric_patterns(4, angles)[:, [7, 30]] @ np.array([1.0, -0.4])
    moments[0] += 2.5
    support, uniform = explain_moments(moments, angles, 1e-9)
    assert uniform
    np.testing.assert_array_equal(support.nodes, [7, 30])
    nobody, uniform = explain_moments(np.eye(1, 5)[0], angles, 1e-9)
    assert uniform
    assert len(nobody.nodes) == 0


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize("claimed", [True, False])
def test_every_head_has_its_own_token(heads: int, claimed: bool) -> None:
    model, anchor = layer(heads, heads), 1e-3 * np.random.default_rng(1).standard_normal(WIDTH)
    ask = asker(model, WIDTH)
    pattern = find_selected_tokens(
        ask, anchor, total_of(model), heads if claimed else None, np.random.default_rng(2)
    )
    owners = np.argmax(keys_at(model, anchor) @ pattern.tokens.T, axis=1)
    assert sorted(set(owners)) == list(range(len(pattern)))
    values, _ = measure_values(ask, pattern).system.solve()
    for token in range(len(pattern)):
        owned = sum(model.heads[h].value for h in np.flatnonzero(owners == token))
        np.testing.assert_allclose(values[token][:, 0], owned, atol=1e-8)


def test_a_uniform_head_takes_a_block_of_its_own() -> None:
    base = layer(2)
    model = Attention([*base.heads, Head(np.zeros((WIDTH, WIDTH)), None, np.arange(6.0))])
    anchor, ask = 1e-3 * np.ones(WIDTH), asker(model, WIDTH)
    pattern = find_selected_tokens(ask, anchor, total_of(model), None, np.random.default_rng(3))
    assert pattern.uniform
    assert (len(pattern), pattern.blocks) == (2, 3)
    values, _ = measure_values(ask, pattern).system.solve()
    np.testing.assert_allclose(values[-1][:, 0], np.arange(6.0), atol=1e-6)


def test_halving_needs_only_signs_of_life() -> None:
    model, anchor = layer(3, 4), 1e-3 * np.ones(WIDTH)
    ask = asker(model.astype(np.float32), WIDTH)
    pattern = halve_candidates(
        ask, anchor, total_of(model), None, np.random.default_rng(5), 64, 1e13
    )
    assert pattern is not None
    owners = np.argmax(keys_at(model, anchor) @ pattern.tokens.T, axis=1)
    assert sorted(set(owners)) == list(range(len(pattern)))


def test_vector_answers_name_the_tokens_and_their_responses() -> None:
    model = layer(3, 6, rank=2, outputs=WIDTH)
    anchor, shift = np.random.default_rng(7).standard_normal((2, WIDTH))
    ask = asker(model, WIDTH)
    ask(np.zeros((1, 1, WIDTH)), "values")
    pattern, marks = find_selected_tokens_by_vectors(
        ask, anchor, None, shift, np.random.default_rng(8)
    )
    owners = np.argmax(keys_at(model, anchor) @ pattern.tokens.T, axis=1)
    assert len(pattern) == 3
    for head, owner in enumerate(owners):
        np.testing.assert_allclose(marks[owner], shift @ model.heads[head].value, atol=1e-6)


def test_as_many_heads_as_outputs_are_overcomplete() -> None:
    ask = asker(layer(4, 9, outputs=2), WIDTH)
    ask(np.zeros((1, 1, WIDTH)), "values")
    with pytest.raises(Overcomplete):
        find_selected_tokens_by_vectors(
            ask, np.ones(WIDTH), None, np.ones(WIDTH), np.random.default_rng(0)
        )


def test_a_shared_token_is_split_between_its_heads() -> None:
    model, anchor, scale = layer(2, 10), np.random.default_rng(11).standard_normal(WIDTH), 1e10
    pattern, ask = shared_pattern(model, anchor, scale), asker(model, WIDTH)
    parts = split_selected_token(ask, pattern, 0, np.random.default_rng(12))
    assert parts is not None
    assert len(pattern) == 1  # what was handed in is unchanged
    owners = np.argmax(keys_at(model, anchor) @ parts.tokens.T, axis=1)
    assert sorted(owners) == [0, 1]
    values, _ = measure_values(ask, parts).system.solve()
    for head, owner in enumerate(owners):
        np.testing.assert_allclose(values[owner][:, 0], model.heads[head].value, atol=1e-6)


def test_equal_heads_are_never_split() -> None:
    base = layer(1, 13).heads[0]
    model = Attention([base, Head(base.score, None, np.ones(WIDTH))])
    # so hard that not even the last of the angles leaves both halves some weight
    pattern, ask = shared_pattern(model, np.ones(WIDTH), 1e30), asker(model, WIDTH)
    assert split_selected_token(ask, pattern, 0, np.random.default_rng(14)) is None


def test_sides_and_halves() -> None:
    model, anchor = layer(1, 15), np.ones(WIDTH)
    pattern, ask = shared_pattern(model, anchor, 1e10), asker(model, WIDTH)
    values, _ = pattern.system.solve()
    pivot = 0.01 * keys_at(model, anchor)[0]
    for sign in (1, -1):
        side, change = find_side(ask, pattern, 0, sign * pivot, values)
        assert side == sign  # the head prefers the half along its key
        np.testing.assert_allclose(change, pivot @ values[0], rtol=1e-6)
    tokens, rows = arrange_halves(pattern, 0, pivot)
    np.testing.assert_allclose(tokens[0], pattern.tokens[0] + np.outer([1, -1], pivot))
    np.testing.assert_array_equal(tokens, rows)


def test_what_is_refused() -> None:
    model, anchor, rng = layer(3, 16), np.ones(WIDTH), np.random.default_rng(17)
    with pytest.raises(WrongFamily, match="3 heads answer where 2 were claimed") as caught:
        find_selected_tokens(asker(model, WIDTH), anchor, total_of(model), 2, rng)
    assert caught.value.counterexample is not None
    silent = Attention([Head(np.eye(WIDTH), None, np.zeros(WIDTH))])
    with pytest.raises(NotIdentifiable, match="every answer is zero"):
        find_selected_tokens(asker(silent, WIDTH), anchor, total_of(silent), None, rng)
    with pytest.raises(DomainError, match="max_length=4"):
        count_candidates(asker(model, WIDTH, domain=Domain(max_length=4)), 256, 5)


def test_attention_that_never_hardens_is_no_pattern() -> None:
    """Scores capped at one: every candidate keeps some weight."""

    def capped(tokens: np.ndarray) -> np.ndarray:
        scores = np.tanh(np.einsum("nld,nd->nl", tokens, tokens[:, -1]))
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        return np.asarray(np.einsum("nl,nl->n", weights, tokens @ np.ones(WIDTH)))

    with pytest.raises(WrongFamily, match="never settles"):
        find_selected_tokens(
            asker(capped, WIDTH), np.ones(WIDTH), np.ones((WIDTH, 1)), 2, np.random.default_rng(0)
        )


def test_the_number_of_moments_is_bounded_by_the_claim() -> None:
    """Answers that no two tokens explain end in a counterexample, not in more and more queries."""
    rng = np.random.default_rng(1)
    ask = asker(lambda tokens: tokens[:, 0].sum(axis=1) ** 3, WIDTH)
    tokens = rng.standard_normal((30, WIDTH))
    empty = CandidateTokens(
        np.ones(WIDTH), 1.0, tokens, np.ones(WIDTH), np.ones(1), 1.0, 0.1,
        np.zeros((1, 1)), np.zeros((0, 30, WIDTH)), np.zeros((0, 1)),
    )  # fmt: skip
    outcome = explain_candidates(ask, replace(empty, step=0.5), 2, spare=3)
    assert isinstance(outcome, Counterexample)
