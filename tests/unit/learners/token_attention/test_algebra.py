import numpy as np

from keyhole.learners.token_attention.algebra import (
    choose_contexts,
    match_heads,
    order_heads,
    predict_mixture,
    solve_scores,
    solve_values,
)
from keyhole.learners.token_attention.contexts import Contexts
from keyhole.learners.token_attention.multiplicities import Pair
from keyhole.learners.token_attention.refinement import AnsweredPrompts, AttentionModel, LowRankMap

RNG = np.random.default_rng(0)
VALUES, SCORES = 0.5 * RNG.standard_normal((2, 2, 6, 6))
TOKENS = RNG.standard_normal((30, 6))


def pair(anchor: int, token: int) -> Pair:
    step = TOKENS[token] - TOKENS[anchor]
    ones = np.ones(2)
    return Pair(TOKENS[anchor] @ SCORES @ step, VALUES @ step, ones, ones, 0.0)


def answers_to(contexts: Contexts) -> np.ndarray:
    data = AnsweredPrompts(contexts, np.zeros((len(contexts), 6)), TOKENS, 1.0, np.ones(30))
    maps = [LowRankMap.of(m, 6) for both in zip(VALUES, SCORES, strict=True) for m in both]
    return AttentionModel(data).predict(tuple(maps))


def test_a_mixed_prompt_is_predicted_and_tells_the_order_of_heads():
    contexts = Contexts.of([[(0, 2), (1, 1), (2, 3)]])
    predicted = predict_mixture([pair(0, 1), pair(0, 2)], [1, 3], 2)
    assert np.allclose(predicted, answers_to(contexts)[0])
    answer = answers_to(Contexts.of([[(0, 1), (1, 1), (2, 1), (3, 1)]]))[0]
    swapped = [order_heads(pair(0, 2), (1, 0)), pair(0, 3)]
    found = match_heads(pair(0, 1), swapped, answer)
    assert np.allclose(found[0].odds, pair(0, 2).odds)
    assert np.allclose(found[1].odds, pair(0, 3).odds)


def test_values_and_scores_are_linear_in_what_was_found():
    pairs = [pair(0, token) for token in range(1, 8)]
    values = solve_values(TOKENS[1:8] - TOKENS[0], pairs)
    assert np.allclose(values, VALUES)
    contexts = choose_contexts(values, TOKENS, np.arange(30), 16, 3, RNG)
    scores = solve_scores(values, TOKENS, contexts, answers_to(contexts), 1e-15)
    assert np.allclose(scores, SCORES, atol=1e-7)
