"""Designed tokens are orthonormal, and every subspace sees them far better than random ones."""

import numpy as np

from keyhole.linalg.token_frames import spread_tokens


def worst(bases: list[np.ndarray], tokens: np.ndarray, count: int) -> float:
    blocks = tokens.reshape(tokens.shape[0], -1, count).transpose(1, 0, 2)
    return max(float(np.linalg.cond(base.T @ block)) for base in bases for block in blocks)


def test_design_beats_chance() -> None:
    rng = np.random.default_rng(0)
    bases = [np.linalg.qr(rng.standard_normal((48, 6)))[0] for _ in range(8)]
    tokens = spread_tokens(bases, 6, 8, rng)
    np.testing.assert_allclose(tokens.T @ tokens, np.eye(48), atol=1e-12)
    chance = np.linalg.qr(rng.standard_normal((48, 48)))[0]
    assert worst(bases, tokens, 6) < 6 < worst(bases, chance, 6)


def test_more_blocks_than_fit_at_once() -> None:
    rng = np.random.default_rng(1)
    bases = [np.linalg.qr(rng.standard_normal((10, 3)))[0] for _ in range(2)]
    tokens = spread_tokens(bases, 3, 4, rng)
    assert tokens.shape == (10, 12)
    assert np.linalg.matrix_rank(tokens) == 10


def test_some_bases_see_all_blocks_together() -> None:
    """Blocks of half the width say nothing about the whole unless it is asked for."""
    conditions = []
    for asked in (True, False):
        rng = np.random.default_rng(2)
        bases = [np.linalg.qr(rng.standard_normal((64, 8)))[0] for _ in range(8)]
        ranges = [np.linalg.qr(rng.standard_normal((64, 8)))[0] for _ in range(8)]
        if asked:
            tokens = spread_tokens(bases, 4, 2, rng, whole=ranges)
        else:
            tokens = spread_tokens(bases + ranges, 4, 2, rng)
        conditions.append(max(float(np.linalg.cond(part.T @ tokens)) for part in ranges))
    assert conditions[0] < 6 < conditions[1]
