"""The algorithm of Theorem 6.1, as published: for comparison.

Statement.  Answers within ±τ of f, ‖score‖ ≤ B known, every |v_j| ≥ μ: the score is found to an
            error proportional to τ/μ.
Queries.  [e_j], then [b e_i + a e_j; a e_j] with a = 1/2, b = 1/B, all scaled into the domain.
Algebra.    α = (y − a v_j)/(b v_i), clipped to [σ(−½), σ(½)], score_ij = logit(α)/(a b).
Fails.      Where some v_i is small: the division amplifies every error. `SingleHead()` has no such
            condition.
Source.     Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with Queries" (2026).
"""

from dataclasses import dataclass

import numpy as np

from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.linalg.softmax import expit, logit
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import ArrayBank, ProbeAnchorBank, QueryBatch


@dataclass(frozen=True, eq=False, kw_only=True)
class PublishedDiagnostics(Diagnostics):
    """The bound on ‖score‖ that the algorithm was given."""

    score_bound: float
    method: str = "paper"


def learn_as_published(oracle: Oracle, score_bound: float) -> Hypothesis:
    """Asks d + d² queries, whatever the precision of the box."""
    width = oracle.spec.width
    probe, anchor = 1.0 / score_bound, 0.5
    scale = min(1.0, oracle.spec.domain.radius / (probe + anchor))
    probe, anchor = scale * probe, scale * anchor
    unit = min(1.0, oracle.spec.domain.radius)
    eye = np.eye(width)
    value = (
        np.asarray(oracle.ask(QueryBatch.of(unit * eye[:, None, :], "value")), np.float64) / unit
    )
    tokens = ProbeAnchorBank(ArrayBank(probe * eye), ArrayBank(anchor * eye), width, width)
    i, j = np.divmod(np.arange(width * width), width)
    index = np.column_stack([i * width + j, width * width + j])
    answers = np.asarray(oracle.ask(QueryBatch(tokens, index, "score")), np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = (answers - anchor * value[j]) / (probe * value[i])
    low, high = expit([-0.5, 0.5])  # |score · a · b| ≤ ½ under the theorem's condition
    weight = np.clip(np.nan_to_num(weight, nan=0.5), low, high)
    score = (logit(weight) / (probe * anchor)).reshape(width, width)
    return Hypothesis(
        Attention([Head(score, None, value)]),
        None,
        floor=float(width * width + width),
        notes=("The algorithm of Theorem 6.1 as published: no error bars.",),
        diagnostics=PublishedDiagnostics(score_bound=score_bound),
    )
