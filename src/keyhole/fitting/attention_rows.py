"""Attention of several heads on labelled rows: forward, derivative and its adjoint, matrix-free.

A row is one output vector: the anchor it was read at and the tokens it attends to. All heads are
computed at once: with T the tokens of an example and Q its anchors,

    S_i = Q Theta_i T^t,   P_i = softmax(S_i),   A_i = P_i T,   Y = sum_i A_i W_i (+ offset),
    dA_i = (P_i * (dS_i - <P_i, dS_i>)) T,       dS_i = Q dTheta_i T^t.

`theta` is stored as (p, m, d): the product with all heads is then one matrix product, and A comes
out as the (rows, m d) matrix in which the values are linear.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import eigh

from keyhole.arrays import Array, Float
from keyhole.linalg.softmax import softmax, softmax_jvp

MASKED = -1e30  # a score no real one can reach, finite so that differences stay numbers


@dataclass(frozen=True, eq=False)
class Rows:
    """Labelled rows of n examples, padded to a common length.

    anchors (n, a, p): the token each row was read at (with a last entry 1 where key biases are
    fitted, then p = d + 1); tokens (n, L, d); padding (n, 1, L): 0 or MASKED, None where no
    example is shorter than L; weights (n, a): 1 where the row counts, 0 where it is padding or
    kept aside; targets (n, a, D).
    """

    anchors: Float[Array, "n a p"]
    tokens: Float[Array, "n L d"]
    padding: Float[Array, "n 1 L"] | None
    weights: Float[Array, "n a"]
    targets: Float[Array, "n a D"]
    offset: bool = False  # whether a constant is fitted beside the heads

    @property
    def width(self) -> int:
        return int(self.tokens.shape[2])

    @property
    def outputs(self) -> int:
        return int(self.targets.shape[2])

    @property
    def counted(self) -> int:
        """Rows that count."""
        return int(np.count_nonzero(self.weights))

    @property
    def lengths(self) -> Array:
        """Number of real tokens of each example."""
        if self.padding is None:
            return np.full(len(self.tokens), self.tokens.shape[1])
        return np.asarray((self.padding[:, 0, :] == 0).sum(axis=1))

    @property
    def score_differences(self) -> int:
        """Score differences that one head shows in the rows that count."""
        return int(((self.weights > 0).sum(axis=1) * (self.lengths - 1)).sum())

    def unknowns(self, heads: int) -> int:
        """Free numbers in a model of that many heads."""
        scores = int(self.anchors.shape[2]) * self.width
        return heads * (scores + self.width * self.outputs) + self.outputs * self.offset

    def ratio(self, heads: int) -> float:
        """How many times the rows outnumber the unknowns: examples over the floor."""
        numbers = self.counted * self.outputs / self.unknowns(heads)
        scores = self.score_differences / (self.anchors.shape[2] * self.width)
        return float(min(numbers, scores))

    def take(self, index: Array) -> "Rows":
        """Some of the examples."""
        return replace(
            self,
            anchors=self.anchors[index],
            tokens=self.tokens[index],
            padding=None if self.padding is None else self.padding[index],
            weights=self.weights[index],
            targets=self.targets[index],
        )

    def sample(self, heads: int, times: float, rng: np.random.Generator) -> "Rows":
        """Random examples, so many times the floor, where there are more than twice as many; more
        of them where rare tokens would be missing."""
        excess = self.ratio(heads) / times
        if excess <= 2.0:
            return self
        order = rng.permutation(len(self.tokens))
        while excess > 2.0:
            some = self.take(np.sort(order[: int(np.ceil(len(order) / excess))]))
            if some._represents(self):
                return some
            excess /= 2.0
        return self

    def _represents(self, whole: "Rows") -> bool:
        """Whether every direction of tokens and anchors has at least half its share in here."""
        share = len(self.tokens) / len(whole.tokens)
        for few, all_ in ((self.tokens, whole.tokens), (self.anchors, whole.anchors)):
            try:
                least = eigh(_moment(few), _moment(all_), eigvals_only=True)[0]
            except np.linalg.LinAlgError:
                return False
            if not least >= 0.5 * share:
                return False
        return True

    def with_weights(self, weights: Float[Array, "n a"]) -> "Rows":
        return replace(self, weights=weights)

    def astype(self, dtype: type) -> "Rows":
        return replace(
            self,
            anchors=self.anchors.astype(dtype),
            tokens=self.tokens.astype(dtype),
            padding=None if self.padding is None else self.padding.astype(dtype),
            weights=self.weights.astype(dtype),
            targets=self.targets.astype(dtype),
        )


def _moment(vectors: Float[Array, "n l d"]) -> Float[Array, "d d"]:
    flat = vectors.reshape(-1, vectors.shape[2])
    return np.asarray(flat.T @ flat)


def compute_scores(rows: Rows, theta: Float[Array, "p m d"]) -> Float[Array, "n am L"]:
    """Of every token by every head at every anchor."""
    n, a, p = rows.anchors.shape
    keys = rows.anchors.reshape(n * a, p) @ theta.reshape(p, -1)
    return np.asarray(keys.reshape(n, a * theta.shape[1], -1) @ rows.tokens.transpose(0, 2, 1))


def compute_patterns(rows: Rows, theta: Float[Array, "p m d"]) -> Float[Array, "n am L"]:
    """Softmax weights of every head on every row."""
    scores = compute_scores(rows, theta)
    if rows.padding is not None:
        scores += rows.padding
    return softmax(scores, overwrite=True)


def average_tokens(rows: Rows, pattern: Float[Array, "n am L"]) -> Float[Array, "na md"]:
    """What each head hands to its values, all heads side by side; ignored rows are zero."""
    n, a = rows.weights.shape
    mixed = (pattern @ rows.tokens).reshape(n * a, -1)
    return np.asarray(mixed * rows.weights.reshape(-1, 1))


def push(
    rows: Rows,
    pattern: Float[Array, "n am L"],
    values: Float[Array, "md D"],
    direction: Float[Array, "p m d"],
) -> Float[Array, "na D"]:
    """Derivative of the outputs along a direction of theta, values fixed."""
    change = softmax_jvp(pattern, compute_scores(rows, direction))
    return np.asarray(average_tokens(rows, change) @ values)


def pull(
    rows: Rows,
    pattern: Float[Array, "n am L"],
    values: Float[Array, "md D"],
    residual: Float[Array, "na D"],
) -> Float[Array, "p m d"]:
    """Adjoint of `push`."""
    n, a, p = rows.anchors.shape
    d = rows.width
    m = pattern.shape[1] // a
    back = (residual * rows.weights.reshape(-1, 1)) @ values.T
    change = back.reshape(n, a * m, d) @ rows.tokens.transpose(0, 2, 1)
    change = softmax_jvp(pattern, change)
    mixed = (change @ rows.tokens).reshape(n * a, m * d)
    return np.asarray((rows.anchors.reshape(n * a, p).T @ mixed).reshape(p, m, d))


def compute_responses(
    rows: Rows, pattern: Float[Array, "n am L"], values: Float[Array, "md D"]
) -> Float[Array, "na m d D"]:
    """G = Cov_P(x) W for every row and head: the derivative of the row by theta is anchor x G."""
    n, a = rows.weights.shape
    length, d = rows.tokens.shape[1:]
    per_head = values.reshape(-1, d, values.shape[1])
    weights = pattern.reshape(n, a, len(per_head), length)
    mean = (pattern @ rows.tokens).reshape(n, a, len(per_head), d)
    out = np.empty((n, a, len(per_head), d, values.shape[1]), dtype=values.dtype)
    for i, value in enumerate(per_head):
        outer = rows.tokens[:, :, :, None] * (rows.tokens @ value)[:, :, None, :]
        out[:, :, i] = (weights[:, :, i] @ outer.reshape(n, length, -1)).reshape(n, a, d, -1)
        out[:, :, i] -= mean[:, :, i, :, None] * (mean[:, :, i] @ value)[:, :, None, :]
    out *= rows.weights[:, :, None, None, None]
    return out.reshape(n * a, len(per_head), d, -1)
