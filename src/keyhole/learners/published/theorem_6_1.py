"""The algorithm of Theorem 6.1, as published: for comparison.

Statement.  Answers within ±τ of f, ‖score‖ ≤ B known, every |v_j| ≥ μ: the score is found to an
            error proportional to τ/μ.
Queries.  [e_j], then [b e_i + a e_j; a e_j] with a = 1/2, b = 1/B, all scaled into the domain.
Algebra.    α = (y − a v_j)/(b v_i), clipped to [σ(−½), σ(½)], score_ij = logit(α)/(a b).
            Standard errors carry the rounding of the answers, or τ, through both divisions.
Fails.      Where some v_i is small: the division amplifies every error. `SingleHead()` has no such
            condition. Where ‖score‖ > B: some α lies outside of its interval, which is refused.
Source.     Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with Queries" (2026).
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array
from keyhole.errors import Counterexample, WrongFamily
from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.linalg.softmax import expit, logit
from keyhole.measurement.noise import noise_of_type, recognise_format
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import REJECTION, NoiseModel
from keyhole.oracles.queries import ArrayBank, ProbeAnchorBank, QueryBatch


@dataclass(frozen=True, eq=False, kw_only=True)
class PublishedDiagnostics(Diagnostics):
    """The bound on ‖score‖ that the algorithm was given."""

    score_bound: float
    method: str = "paper"


def learn_as_published(oracle: Oracle, score_bound: float) -> Hypothesis:
    """Asks d + d² queries, whatever the precision of the box.

    Raises:
        WrongFamily: if an answer shows a score larger than `score_bound`.
    """
    width = oracle.spec.width
    probe, anchor = 1.0 / score_bound, 0.5
    scale = min(1.0, oracle.spec.domain.radius / (probe + anchor))
    probe, anchor = scale * probe, scale * anchor
    unit = min(1.0, oracle.spec.domain.radius)
    eye = np.eye(width)
    raw = np.asarray(oracle.ask(QueryBatch.of(unit * eye[:, None, :], "value")))
    value = raw.astype(np.float64) / unit
    tokens = ProbeAnchorBank(ArrayBank(probe * eye), ArrayBank(anchor * eye), width, width)
    i, j = np.divmod(np.arange(width * width), width)
    index = np.column_stack([i * width + j, width * width + j])
    queries = QueryBatch(tokens, index, "score")
    answers = np.asarray(oracle.ask(queries), np.float64)
    numbers = np.concatenate([raw.astype(np.float64), answers])
    noise = recognise_format(noise_of_type(oracle.spec.precision, raw), numbers)
    with np.errstate(divide="ignore", invalid="ignore"):
        seen = (answers - anchor * value[j]) / (probe * value[i])
    seen = np.where(np.isfinite(seen), seen, 0.5)  # a value of zero shows no weight
    low, high = expit([-0.5, 0.5])  # |score · a · b| ≤ ½ under the theorem's condition
    weight = np.clip(seen, low, high)
    value_error = noise.sigma(unit * value) / unit
    weight_error = estimate_weight_errors(
        weight, probe * value[i], anchor * value[j],
        probe * value_error[i], anchor * value_error[j], noise,
    )  # fmt: skip
    beyond = np.abs(seen - weight) / weight_error
    worst = int(np.argmax(beyond))
    if beyond[worst] > REJECTION:
        nearest = anchor * value[j[worst]] + weight[worst] * probe * value[i[worst]]
        raise WrongFamily(
            f"an answer shows a score larger than score_bound={score_bound:g}, which the algorithm "
            "of Theorem 6.1 must be given: pass a larger one, or use SingleHead(), which has none",
            Counterexample(
                queries[worst : worst + 1].tokens()[0], answers[worst], nearest, "score_bound"
            ),
        )
    score = (logit(weight) / (probe * anchor)).reshape(width, width)
    # what the clipping leaves possible is all that is known of an entry behind a tiny value
    spread = np.minimum(weight_error / (weight * (1.0 - weight)), 0.5) / (probe * anchor)
    return Hypothesis(
        Attention([Head(score, None, value)]),
        Attention([Head(spread.reshape(width, width), None, value_error)]),
        floor=float(width * width + width),
        notes=("The algorithm of Theorem 6.1 as published.",),
        noise=noise,
        diagnostics=PublishedDiagnostics(score_bound=score_bound),
    )


def estimate_weight_errors(
    weight: Array, probe: Array, anchor: Array, probe_error: Array, anchor_error: Array,
    noise: NoiseModel,
) -> Array:  # fmt: skip
    """Standard errors of α = (y − anchor) / probe: those of an answer whose terms are rounded at
    their own sizes, and of the two values in it."""
    answer = noise.sigma(np.abs(weight * probe) + np.abs(anchor))
    total = np.sqrt(answer**2 + anchor_error**2 + (weight * probe_error) ** 2)
    return np.where(probe == 0, np.inf, total / np.maximum(np.abs(probe), TINY))
