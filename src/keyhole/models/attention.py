"""Softmax attention read at the last position: the hypothesis most learners return.

    f(X) = offset + x_N . skip
           + sum_h sum_i softmax_i( x_i . (score_h x_N + key_bias_h) ) x_i . value_h

X has rows x_1 ... x_N; the last row is the anchor. Only the product `score` of the query and key
maps can be seen from outside, never the two maps, so the product is what a `Head` holds. `skip` is
what the anchor adds past the attention (a residual connection is the identity); where the place of
a token matters, `position` says how.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from keyhole.arrays import Array, Float, finite_array, frozen, sequences
from keyhole.errors import InvalidArgument
from keyhole.linalg.softmax import softmax
from keyhole.models.base import Shown
from keyhole.models.position import Position


class Factors(NamedTuple):
    """A score matrix kept as left @ right, (d, r) and (r, d)."""

    left: Array
    right: Array


class Head:
    """One attention head: token i has weight softmax_i(x_i . (score x_N + key_bias)).

    Args:
        score: (d, d), or a pair (left, right) with `left @ right` the matrix: it is then kept in
            factors and only multiplied out when `.score` is read.
        key_bias: (d,); None for zeros.
        value: (d,) where answers are numbers, (d, D) where they are vectors.

    Example:
        >>> import numpy as np
        >>> head = Head((np.ones((3, 1)), np.ones((1, 3))), None, np.ones(3))
        >>> head.rank_bound, head.score.shape
        (1, (3, 3))
    """

    score_factors: Factors | None
    key_bias: Array
    value: Array

    def __init__(self, score: Any, key_bias: Any, value: Any) -> None:
        self._score: Array | None = None
        self.score_factors = None
        if isinstance(score, tuple):
            left = frozen(finite_array("score factor left", score[0], ndim=2))
            right = frozen(finite_array("score factor right", score[1], ndim=2))
            if left.shape != right.shape[::-1]:
                raise InvalidArgument(
                    f"score factors must be (d, r) and (r, d), got {left.shape} and {right.shape}"
                )
            self.score_factors = Factors(left, right)
            width = left.shape[0]
        else:
            self._score = frozen(finite_array("score", score, ndim=2))
            width = self._score.shape[0]
            if self._score.shape != (width, width):
                raise InvalidArgument(f"score must be square, got shape {self._score.shape}")
        self.value = frozen(finite_array("value", value, ndim=(1, 2)))
        self.key_bias = frozen(
            np.zeros(width, self.value.dtype)
            if key_bias is None
            else finite_array("key_bias", key_bias, ndim=1)
        )
        if width < 1 or self.value.size == 0:
            raise InvalidArgument(
                f"the width and the value's columns must be at least 1, got score of width {width} "
                f"and value of shape {self.value.shape}"
            )
        for name, array in (("key_bias", self.key_bias), ("value", self.value)):
            if array.shape[0] != width:
                raise InvalidArgument(
                    f"{name} has {array.shape[0]} rows, but score says the width is {width}"
                )

    @property
    def width(self) -> int:
        return int(self.value.shape[0])

    @property
    def score(self) -> Float[Array, "d d"]:
        if self._score is None:
            assert self.score_factors is not None
            return self.score_factors.left @ self.score_factors.right
        return self._score

    @property
    def rank_bound(self) -> int:
        """A rank that `score` cannot exceed by construction."""
        return self.width if self.score_factors is None else int(self.score_factors.left.shape[1])

    def keys(self, queries: Float[Array, "*n d"]) -> Float[Array, "*n d"]:
        """What a token is multiplied with to give its score, per query: score @ x_N + key_bias."""
        if self.score_factors is None:
            keys = queries @ self.score.T
        else:
            keys = (queries @ self.score_factors.right.T) @ self.score_factors.left.T
        keys += self.key_bias
        return keys

    def astype(self, dtype: Any) -> "Head":
        score: Any = (
            tuple(part.astype(dtype) for part in self.score_factors)
            if self.score_factors is not None
            else self.score.astype(dtype)
        )
        return Head(score, self.key_bias.astype(dtype), self.value.astype(dtype))

    def __repr__(self) -> str:
        kind = "dense" if self.score_factors is None else f"rank ≤ {self.rank_bound}"
        return f"Head(width={self.width}, score {kind}, value {self.value.shape})"


class Attention(Shown):
    """A layer of attention heads with a common offset; callable like the box.

    Args:
        heads: Whose values have one shape.
        offset: Added to every answer.
        skip: (d,) or (d, D) like a value: what the last token adds past the heads; None for
            nothing.
        position: How the places of tokens count; None where heads see the earlier tokens as a set.

    Example:
        >>> import numpy as np
        >>> model = Attention([Head(np.zeros((2, 2)), None, np.array([1.0, 0.0]))], 0.5)
        >>> model(np.array([[[1.0, 0.0], [3.0, 0.0]]]))
        array([2.5])
    """

    heads: tuple[Head, ...]
    offset: Array
    skip: Array | None
    position: Position | None

    def __init__(
        self,
        heads: Sequence[Head],
        offset: Any = 0.0,
        skip: Any = None,
        position: Position | None = None,
    ) -> None:
        if not heads:
            raise InvalidArgument("Attention needs at least one head")
        self.heads = tuple(heads)
        first = self.heads[0]
        for head in self.heads[1:]:
            if head.value.shape != first.value.shape:
                raise InvalidArgument(
                    f"heads disagree on the value's shape: {first.value.shape}, {head.value.shape}"
                )
        array = finite_array("offset", offset, ndim=(0, 1)).astype(first.value.dtype)
        if array.shape not in ((), first.value.shape[1:]):
            raise InvalidArgument(
                f"offset must have shape {first.value.shape[1:]}, got {array.shape}"
            )
        self.offset = frozen(np.broadcast_to(array, first.value.shape[1:]))
        self.skip = None
        if skip is not None:
            self.skip = frozen(finite_array("skip", skip, ndim=(1, 2)).astype(first.value.dtype))
            if self.skip.shape != first.value.shape:
                raise InvalidArgument(
                    f"skip must have the values' shape {first.value.shape}, got {self.skip.shape}"
                )
        self.position = position
        check_position(position, len(self.heads), first.width)

    @property
    def width(self) -> int:
        return self.heads[0].width

    @property
    def outputs(self) -> int | None:
        """None for a scalar answer, else the length of the answer's vector."""
        shape = self.heads[0].value.shape
        return None if len(shape) == 1 else int(shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.result_type(*(head.value.dtype for head in self.heads))

    def astype(self, dtype: Any) -> "Attention":
        """The same layer that computes in another precision."""
        return Attention(
            [h.astype(dtype) for h in self.heads],
            self.offset.astype(dtype),
            None if self.skip is None else self.skip.astype(dtype),
            None if self.position is None else self.position.astype(dtype),
        )

    def with_heads(
        self, heads: Sequence[Head], numbers: Sequence[int] | None = None
    ) -> "Attention":
        """Other heads, everything else as it is; where they are not as many as before, `numbers`
        says which of the old ones each of them stands for."""
        position = self.position
        if position is not None and numbers is not None:
            position = position.of_heads(numbers)
        return Attention(heads, self.offset, self.skip, position)

    def score_at(self, head: int, distance: int = 0) -> Float[Array, "e e"]:
        """The score between [token; 1] and [anchor; 1] at a distance, all its terms."""
        width, own = self.width, self.heads[head]
        matrix = np.zeros((width + 1, width + 1))
        matrix[:-1, :-1], matrix[:-1, -1] = own.score, own.key_bias
        if self.position is not None:
            matrix += self.position.score_at(head, distance, width)
        return matrix

    def __call__(self, tokens: Float[Array, "batch length width"]) -> Float[Array, "batch *out"]:
        tokens = sequences(tokens, self.width, self.dtype)
        if self.position is not None:
            tokens = self.position.place(tokens)
        query = tokens[:, -1, :]
        answer: Any = np.broadcast_to(self.offset, (len(tokens), *self.offset.shape)).copy()
        if self.skip is not None:
            answer += query @ self.skip
        for number, head in enumerate(self.heads):
            scores = (tokens @ head.keys(query)[:, :, None])[:, :, 0]
            weights = self._weights(number, tokens, query, scores)
            if head.value.ndim == 1:
                answer += np.einsum("bn,bn->b", weights, tokens @ head.value)
            else:
                answer += (weights[:, None, :] @ tokens)[:, 0, :] @ head.value
            if self.position is not None and self.position.sink_values is not None:
                share = 1.0 - weights.sum(axis=1, keepdims=True)
                answer += share * self.position.sink_values[number]
        return np.asarray(answer)

    def _weights(self, head: int, tokens: Array, anchor: Array, scores: Array) -> Array:
        """Attention weights of a head, given the scores that know no positions."""
        if self.position is None:
            return softmax(scores)
        distances = np.arange(tokens.shape[1])[::-1]
        scores = scores + self.position.added(head, tokens, anchor, distances)
        if self.position.masked_anchor and not np.isfinite(scores).any():
            return np.zeros_like(scores)
        if self.position.sinks is None:
            return softmax(scores)
        sink = self.position.sink_scores(head, anchor)
        return softmax(np.concatenate([scores, sink], axis=1))[:, :-1]

    def natural_length(self) -> float:
        """Length of random tokens at which the scores of the median head are of order one."""
        lengths = []
        for head in self.heads:
            factors = head.score_factors
            if factors is None:
                size = float(np.linalg.norm(head.score))
            else:
                size = float(
                    np.sqrt(
                        np.sum((factors.left.T @ factors.left) * (factors.right @ factors.right.T))
                    )
                )
            quadratic, linear = size / self.width, np.linalg.norm(head.key_bias) / self.width**0.5
            slope = float(linear + np.sqrt(linear**2 + 4.0 * quadratic))
            lengths.append(2.0 / slope if slope > 0 else self.width**0.5)
        return float(np.median(lengths))

    def to_arrays(self) -> dict[str, Array]:
        """Every parameter by name; `from_arrays` is the inverse."""
        arrays = {"offset": self.offset}
        if self.skip is not None:
            arrays["skip"] = self.skip
        for i, head in enumerate(self.heads):
            if head.score_factors is None:
                arrays[f"heads.{i}.score"] = head.score
            else:
                arrays[f"heads.{i}.score_left"] = head.score_factors.left
                arrays[f"heads.{i}.score_right"] = head.score_factors.right
            arrays[f"heads.{i}.key_bias"] = head.key_bias
            arrays[f"heads.{i}.value"] = head.value
        if self.position is not None:
            arrays.update(self.position.to_arrays())
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "Attention":
        heads: list[Head] = []
        try:
            while f"heads.{len(heads)}.value" in arrays:
                name = f"heads.{len(heads)}"
                score: Any = arrays.get(f"{name}.score")
                if score is None:
                    score = (arrays[f"{name}.score_left"], arrays[f"{name}.score_right"])
                heads.append(Head(score, arrays[f"{name}.key_bias"], arrays[f"{name}.value"]))
            position = Position.from_arrays(arrays)
            return cls(heads, arrays["offset"], arrays.get("skip"), position)
        except KeyError as missing:
            raise InvalidArgument(f"parameter {missing} is missing") from missing

    def __repr__(self) -> str:
        beside = "" if self.skip is None else ", skip"
        beside += "" if self.position is None else f", position={self.position.kind}"
        return (
            f"Attention(width={self.width}, heads={len(self.heads)}, "
            f"outputs={'scalar' if self.outputs is None else self.outputs}{beside})"
        )


def check_position(position: Position | None, heads: int, width: int) -> None:
    """Refuses parts made for another number of heads or another width."""
    if position is None:
        return
    for name in ("keys", "bias", "slopes", "sinks", "sink_values"):
        part = getattr(position, name)
        if part is not None and len(part) != heads:
            raise InvalidArgument(f"position {name} is for {len(part)} heads, there are {heads}")
    for name, inner in (("keys", width + 1), ("vectors", width)):
        part = getattr(position, name)
        if part is not None and part.shape[-1] != inner:
            raise InvalidArgument(f"position {name} must have rows of {inner}, got {part.shape}")


def every_position(
    model: Attention, tokens: Float[Array, "batch length width"]
) -> Float[Array, "batch length *out"]:
    """The layer's answers with each position as the anchor, all tokens seen by each; the last is
    `model(tokens)`.

    >>> import numpy as np
    >>> layer = Attention([Head(np.zeros((2, 2)), None, np.array([1.0, 0.0]))])
    >>> every_position(layer, np.array([[[1.0, 0.0], [3.0, 0.0]]]))
    array([[2., 2.]])
    """
    if model.position is not None:
        raise InvalidArgument("every_position is for layers without positions")
    tokens = sequences(tokens, model.width, model.dtype)
    answer: Any = np.broadcast_to(model.offset, (*tokens.shape[:2], *model.offset.shape)).copy()
    if model.skip is not None:
        answer += tokens @ model.skip
    for head in model.heads:
        scores = head.keys(tokens) @ tokens.transpose(0, 2, 1)
        weights = softmax(scores, overwrite=True)
        answer += (weights @ tokens) @ head.value
    return np.asarray(answer)
