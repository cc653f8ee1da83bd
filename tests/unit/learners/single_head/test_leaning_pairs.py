"""Pairs stay in the ball, and their answers give back the score."""

import numpy as np
import pytest

from keyhole.learners.single_head.bounded_noise_intervals import Intervals
from keyhole.learners.single_head.bounded_noise_likelihood import most_likely
from keyhole.learners.single_head.leaning_pairs import Asked, LeaningPairs, PairReading
from keyhole.models.attention import Attention, Head

WIDTH, RADIUS = 7, 2.0


@pytest.mark.parametrize("outputs", [1, 4])
def test_pairs_stay_in_the_ball_and_give_back_the_score(outputs: int) -> None:
    rng = np.random.default_rng(outputs)
    score, value = rng.standard_normal((WIDTH, WIDTH)) / 3, rng.standard_normal((WIDTH, outputs))
    offset, key_bias = rng.standard_normal(outputs), rng.standard_normal(WIDTH) / 3
    model = Attention([Head(score, key_bias, value)], offset)
    pairs = LeaningPairs.towards(value, outputs == 1, rng)
    np.testing.assert_allclose(np.linalg.norm(pairs.probes, axis=1), 1.0)
    anchor = pairs.longest(RADIUS)
    probe = pairs.probe_lengths(anchor)
    tokens = pairs.tokens(slice(None), probe, anchor)
    norms = np.linalg.norm(tokens, axis=2).max(axis=1)
    assert norms.max() <= RADIUS * (1 + 1e-12)
    assert norms.min() > RADIUS / 2  # no room is given away
    answers = model(tokens).reshape(WIDTH, WIDTH, outputs).transpose(1, 0, 2)
    asked, reading = [Asked(answers, probe, anchor)], PairReading(pairs, value, offset)
    products, _ = most_likely(reading, asked, key_bias, 1e-9)
    np.testing.assert_allclose(pairs.score(products), score, atol=1e-10)
    low, high = Intervals(reading, np.full(value.shape, 1e-9), 1e-9).of_scores(
        asked, key_bias, np.zeros(WIDTH)
    )
    truth = pairs.probes @ score @ pairs.anchors.T
    assert ((low <= truth) & (truth <= high)).all()
    assert (high - low).max() < 1e-5


def test_single_pairs_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(3)
    pairs = LeaningPairs.towards(rng.standard_normal((WIDTH, 1)), True, rng)
    anchor = pairs.longest(RADIUS)
    probe = pairs.probe_lengths(anchor)
    every = pairs.tokens(slice(None), probe, anchor).reshape(WIDTH, WIDTH, 2, WIDTH)
    rows, columns = np.array([0, 4]), np.array([6, 1])
    some = pairs.some_tokens(rows, columns, probe, anchor)
    np.testing.assert_array_equal(some, every[columns, rows])
