"""Single-head softmax attention, exactly, at the floor.

Statement.  f(X) = offset + Σ_i softmax_i(x_i · (score x_N + key_bias)) x_i · value is recovered to
            the box's last digits with d² + d queries (2d + 1 more unknowns: + d + 1 queries,
            asked only if one query shows a key bias; the offset is always asked).
Queries.  Length one: offset and value (measurement/linear_response). Probes against zero: key bias
            (learners/single_head/key_bias). Probes against anchors: score (measurement/log_odds).
Algebra.    With T the probes and Ω the anchors, both orthonormal, the log-odds are T score Ωᵀ.
Fails.      value = 0: nothing of the score can be seen (NotIdentifiable). A box that is not one
            head answers outside the mean of its tokens' values, or fails verification.
Source.     Theorem 4.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Anchors" (2026); equal-overlap probes, operating point and calibration are ours.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from keyhole.arrays import Array, Float, real_number, whole_number
from keyhole.errors import InvalidArgument
from keyhole.learners.base import Hypothesis
from keyhole.learners.published.theorem_6_1 import published
from keyhole.learners.single_head.low_rank import LowRank
from keyhole.learners.single_head.noise import noisy_in_ball
from keyhole.learners.single_head.pairs import Pairs, anchor_basis, assemble, learn_score
from keyhole.learners.single_head.score_table import measured_table
from keyhole.learners.single_head.token_sets import sampled_vocabulary
from keyhole.learners.single_head.vocabulary import learn_from_vocabulary
from keyhole.linalg.bases import Basis
from keyhole.oracles.base import Oracle, Spec

SAMPLED_TOKENS = 1000  # of a domain without room around zero: as many as a design considers


@dataclass(frozen=True)
class SingleHead:
    """Learner for one softmax attention head.

    `rank=None`: of any rank, nothing is assumed. A number, or "unknown" to have it found: the
    queries of `LowRank`, 2rd − r² + d of them, and d² + d + 2d where the rank turns out full.

    A box with additive errors and bounded tokens is asked again and again: until the budget is
    spent, or until the relative standard error of the score reaches `accuracy`.

    `method="paper"` is the published algorithm of Theorem 6.1, which needs a bound on the score's
    norm; it is there to compare with.

    >>> import numpy as np
    >>> from keyhole.models.random import attention
    >>> from keyhole.oracles.open import open_oracle
    >>> box = open_oracle(attention(np.random.default_rng(0), 4))
    >>> SingleHead().learn(box, np.random.default_rng(1)).model
    Attention(width=4, heads=1, outputs=scalar)
    """

    rank: int | Literal["unknown"] | None = None
    accuracy: float | None = None
    method: Literal["keyhole", "paper"] = "keyhole"
    score_bound: float = 1.0

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank != "unknown":
            whole_number("rank, where it is known,", self.rank, 1)
        if self.method not in ("keyhole", "paper"):
            raise InvalidArgument(f"method must be 'keyhole' or 'paper', got {self.method!r}")
        real_number("score_bound", self.score_bound, 0.0)
        if self.accuracy is not None:
            real_number("accuracy", self.accuracy, 0.0, 1.0)

    def expected_queries(self, spec: Spec) -> int | None:
        numbers = spec.outputs or 1
        return -(-(spec.width**2) // min(numbers, spec.width)) + spec.width + 4

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        domain = oracle.spec.domain
        if domain.vocabulary is not None:
            return learn_from_vocabulary(oracle, rng)
        if domain.radius <= 0:  # no room around zero: random tokens inside serve as a vocabulary
            tokens = sampled_vocabulary(domain, oracle.spec.width, rng, SAMPLED_TOKENS)
            return learn_from_vocabulary(oracle, rng, tokens)
        if self.method == "paper":
            return published(oracle, self.score_bound)
        if self.rank is None:
            found = noisy_in_ball(oracle, rng, self.accuracy)
            return learn_score(oracle, rng, full_rank) if found is None else found
        rank = None if self.rank == "unknown" else self.rank
        return learn_score(oracle, rng, LowRank(rank=rank).measure)


def full_rank(pairs: Pairs, rng: np.random.Generator) -> Hypothesis:
    """Every probe against every anchor."""
    score, error = full_score(pairs, anchor_basis(pairs, rng))
    return assemble(pairs, score, error, unknowns=score.size)


def full_score(pairs: Pairs, anchors: Basis) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
    """The score matrix and its standard errors."""
    bias = anchors.coordinates(pairs.key_bias[None])[0]
    values = pairs.values_of(anchors)
    table = measured_table(
        pairs.meter, anchors, values, pairs.scale, pairs.longest, anchor_bias=bias
    )
    score = anchors.combine(pairs.probes.solve(table.product.T).T)
    variance = anchors.combine_squared(pairs.probes.solve_variance(table.error.T**2).T)
    # an error of the key bias is in all answers alike, divided by the length of the anchor
    common = anchors.combine(table.inverse_length[None])[0]
    variance += np.outer(pairs.key_bias_error**2, common**2)
    return score, np.sqrt(variance, out=variance)
