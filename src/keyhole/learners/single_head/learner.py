"""Single-head softmax attention, exactly, at the floor.

Statement.  f(X) = offset + Σ_i softmax_i(x_i · (score x_N + key_bias)) x_i · value is recovered to
            the box's last digits with d² + d queries (2d + 1 more unknowns: + d + 1 queries,
            asked only if one query shows a key bias; the offset is always asked). A score of rank
            r takes 2rd − r² + d queries and one to three more a column, rank unknown; it is
            returned in factors (in one piece if its rank is full), with its singular values, the
            rank and why that rank.
Queries.    Length one: offset and value (measurement/linear_response). Probes against zero: key
            bias (calibration). Probes against anchors (measurement/log_odds): all of them
            (score_table), or, where the rank is looked for, blocks of columns and rows (cross,
            scalar answers) or all columns, then all rows (range_sketch, vector answers and large
            widths). Tokens in a ball and additive errors: bounded_noise. A finite vocabulary, or a
            domain without room around zero: vocabulary.
Algebra.    With T the probes and Ω the anchors, both orthonormal, the log-odds are T score Ωᵀ.
Fails.      value = 0: nothing of the score can be seen (NotIdentifiable). A box that is not one
            head answers outside the mean of its tokens' values, or fails verification. Singular
            values below the box's precision cannot be seen: the rank found is a numerical rank.
            What lies outside it is measured and added to the standard errors.
Source.     Theorem 4.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026); equal-overlap probes, operating point and calibration are ours.
            As published it is `SingleHead(method="theorem-4.1")`; that, their Theorems 5.1
            (`LowRank(method="convex")`) and 6.1 (`SingleHead(method="paper")`) are in
            learners/published.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from keyhole.arrays import Array, real_number, whole_number
from keyhole.errors import DomainError, InvalidArgument
from keyhole.learners.base import Hypothesis, at_most_the_width
from keyhole.learners.published import theorem_4_1, theorem_5_1, theorem_6_1
from keyhole.learners.single_head.bounded_noise import RankWanted, learn_bounded_noise
from keyhole.learners.single_head.calibration import (
    Calibration,
    calibrate,
    draw_probes,
    measure_key_bias,
)
from keyhole.learners.single_head.cross import RankSearch, measure_cross
from keyhole.learners.single_head.hypothesis import Parameters, Score, assemble
from keyhole.learners.single_head.range_sketch import sketch_range
from keyhole.learners.single_head.score_table import measure_table, solve_table
from keyhole.learners.single_head.vocabulary import learn_from_vocabulary, sample_vocabulary
from keyhole.linalg.bases import DENSE_LIMIT
from keyhole.measurement.linear_response import measure_values
from keyhole.measurement.noise import estimate_noise
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

Looked = tuple[NoiseModel, QueryBatch, Array]
"""The noise of a box, and the first queries and answers, where these are known."""


# Relative error of the answers up to which a search that nobody asked for finds the rank.
RANK_SHOWN = 2.0**-20


@dataclass(frozen=True)
class SingleHead:
    """Learner for one softmax attention head.

    Args:
        rank: None assumes nothing: of any rank. A number, or "unknown" to have it found, asks the
            queries of `LowRank`: 2rd − r² + d of them, and d² + 3d where the rank turns out full.
        accuracy: A box with additive errors and bounded tokens is asked again and again until the
            relative standard error of the score reaches this; None until the budget is spent.
        method: "theorem-4.1" and "paper" (Theorem 6.1) are the published algorithms, to compare
            with.
        score_bound: Bound on the score's norm, which the published algorithm needs.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> from keyhole.oracles.open import open_oracle
        >>> box = open_oracle(attention(np.random.default_rng(0), 4))
        >>> SingleHead().learn(box, np.random.default_rng(1)).model
        Attention(width=4, heads=1, outputs=scalar)
    """

    rank: int | Literal["unknown"] | None = None
    accuracy: float | None = None
    method: Literal["keyhole", "paper", "theorem-4.1"] = "keyhole"
    score_bound: float = 1.0

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank != "unknown":
            whole_number("rank, where it is known,", self.rank, 1)
        if self.method not in ("keyhole", "paper", "theorem-4.1"):
            raise InvalidArgument(
                f"method must be 'keyhole', 'paper' or 'theorem-4.1', got {self.method!r}"
            )
        real_number("score_bound", self.score_bound, 0.0)
        if self.accuracy is not None:
            real_number("accuracy", self.accuracy, 0.0, 1.0)

    def expected_queries(self, spec: Spec) -> int | None:
        numbers = spec.outputs or 1
        return -(-(spec.width**2) // min(numbers, spec.width)) + spec.width + 4

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        unbounded = oracle.spec.domain.vocabulary is None and oracle.spec.domain.radius > 0
        if self.method == "paper" and unbounded:
            return theorem_6_1.learn_as_published(oracle, self.score_bound)
        if self.method == "theorem-4.1":
            if oracle.spec.domain.vocabulary is not None or oracle.spec.domain.radius < 2.0:
                raise DomainError("Theorem 4.1 asks tokens e_i + e_j, which this box does not take")
            return theorem_4_1.learn_exactly(oracle)
        if self.rank is None:
            return learn_head(oracle, rng, None, self.accuracy)
        search = RankSearch(None if self.rank == "unknown" else self.rank)
        return learn_head(oracle, rng, search, self.accuracy)


@dataclass(frozen=True)
class LowRank:
    """Learner for one head of low rank.

    Args:
        method: "adaptive" asks next to nothing beyond the floor. "convex" asks a set of queries
            that is fixed in advance, which is the choice where queries cannot depend on answers.
        rank: Rank of the score; None finds it.
        tolerance: Fraction of the score below which what is left of it ends the search; 0 for what
            the box's precision can show.
        measurements: Size of the set of "convex"; None for 6 · rank · width, and enough for rank
            width/8 where no rank is given.

    Example:
        >>> import numpy as np, keyhole
        >>> from keyhole.models.random import attention
        >>> found = keyhole.recover(attention(np.random.default_rng(0), 12, rank=2), LowRank())
        >>> found.details["rank"]
        2
    """

    method: Literal["adaptive", "convex"] = "adaptive"
    rank: int | None = None
    tolerance: float = 0.0
    measurements: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ("adaptive", "convex"):
            raise InvalidArgument(f"method must be 'adaptive' or 'convex', got {self.method!r}")
        for name in ("rank", "measurements"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        real_number("tolerance", self.tolerance, 0.0, 1.0, with_low=True)
        if self.measurements is not None and self.method != "convex":
            raise InvalidArgument("measurements= belongs to method='convex'")

    def expected_queries(self, spec: Spec) -> int | None:
        at_most_the_width(self.rank, spec.width)
        if self.method == "convex":
            count = theorem_5_1.plan_measurements(spec.width, self.rank, self.measurements)
            return -(-count // min(spec.outputs or 1, spec.width)) + spec.width + 4
        if self.rank is None:
            return None
        r, d = self.rank, spec.width
        return -(-(2 * r * d - r * r) // (spec.outputs or 1)) + d + 2 * r + 4

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        search = RankSearch(self.rank, self.tolerance)
        if self.method == "adaptive":
            return learn_head(oracle, rng, search)
        count = theorem_5_1.plan_measurements(oracle.spec.width, self.rank, self.measurements)
        return learn_head(oracle, rng, search, fixed_set=count)


def learn_head(
    oracle: Oracle,
    rng: np.random.Generator,
    search: RankSearch | None,
    accuracy: float | None = None,
    looked: Looked | None = None,
    fixed_set: int | None = None,
) -> Hypothesis:
    """The whole procedure. `search=None`: every entry of the score is measured. `looked`: the
    noise of the box and its first answers, where they are known already. `fixed_set`: so many
    measurements that do not depend on the answers."""
    width, domain = oracle.spec.width, oracle.spec.domain
    at_most_the_width(None if search is None else search.rank, width)
    if search is not None and fixed_set is not None:
        theorem_5_1.refuse_impossible(width, search.rank, fixed_set)
    if domain.vocabulary is not None or domain.radius <= 0:
        return learn_among_given(oracle, rng)
    rank: RankWanted = "full" if search is None else search.rank or "unknown"
    noisy = None if fixed_set else learn_bounded_noise(oracle, rng, accuracy, rank)
    if noisy is not None:
        return noisy

    looked = estimate_noise(oracle, rng) if looked is None else looked
    if search is None:  # value, score and three queries: the rest is said when more is known
        outputs = looked[2][0].size
        oracle.expect(-(-(width**2) // min(outputs, width)) + width + 3)
    linear = measure_values(oracle, rng, looked)
    overlap = draw_probes(oracle.spec, linear, rng)
    bias = measure_key_bias(oracle, linear, overlap)
    calibration = calibrate(oracle, linear, overlap, bias, rng)
    if calibration.spread is None:
        score = Score.zero(width)
    elif search is not None and fixed_set is not None:
        score = theorem_5_1.measure_fixed_set(calibration, rng, search, fixed_set)
    else:
        score = measure_score(oracle, calibration, rng, search)
    return assemble_head(calibration, score)


def learn_among_given(oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
    """From the words of the vocabulary; where there is none, and no room around zero, random tokens
    inside the domain serve as one."""
    domain = oracle.spec.domain
    if domain.vocabulary is not None:
        return learn_from_vocabulary(oracle, rng)
    tokens = sample_vocabulary(domain, oracle.spec.width, rng, count=1000)
    return learn_from_vocabulary(oracle, rng, tokens)


def measure_score(
    oracle: Oracle, calibration: Calibration, rng: np.random.Generator, search: RankSearch | None
) -> Score:
    """Every entry of the score, or where a search is given those that its rank needs."""
    anchors, group, width = calibration.draw_anchors(rng), calibration.group, oracle.spec.width
    column = -(-width // group)  # queries of one column
    if search is None or not (search.patient or shows_rank(calibration, column)):
        oracle.expect(column * width)
        table = measure_table(
            calibration.meter(),
            anchors,
            calibration.values_of(anchors),
            calibration.scale,
            calibration.longest,
            anchor_bias=anchors.coordinates(calibration.key_bias[None])[0],
        )
        return solve_table(calibration, anchors, table)
    most = int(1.1 * column * width) + 2 * width  # pilots and tests of the rank included
    oracle.expect(None if search.rank is None else search.count(width, group), most)
    if group == 1 and width <= DENSE_LIMIT:
        return measure_cross(calibration, anchors, rng, search)
    # Where a column costs fewer than twenty queries, looking for the rank is dear beside it.
    hasty = not search.patient and group > 1 and column < 20
    return sketch_range(calibration, anchors, rng, search, width // 4 if hasty else width)


def shows_rank(calibration: Calibration, column: int) -> bool:
    """Whether looking for the rank may save queries: not where one query shows a whole column, and
    few digits do not show a rank."""
    noise = calibration.linear.noise
    return bool(column > 1 and noise.relative <= RANK_SHOWN and not noise.error_floor)


def assemble_head(calibration: Calibration, score: Score) -> Hypothesis:
    """The hypothesis from everything but the score, and the score."""
    linear = calibration.linear
    return assemble(
        linear.scalar,
        Parameters(score.matrix, calibration.key_bias, linear.value, linear.offset),
        Parameters(
            score.error, calibration.key_bias_error, linear.value_error, linear.offset_error
        ),
        unknowns=score.unknowns,
        noise=linear.noise,
        notes=score.notes,
        diagnostics=replace(
            score.diagnostics,
            precision=linear.noise.name,
            key_bias=bool(calibration.key_bias.any()),
        ),
    )
