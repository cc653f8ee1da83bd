"""The algorithm of Theorem 4.1, as published: for comparison.

Statement.  f(X) = Σ_i softmax_i(x_i · score x_N) x_i · value, answered exactly: d + d² queries
            determine value and score.
Queries.    [e_j] for every j, then [e_i + e_j; e_j] for every i and j (the theorem leaves the
            directions free; unit vectors are this file's choice).
Algebra.    f([e_j]) = v_j. In a pair the score of e_j with itself is in both tokens and cancels:
            y = v_j + σ(score_ij) v_i, so score_ij = logit((y − v_j) / v_i).
            Standard errors carry the rounding of the answers through both divisions; they are ours.
Fails.      Where v_i is zero, row i of the score does not show in these queries; where it is small,
            the division amplifies every rounding. Where |score_ij| is large, the weight is 0 or 1
            to the last digit. `SingleHead()` asks as many queries, and has neither condition: its
            probes overlap equally with the value, and their length keeps the weights in range.
Source.     Theorem 4.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026).
"""

from dataclasses import dataclass

import numpy as np

from keyhole.errors import Counterexample, IllConditioned, WrongFamily
from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.learners.published.theorem_6_1 import estimate_weight_errors
from keyhole.linalg.softmax import logit
from keyhole.measurement.noise import noise_of_type, recognise_format
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import REJECTION
from keyhole.oracles.queries import ArrayBank, ProbeAnchorBank, QueryBatch


@dataclass(frozen=True, eq=False, kw_only=True)
class ExactDiagnostics(Diagnostics):
    """Which algorithm it was, and the value that amplified most."""

    smallest_value: float
    method: str = "theorem-4.1"


def learn_exactly(oracle: Oracle) -> Hypothesis:
    """Runs the algorithm of Theorem 4.1 on a box with scalar answers.

    Args:
        oracle: The box; it must accept tokens of norm two.

    Returns:
        One head without biases.

    Raises:
        IllConditioned: A value of zero, or a weight that rounds to 0 or 1: the entry cannot be
            read from these queries.
        WrongFamily: An answer outside the mean of its tokens' values.
    """
    width, eye = oracle.spec.width, np.eye(oracle.spec.width)
    raw = np.asarray(oracle.ask(QueryBatch.of(eye[:, None, :], "value")))
    value = raw.astype(np.float64)
    i, j = np.divmod(np.arange(width * width), width)
    tokens = ProbeAnchorBank(ArrayBank(eye), ArrayBank(eye), width, width)
    queries = QueryBatch(tokens, np.column_stack([i * width + j, width * width + j]), "score")
    answers = np.asarray(oracle.ask(queries), np.float64)
    noise = recognise_format(
        noise_of_type(oracle.spec.precision, raw), np.concatenate([value, answers])
    )
    zero = np.flatnonzero(value == 0)
    if len(zero):
        raise IllConditioned(
            f"the value has a zero at entry {zero[0]}, behind which the queries of Theorem 4.1 "
            "show nothing of the score: use SingleHead()"
        )
    weight = (answers - value[j]) / value[i]
    value_error = noise.sigma(value)
    weight_error = estimate_weight_errors(
        weight, value[i], value[j], value_error[i], value_error[j], noise
    )
    outside = np.maximum(-weight, weight - 1.0) / weight_error
    worst = int(np.argmax(outside))
    if outside[worst] > REJECTION:
        nearest = value[j[worst]] + np.clip(weight[worst], 0.0, 1.0) * value[i[worst]]
        raise WrongFamily(
            "an answer lies outside the mean of its tokens' values: not one head",
            Counterexample(queries[worst : worst + 1].tokens()[0], answers[worst], nearest, "pair"),
        )
    if ((weight <= 0) | (weight >= 1)).any():
        place = int(np.argmax((weight <= 0) | (weight >= 1)))
        raise IllConditioned(
            f"the weight of entry ({i[place]}, {j[place]}) is 0 or 1 within its rounding: the "
            "queries of Theorem 4.1 do not show the score there: use SingleHead()"
        )
    shape = (width, width)
    spread = (weight_error / (weight * (1.0 - weight))).reshape(shape)
    return Hypothesis(
        Attention([Head(logit(weight).reshape(shape), None, value)]),
        Attention([Head(spread, None, value_error)]),
        floor=float(width * width + width),
        notes=("The algorithm of Theorem 4.1 as published.",),
        noise=noise,
        diagnostics=ExactDiagnostics(smallest_value=float(np.abs(value).min())),
    )
