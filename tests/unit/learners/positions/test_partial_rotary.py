"""Rotary positions of which a part of each head turns."""

import numpy as np

import keyhole
from keyhole.learners.positions.partial_rotary import solve_anchor
from keyhole.learners.positions.rotary import query_equations
from keyhole.learners.positions.rotary_fit import Asked, Waves
from keyhole.learners.positions.soft import Ratios
from keyhole.models.attention import Attention, Head
from keyhole.models.position import Position


def make_layer(seed: int, width: int, heads: int, pairs: int) -> Attention:
    """Heads of rank width / heads, of which so many pairs turn."""
    rng = np.random.default_rng(seed)
    rank = width // heads
    still = rank - 2 * pairs
    keys, queries = rng.standard_normal((2, heads, 2 * pairs, width + 1)) / width**0.5
    frequencies = 1e4 ** (-np.arange(pairs) / pairs)
    made = []
    for _ in range(heads):
        left, right = rng.standard_normal((2, width, still)) / width**0.5
        value = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width)) / width
        made.append(Head(left @ right.T, left @ rng.standard_normal(still) / 2, value))
    position = Position(frequencies, keys, queries)
    return Attention(made, rng.standard_normal(width), None, position)


def test_an_anchor_is_solved_for_both_parts() -> None:
    rng = np.random.default_rng(0)
    waves = Waves(np.array([1.0, 0.1]))
    keys, query = rng.standard_normal((1, 4, 7)), rng.standard_normal(4)
    anchor, still = rng.standard_normal((2, 6))
    tokens = anchor + rng.standard_normal((4, 3, 6))
    distances = np.arange(1, 4)
    ratios = np.stack(
        [
            query_equations(waves, keys[0], anchor, some, distances) @ query
            + (some - anchor) @ still
            for some in tokens
        ]
    )[:, None]
    asked = Asked(anchor, tokens, distances, Ratios(ratios, np.zeros_like(ratios)))
    found = solve_anchor(asked, waves, keys, None)
    assert np.allclose(found[0][0], query)
    assert np.allclose(found[1][0], still)


def test_a_part_of_each_head_turns() -> None:
    pairs = 1
    truth = make_layer(pairs, 8, 2, pairs)
    found = keyhole.recover(truth, seed=pairs, throw=False)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert len(found.model.position.frequencies) == pairs
    tokens = np.random.default_rng(9).standard_normal((3, 50, 8))
    gap = np.abs(found.model(tokens) - truth(tokens)).max()
    assert gap < 1e-6 * np.abs(truth(tokens)).max()
