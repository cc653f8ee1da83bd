"""Boxes for the tests: they hold the truth, count for themselves, and some are impostors."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole.models.attention import Attention


class CountingBox:
    """A function that counts the queries it sees, independently of the ledger."""

    def __init__(self, function: Callable[[np.ndarray], Any], width: int) -> None:
        self.function, self.width, self.seen = function, width, 0

    def __call__(self, tokens: np.ndarray) -> Any:
        self.seen += len(tokens)
        return self.function(tokens)


def in_float32(model: Attention) -> Callable[[np.ndarray], np.ndarray]:
    """The model as a box that computes in float32 from end to end."""
    single = model.astype(np.float32)
    return lambda tokens: single(tokens.astype(np.float32))


def softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def impostors(width: int, seed: int = 0) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    """Boxes that are not one softmax attention head, some of them only just."""
    rng = np.random.default_rng(seed)
    score, other = (rng.standard_normal((width, width)) / np.sqrt(width) for _ in range(2))
    value, second = rng.standard_normal(width), rng.standard_normal(width)
    hidden = rng.standard_normal((width, 2 * width)) / np.sqrt(width)
    gates = rng.standard_normal((3, 2, width, width)) / np.sqrt(width)
    readout = rng.standard_normal(2 * width)

    def scores(x: np.ndarray, matrix: np.ndarray = score) -> np.ndarray:
        return np.einsum("bnd,de,be->bn", x, matrix, x[:, -1])

    def mean(x: np.ndarray, s: np.ndarray) -> np.ndarray:
        return np.einsum("bn,bnd,d->b", softmax(s), x, value)

    def two_heads(x: np.ndarray) -> np.ndarray:
        return mean(x, scores(x)) + np.einsum("bn,bnd,d->b", softmax(scores(x, other)), x, second)

    def weak_second_head(x: np.ndarray) -> np.ndarray:
        extra = np.einsum("bn,bnd,d->b", softmax(scores(x, other)), x, 1e-4 * second)
        return mean(x, scores(x)) + extra

    def linear_attention(x: np.ndarray) -> np.ndarray:
        return np.einsum("bn,bnd,d->b", scores(x), x, value)

    def mean_mlp(x: np.ndarray) -> np.ndarray:
        return np.tanh(x.mean(axis=1) @ hidden) @ readout

    def gru(x: np.ndarray) -> np.ndarray:
        state = np.zeros((len(x), width))
        for t in range(x.shape[1]):
            update, reset = (
                1 / (1 + np.exp(-(x[:, t] @ gates[k, 0] + state @ gates[k, 1]))) for k in (0, 1)
            )
            new = np.tanh(x[:, t] @ gates[2, 0] + (reset * state) @ gates[2, 1])
            state = (1 - update) * state + update * new
        return state @ value

    def window(x: np.ndarray) -> np.ndarray:
        return mean(x[:, -8:], scores(x[:, -8:]))

    def capped(x: np.ndarray) -> np.ndarray:
        return mean(x, 30.0 * np.tanh(scores(x) / 30.0))

    def positions(x: np.ndarray) -> np.ndarray:
        return mean(x, scores(x) - 0.05 * np.arange(x.shape[1])[::-1])

    drift = {"asked": 0}

    def drifting(x: np.ndarray) -> np.ndarray:
        drift["asked"] += len(x)
        return mean(x, scores(x)) * (1 + 1e-7 * drift["asked"])

    return {
        "two heads": two_heads,
        "a weak second head": weak_second_head,
        "linear attention": linear_attention,
        "an MLP over the mean": mean_mlp,
        "a GRU": gru,
        "a window": window,
        "a score cap": capped,
        "a position bias": positions,
        "drift": drifting,
    }
