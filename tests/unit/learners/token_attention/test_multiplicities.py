import numpy as np
import pytest

from keyhole.learners.token_attention.multiplicities import (
    choose_proportions,
    count_heads,
    exceeds_attention,
    solve_pair,
    weights_of,
)


def answers_of(odds: list[float], count: int, seed: int = 0) -> tuple:
    both = choose_proportions(count, 48)
    proportions = np.array([copies / one for copies, one in both])
    moves = np.random.default_rng(seed).standard_normal((len(odds), 10))
    return proportions, weights_of(proportions, np.array(odds)) @ moves, moves


def test_proportions_fit_into_a_prompt_and_span_the_decades():
    both = choose_proportions(9, 48)
    assert len(both) == 9
    assert all(copies >= 1 and one >= 1 and copies + one <= 49 for copies, one in both)
    assert both[0][0] / both[0][1] < 0.05 < 20.0 < both[-1][0] / both[-1][1]


@pytest.mark.parametrize("odds", [[0.3], [-1.0, 1.5], [-2.0, 0.1, 1.0], [-2.0, -0.5, 0.7, 2.5]])
def test_heads_are_counted_and_solved_from_one_proportion_more(odds):
    proportions, answers, moves = answers_of(odds, len(odds) + 1)
    assert count_heads(answers, 1e-13) == len(odds)
    found = solve_pair(proportions, answers, len(odds), np.random.default_rng(0))
    order = np.argsort(found.odds)
    assert found.odds[order] == pytest.approx(odds, abs=1e-7)
    assert np.allclose(found.moves[order], moves, atol=1e-6)


def test_standard_errors_are_those_seen():
    proportions, answers, moves = answers_of([-1.0, 1.5], 8)
    rng, gaps = np.random.default_rng(1), []
    for _ in range(20):
        noisy = answers + 1e-5 * rng.standard_normal(answers.shape)
        found = solve_pair(proportions, noisy, 2, rng)
        gaps.append(found.moves[np.argsort(found.odds)] - moves)
    seen = np.sqrt(np.mean(np.square(gaps), axis=(0, 2)))
    assert seen == pytest.approx(1e-5 * found.move_errors[np.argsort(found.odds)], rel=0.4)


def test_a_network_behind_the_attention_is_less_smooth_than_any_heads():
    proportions, answers, _ = answers_of([-2.0, -0.5, 0.7, 2.5], 32)
    assert exceeds_attention(proportions, answers, 1e-14) is None
    many = answers_of(list(np.linspace(-3.0, 3.0, 12)), 32)[1]
    assert exceeds_attention(proportions, many, 1e-14) is None
    inner = np.random.default_rng(3).standard_normal((10, 20))
    for network in (np.tanh, lambda x: np.maximum(x, 0.0)):
        assert exceeds_attention(proportions, network(answers @ inner), 1e-14) is not None
