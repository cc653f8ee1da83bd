"""Layers and Boolean tokens for the learner from examples."""

import numpy as np

from keyhole.models.attention import Attention, Head


def layer(rng: np.random.Generator, d: int, heads: int, scale: float = 1.0) -> Attention:
    """Scores of Frobenius norm `scale`: the standard deviation of a score on Boolean tokens."""
    members = []
    for _ in range(heads):
        score = rng.standard_normal((d, d))
        value = rng.standard_normal((d, d)) / np.sqrt(d)
        members.append(Head(scale * score / np.linalg.norm(score), None, value))
    return Attention(members, np.zeros(d))


def boolean(rng: np.random.Generator, n: int, k: int, d: int) -> np.ndarray:
    return rng.choice([-1.0, 1.0], (n, k, d))
