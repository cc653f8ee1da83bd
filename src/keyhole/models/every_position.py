"""Attention read at every position: each token is in turn the query, all tokens are seen."""

from typing import Any

import numpy as np

from keyhole.arrays import Array, Float, sequences
from keyhole.models.attention import Attention


def every_position(
    model: Attention, tokens: Float[Array, "batch length width"]
) -> Float[Array, "batch length *out"]:
    """The layer's answers with each position as the query; the last is `model(tokens)`.

    >>> import numpy as np
    >>> from keyhole.models.attention import Head
    >>> layer = Attention([Head(np.zeros((2, 2)), None, np.array([1.0, 0.0]))])
    >>> every_position(layer, np.array([[[1.0, 0.0], [3.0, 0.0]]]))
    array([[2., 2.]])
    """
    tokens = sequences(tokens, model.width, model.dtype)
    answer: Any = np.broadcast_to(model.offset, (*tokens.shape[:2], *model.offset.shape)).copy()
    for head in model.heads:
        scores = head.keys(tokens) @ tokens.transpose(0, 2, 1)
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=2, keepdims=True)
        answer += (scores @ tokens) @ head.value
    return np.asarray(answer)
