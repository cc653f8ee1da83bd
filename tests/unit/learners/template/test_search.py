import time

import numpy as np
import pytest
from tests.templates import AttentionHeads, Encoder, Pooled, randomise
from torch import nn

from keyhole.learners.template.forward import Answered, Forward, Residuals
from keyhole.learners.template.search import (
    EXPLAINED,
    FOUND,
    Effort,
    SingleTokens,
    find_shown,
    limit,
    search,
)
from keyhole.learners.template.widening import embed, find_pairs


def answer(forward: Forward, size: float, rows: int, width: int) -> list[Answered]:
    rng = np.random.default_rng(0)
    data = []
    for length in (1, 2, 3):
        tokens = size * rng.standard_normal((rows, length, width))
        answers = forward.predict(forward.weights, tokens)
        data.append(Answered(tokens, answers, np.full(answers.shape, 1e-16)))
    return data


def assert_explained(module: nn.Module, width: int) -> None:
    forward = Forward.of(randomise(module, 0))
    data = answer(forward, 0.5, 60, width)
    pairs = find_pairs(forward, width, 1)
    rng, effort = np.random.default_rng(0), Effort(time.process_time() + 60.0)
    best = search(forward, pairs, data, data, effort, rng)
    fresh = rng.standard_normal((20, 5, width))
    gap = forward.predict(best.weights, fresh) - forward.predict(forward.weights, fresh)
    assert best.explained
    assert np.abs(gap).max() < 1e-10


def test_search_from_random_starts_explains_the_answers() -> None:
    assert_explained(AttentionHeads(4, 1), 4)


def test_a_network_through_a_wider_one() -> None:
    assert_explained(Pooled(), 3)


def test_time_that_is_up_returns_the_template_all_the_same() -> None:
    forward = Forward.of(randomise(Pooled(), 0))
    data = answer(forward, 0.5, 20, 3)
    pairs = find_pairs(forward, 3, 1)
    best = search(forward, pairs, data, data, Effort(0.0), np.random.default_rng(0))
    assert len(best.weights) == forward.unknowns
    assert not best.explained


def make_single_tokens(module: nn.Module, width: int = 3) -> tuple[Forward, SingleTokens]:
    forward = Forward.of(randomise(module, 0))
    residuals = Residuals(forward, answer(forward, 1.0, 60, width))
    effort = Effort(time.process_time() + 60.0)
    return forward, SingleTokens(forward, find_pairs(forward, width, 1), residuals, effort)


def test_single_tokens_show_neither_queries_nor_keys() -> None:
    forward, way = make_single_tokens(Encoder(3, 3, 1, 3, 3))
    shown = forward.split(find_shown(way.alone))
    assert not shown["layer.self_attn.in_proj_weight"][:6].any()
    assert shown["layer.self_attn.in_proj_weight"][6:].all()
    assert shown["layer.linear1.weight"].all()


@pytest.mark.parametrize("activation", [nn.GELU(), nn.ReLU()])
def test_from_single_tokens_to_all(activation: nn.Module) -> None:
    module = Pooled()
    module.net[1] = activation
    _, way = make_single_tokens(module)
    found = way.go(np.random.default_rng(0))
    assert found is not None
    assert found.loss <= EXPLAINED
    assert way.starts <= 8


def test_a_slice_of_the_stream_is_told_from_the_whole() -> None:
    assert make_single_tokens(Encoder(3, 4, 1, 4, 2))[1].sliced
    assert not make_single_tokens(Encoder(3, 3, 1, 3, 2))[1].sliced


def test_behind_narrow_tokens_the_surplus_goes_last() -> None:
    forward, way = make_single_tokens(Encoder(3, 4, 1, 4, 4))
    wide, whole = way.wides[0]
    rng = np.random.default_rng(0)
    start = embed(forward, whole.forward, forward.weights)
    start += 1e-3 * rng.standard_normal(len(start))
    found = way.attach_wide(whole, start, wide.shown, rng)
    assert found is not None
    assert found.loss <= EXPLAINED
    assert len(found.weights) == forward.unknowns


def test_levels_end_at_rounding() -> None:
    forward = Forward.of(randomise(Pooled(), 0))
    (exact, *_), (coarse, *_) = (
        [Answered(one.tokens, one.answers, np.full_like(one.answers, error)) for one in data]
        for data, error in ((answer(forward, 1.0, 5, 3), size) for size in (1e-16, 1e-3))
    )
    fine = Residuals(forward, [exact])
    assert limit(fine, FOUND) == FOUND * fine.size
    assert limit(Residuals(forward, [coarse]), FOUND) == EXPLAINED
