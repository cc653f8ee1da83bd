"""One head opened softly by pairs, while all others stay shut: queries of two tokens suffice.

Queries. [x + t; x] with t = a_h + eta. The pivot a_h is long and at right angles to p_h(x), so
head h weighs both tokens, whereas every other head is far to one side: it attends to the first
token or to the anchor alone.

Inversion. t . p_h(x) = logit((f - x . V - t . A_h) / (t . v_h)), A_h the sum of the values of the
heads that attend to the first token.

When it fails. Parallel p_h leave no pivot. At other anchors a_h . p_h is no longer zero: they must
lie closer to the anchor than gates of many tokens require.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import IllConditioned
from keyhole.learners.multi_head.soft_probe import SATURATED, Chamber

KEPT = 0.8  # share of the margins at the anchor that must be left at another
PATTERNS = 256  # patterns of sides tried for an pivot


@dataclass(frozen=True, eq=False)
class PairChamber(Chamber):
    """An anchor with the pivots that open its heads."""

    pivots: Float[Array, "h d"]
    sides: Float[Array, "h h"]  # 1 where head k attends to the pivot of head h, 0 where not
    shut: float  # margin at the anchor

    @property
    def alone(self) -> bool:
        return False

    @property
    def far(self) -> float:
        return float(np.linalg.norm(self.pivots, axis=1).max())

    def spread(self, head: int) -> float:
        return float(np.linalg.norm(self.pivots[head]))

    def margins(self, keys: Float[Array, "h d"]) -> Float[Array, " h"]:
        return np.full(len(keys), min(SATURATED, (1 - KEPT) * self.shut))

    def holds(self, keys: Float[Array, "h d"]) -> bool:
        aside = (2 * self.sides - 1) * (self.pivots @ keys.T)
        np.fill_diagonal(aside, np.inf)
        return bool(aside.min() > KEPT * self.shut)

    def loudness(self, sizes: Float[Array, " h"]) -> float:
        uniform = 0.0 if self.uniform is None else float(np.linalg.norm(self.uniform))
        return (float(np.linalg.norm(self.anchor)) + self.far) * (float(sizes.sum()) + uniform)

    def opened(self, heads: Int[Array, " n"], moves: Float[Array, "n d"]) -> Float[Array, "n d"]:
        return np.asarray(self.pivots[heads] + moves)

    def sequences(
        self, heads: Int[Array, " n"], moves: Float[Array, "n d"]
    ) -> Float[Array, "n length d"]:
        last = np.broadcast_to(self.anchor, (len(moves), 1, len(self.anchor)))
        return np.concatenate([last + self.opened(heads, moves)[:, None], last], axis=1)

    def changes(self, answers: Array, tokens: Array, heads: Array) -> Float[Array, " n"]:
        moved = tokens[:, 0] - self.anchor
        others = np.einsum("nd,nd->n", moved, (self.sides @ self.values)[heads])
        return np.asarray(super().changes(answers, tokens, heads) - others)

    def tilt(
        self, head: int, moves: Array, shares: Array, errors: Float[Array, "h d"]
    ) -> Float[Array, " n"]:
        others = moves @ (self.sides[head] @ errors)
        return np.asarray(super().tilt(head, moves, shares, errors) - others)


def pivot_tokens(
    keys: Float[Array, "h d"], values: Float[Array, "h d"], rng: np.random.Generator
) -> Float[Array, "h d"]:
    """For each head a token at right angles to its key that is at least |p_k| to one side of every
    other: of several patterns of sides the one that is short and that the head's value sees."""
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    if len(unit) == 1:  # nothing to shut
        return np.zeros_like(keys)
    inverse = np.linalg.pinv(unit)
    best = []
    for head, own in enumerate(unit):
        wanted = rng.choice([-1.0, 1.0], (PATTERNS, len(unit)))
        wanted[:, head] = 0.0
        tokens = wanted @ inverse.T
        tokens -= np.outer(tokens @ own, own)
        aside = np.abs(tokens @ np.delete(unit, head, axis=0).T).min(axis=1)
        tokens = tokens / np.maximum(aside, TINY)[:, None]
        sizes = np.linalg.norm(tokens, axis=1)
        seen = np.abs(tokens @ values[head]) / (sizes * np.linalg.norm(values[head]))
        best.append(tokens[int(np.argmin(sizes / np.maximum(seen, TINY)))])
    if not np.isfinite(best).all():
        raise IllConditioned("no pivots separate these heads: two of them attend alike")
    return np.stack(best)
