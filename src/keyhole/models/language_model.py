"""What the answers of a language model give away: its output layer, or all of it if it is small.

`OutputLayer` is the last step, from the normalised hidden state n to logits: matrix n + offset.
It knows which answers are possible, not which prompt leads to which: `nearest` instead of a call.

`TokenAttention` is a whole model of one attention layer on tokens, without positions, norms and
networks. Token t behind tokens s_1 ... s_n = t is answered with the logits

    direct[t] + sum over heads, j of softmax_j(qk[t, s_j]) ov[s_j].

The tables have a row and a column per token of the vocabulary and are kept in factors.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import log_softmax

from keyhole.arrays import TINY, Array, Float, finite_array, frozen, real_number
from keyhole.errors import InvalidArgument
from keyhole.linalg.softmax import softmax
from keyhole.models.base import Shown

LEVELS = ("space", "gram")  # up to a linear map, up to a rotation
NORMS = ("layer", "rms")


# -- The output layer ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Reading:
    """One explanation of the answers: the norm before the output layer, and its width."""

    norm: str
    width: int

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise InvalidArgument(f"norm must be one of {', '.join(NORMS)}, got {self.norm!r}")

    def __str__(self) -> str:
        return f"{'LayerNorm' if self.norm == 'layer' else 'RMSNorm'} of width {self.width}"


class OutputLayer(Shown):
    """`matrix` (V, h), `offset` (V,), `level`, `readings` (the first is preferred), `width` h.

    level "space": only the space that the columns of `matrix` span is known; its basis here is
    orthonormal, and the offset lies in it. level "gram": known up to a rotation of the hidden
    states, which have the length sqrt(h). Behind a LayerNorm, which hides one direction, the rows
    of such a matrix sum to zero. `shifted`: the answers are known up to a constant each, as
    log-probabilities are; matrix and offset are then centred over the tokens.

    >>> import numpy as np
    >>> layer = OutputLayer(np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    >>> layer.width, layer.nearest(np.array([[2.0, 3.0, 5.0]]))
    (2, array([[2., 3., 0.]]))
    """

    def __init__(
        self,
        matrix: Any,
        offset: Any = None,
        *,
        level: str = "space",
        readings: Sequence[Reading] | None = None,
        shifted: bool = False,
        spread: float = 0.0,
    ) -> None:
        table = finite_array("matrix", matrix, ndim=2)
        added = np.zeros(len(table)) if offset is None else offset
        if level not in LEVELS:
            raise InvalidArgument(f"level must be one of {', '.join(LEVELS)}, got {level!r}")
        self.matrix = frozen(table)
        self.offset = frozen(finite_array("offset", added, ndim=1))
        if self.offset.shape != (len(table),):
            raise InvalidArgument(
                f"offset must have one number per token, {len(table)}, got {self.offset.shape}"
            )
        self.level, self.shifted = level, bool(shifted)
        self.spread = real_number("spread", float(spread), 0.0, with_low=True)
        self.readings = tuple(readings or [Reading("rms", table.shape[1])])

    @property
    def width(self) -> int:
        return int(self.matrix.shape[1])

    @property
    def tokens(self) -> int:
        """Size of the vocabulary."""
        return int(self.matrix.shape[0])

    @property
    def outputs(self) -> int:
        return self.tokens

    def states(self, answers: Float[Array, "n V"]) -> Float[Array, "n h"]:
        """The normalised hidden states behind these answers."""
        rest = np.asarray(answers, dtype=np.float64) - self.offset
        if self.shifted:
            rest = rest - rest.mean(axis=1, keepdims=True)
        return np.asarray(rest @ np.linalg.pinv(self.matrix, rcond=1e-9).T)

    def logits(self, states: Float[Array, "n h"]) -> Float[Array, "n V"]:
        """Answers (up to a constant each, where they are `shifted`) of hidden states."""
        return np.asarray(states @ self.matrix.T + self.offset)

    def choose(self, tokens: Sequence[int]) -> "OutputLayer":
        """The same layer for these tokens alone, in their order."""
        rows = np.asarray(tokens, dtype=np.int64)
        matrix, offset = self.matrix[rows], self.offset[rows]
        if self.shifted:
            matrix, offset = matrix - matrix.mean(axis=0), offset - offset.mean()
        return OutputLayer(
            matrix,
            offset,
            level=self.level,
            readings=self.readings,
            shifted=self.shifted,
            spread=self.spread,
        )

    def nearest(self, answers: Float[Array, "n V"]) -> Float[Array, "n V"]:
        """The possible answers next to these. At level "gram" the hidden state must also have the
        length that the norm gives it, unless it is off by no more than `spread` of its square
        (epsilon of the norm, and noise)."""
        answers = np.asarray(answers, dtype=np.float64)
        states = self.states(answers)
        if self.level == "gram":
            square = np.sum(states**2, axis=1, keepdims=True) / self.width
            near = np.clip(square, 1.0 - self.spread, 1.0 + self.spread)
            states = states * np.sqrt(near / np.maximum(square, TINY))
        found = self.logits(states)
        if self.shifted:
            found = found + (answers - found).mean(axis=1, keepdims=True)
        return np.asarray(found)

    def to_arrays(self) -> dict[str, Array]:
        """Every parameter by name; names of empty arrays tell level, spread, readings and shift."""
        arrays = {
            "matrix": self.matrix,
            "offset": self.offset,
            f"level.{self.level}": np.zeros(0),
            f"spread.{self.spread!r}": np.zeros(0),
        }
        for k, reading in enumerate(self.readings):
            arrays[f"reading.{k}.{reading.norm}.{reading.width}"] = np.zeros(0)
        return arrays | ({"shifted": np.zeros(0)} if self.shifted else {})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "OutputLayer":
        level = [name.split(".")[1] for name in arrays if name.startswith("level.")]
        found = sorted(name.split(".") for name in arrays if name.startswith("reading."))
        spread = [name.removeprefix("spread.") for name in arrays if name.startswith("spread.")]
        if len(level) != 1:
            raise InvalidArgument(f"the level of an output layer is needed once, got {level}")
        return cls(
            arrays["matrix"],
            arrays["offset"],
            level=level[0],
            readings=[Reading(norm, int(width)) for _, _, norm, width in found],
            shifted="shifted" in arrays,
            spread=float(spread[0]) if spread else 0.0,
        )

    def __repr__(self) -> str:
        known = "a linear map" if self.level == "space" else "a rotation"
        return f"OutputLayer(tokens={self.tokens}, width={self.width}, known up to {known})"


# -- A model of one attention layer --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Table:
    """A table of a row per token, left @ right. `np.asarray(table)` multiplies it out."""

    left: Float[Array, "V r"]
    right: Float[Array, "r W"]

    def __post_init__(self) -> None:
        for name in ("left", "right"):
            part = frozen(finite_array(name, getattr(self, name), ndim=2))
            object.__setattr__(self, name, part)
        if self.left.shape[1] != self.right.shape[0]:
            raise InvalidArgument(
                f"factors of shapes {self.left.shape} and {self.right.shape} do not fit together"
            )

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.left.shape[0]), int(self.right.shape[1])

    @property
    def rank(self) -> int:
        """At most this."""
        return int(self.left.shape[1])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self.left @ self.right, dtype=dtype)


@dataclass(frozen=True, eq=False)
class TokenHead:
    """`qk`[t, s]: how token t scores token s. `ov`[s]: what s then adds to the logits."""

    qk: Table
    ov: Table


class TokenAttention(Shown):
    """`direct`, `heads`: tables of a row per token of the vocabulary. `logprobs`: answers are the
    log-probabilities of these logits.

    >>> import numpy as np
    >>> one = Table(np.eye(3), np.eye(3))
    >>> TokenAttention(one, [TokenHead(Table(np.zeros((3, 1)), np.zeros((1, 3))), one)])(
    ...     np.array([[0, 1]]))
    array([[0.5, 1.5, 0. ]])
    """

    def __init__(
        self, direct: Table, heads: Sequence[TokenHead], *, logprobs: bool = False
    ) -> None:
        self.direct, self.heads, self.logprobs = direct, tuple(heads), bool(logprobs)
        shapes = {part.shape for head in self.heads for part in (head.qk, head.ov)}
        if direct.shape[0] != direct.shape[1] or shapes - {direct.shape}:
            raise InvalidArgument(
                f"all tables of a model have one square shape, got {direct.shape} and {shapes}"
            )

    @property
    def tokens(self) -> int:
        """Size of the vocabulary."""
        return self.direct.shape[0]

    @property
    def width(self) -> int:
        return 1  # of a token, which is a number

    @property
    def outputs(self) -> int:
        return self.tokens

    def __call__(self, tokens: Array) -> Float[Array, "n V"]:
        """Answers to prompts of token numbers, of shape (n, length) or (n, length, 1)."""
        numbers = np.rint(np.asarray(tokens)).astype(np.int64)
        numbers = numbers[:, :, 0] if numbers.ndim == 3 else numbers
        last = numbers[:, -1]
        found = self.direct.left[last] @ self.direct.right
        for head in self.heads:
            scores = np.einsum("nr,rnl->nl", head.qk.left[last], head.qk.right[:, numbers])
            seen = np.einsum("nl,nlr->nr", softmax(scores), head.ov.left[numbers])
            found = found + seen @ head.ov.right
        return np.asarray(log_softmax(found, axis=1) if self.logprobs else found)

    def to_arrays(self) -> dict[str, Array]:
        """Every factor by name; `from_arrays` is the inverse."""
        arrays = {"direct_left": self.direct.left, "direct_right": self.direct.right}
        for k, head in enumerate(self.heads):
            for name, table in (("qk", head.qk), ("ov", head.ov)):
                arrays[f"heads.{k}.{name}_left"] = table.left
                arrays[f"heads.{k}.{name}_right"] = table.right
        return arrays | ({"logprobs": np.zeros(0)} if self.logprobs else {})

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "TokenAttention":
        def table(name: str) -> Table:
            return Table(arrays[f"{name}_left"], arrays[f"{name}_right"])

        count = sum(name.endswith("qk_left") for name in arrays)
        return cls(
            table("direct"),
            [TokenHead(table(f"heads.{k}.qk"), table(f"heads.{k}.ov")) for k in range(count)],
            logprobs="logprobs" in arrays,
        )

    def __repr__(self) -> str:
        ranks = ", ".join(f"qk {head.qk.rank}, ov {head.ov.rank}" for head in self.heads)
        return f"TokenAttention(tokens={self.tokens}, {len(self.heads)} heads of ranks {ranks})"
