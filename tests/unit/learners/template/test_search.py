import time

import numpy as np
from tests.templates import AttentionHeads, Pooled, randomise
from torch import nn

from keyhole.learners.template.forward import Answered, Forward
from keyhole.learners.template.search import Effort, search
from keyhole.learners.template.widening import find_pairs


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
