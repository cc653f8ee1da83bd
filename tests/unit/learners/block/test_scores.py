import numpy as np
import pytest

from keyhole.learners.block.box import Unclear
from keyhole.learners.block.pre_norm_attention import PreNormWeights
from keyhole.learners.block.scores import (
    Soft,
    Span,
    ask_scores,
    find_size,
    read_at_once,
    read_log_odds,
    seen_rank,
    solve_scores,
    usual_level,
)
from keyhole.models.attention import Attention, Head
from keyhole.models.random import block

LAYER = block(np.random.default_rng(0), 8, heads=2).attention
MAPS = np.array([head.value.T for head in LAYER.heads])
WEIGHTS = PreNormWeights(MAPS, MAPS.sum(axis=0), LAYER.offset)
SPAN = Span(np.full(8, 0.3), 1.0, np.inf)


def ask(anchor, tokens):
    return Soft(
        anchor, tokens, LAYER(np.concatenate([anchor[:, None] + tokens, anchor[:, None]], axis=1))
    )


def test_log_odds_are_read_off_one_answer():
    rng = np.random.default_rng(1)
    soft = ask(rng.standard_normal((3, 8)), rng.standard_normal((3, 2, 8)))
    odds, rest = read_log_odds(WEIGHTS, soft)
    keys = np.stack([head.keys(soft.anchor) for head in LAYER.heads], axis=1)
    assert np.allclose(odds, np.einsum("nmd,nhd->nhm", soft.tokens, keys), atol=1e-11)
    assert rest < 1e-12


def test_scores_key_biases_and_ranks():
    data = ask_scores(WEIGHTS, ask, SPAN, 2, 1e-16, np.random.default_rng(2))
    assert data.ranks == (4, 4)
    for head, (left, right, bias) in zip(LAYER.heads, solve_scores(data, WEIGHTS), strict=True):
        assert np.allclose(left @ right, head.score, atol=1e-9)
        assert np.allclose(bias, head.key_bias, atol=1e-9)


def test_ranks_behind_a_network_that_is_known_to_six_digits():
    first, second = LAYER.heads
    axes, sizes, rows = np.linalg.svd(first.score)
    weak = (axes[:, :4] * [*sizes[:3], 0.01 * sizes[0]], rows[:4])
    layer = Attention([Head(weak, first.key_bias, first.value), second], LAYER.offset)
    noise = np.random.default_rng(5)

    def ask_noisily(anchor, tokens):
        queries = np.concatenate([anchor[:, None] + tokens, anchor[:, None]], axis=1)
        answers = layer(queries)
        return Soft(anchor, tokens, answers + 1e-6 * noise.standard_normal(answers.shape))

    data = ask_scores(WEIGHTS, ask_noisily, SPAN, 4, 1e-9, np.random.default_rng(2))
    assert data.ranks == (4, 4)


def test_steps_are_no_longer_than_allowed():
    short = Span(SPAN.base, 1.0, 1e-3)
    size, first, rest = find_size(WEIGHTS, ask, short, np.ones(8), np.eye(8)[None, :2], 1e-4)
    assert size == 1e-3
    assert rest < 1e-12
    assert np.array_equal(first.anchor[0], short.base)


def test_steps_are_shorter_where_keys_at_other_anchors_are_larger():
    strong, _ = np.linalg.qr(np.random.default_rng(2).standard_normal((8, 8)))  # the anchors' basis
    along = strong[:, 1]
    first, second = LAYER.heads
    more = 60.0 * np.outer(first.score_factors.left[:, 0], along)
    steep = Head(first.score + more, first.key_bias - more @ SPAN.base, first.value)
    layer = Attention([steep, second], LAYER.offset)

    def ask_steep(anchor, tokens):
        queries = np.concatenate([anchor[:, None] + tokens, anchor[:, None]], axis=1)
        return Soft(anchor, tokens, layer(queries))

    data = ask_scores(WEIGHTS, ask_steep, SPAN, 2, 1e-16, np.random.default_rng(2))
    left, right, _ = solve_scores(data, WEIGHTS)[0]
    # the smallest of these weights have few digits
    assert np.linalg.norm(left @ right - steep.score) < 1e-4 * np.linalg.norm(steep.score)


def test_an_answer_that_was_misread_is_left_out():
    rng = np.random.default_rng(3)
    soft = ask(rng.standard_normal((5, 8)), rng.standard_normal((5, 2, 8)))
    soft.answers[2] += 1e-6 * rng.standard_normal(8)
    assert np.isfinite(read_log_odds(WEIGHTS, soft)[0]).all()
    odds, rest = read_log_odds(WEIGHTS, soft, 1e-4)
    assert 1e-9 < rest < 1e-4
    assert np.isnan(odds[2]).all()
    assert np.isfinite(odds[[0, 1, 3, 4]]).all()


def test_what_is_unusual_is_told_by_the_others():
    usual = np.array([1e-10, 3e-10, 2e-10, 3e-5])
    assert usual[2] < usual_level(usual, 1e-4) < usual[3]
    assert usual_level(np.full(3, 1e-3), 1e-4) == 1e-4  # where many were misread
    assert usual_level(np.zeros(3), 1e-4) > 0.0


def test_too_many_heads_are_refused():
    many = PreNormWeights(np.repeat(MAPS, 5, axis=0), MAPS.sum(axis=0), LAYER.offset)
    with pytest.raises(Unclear, match="10 heads are too many"):
        read_at_once(many, 1e-16)
    assert read_at_once(WEIGHTS, 1e-16) == 3


def test_ranks_are_seen_above_the_noise():
    assert seen_rank(np.array([1.0, 1e-3, 1e-12]), 1e-16) == 2
    assert seen_rank(np.zeros(3), 1e-16) == 0
