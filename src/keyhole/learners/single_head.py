"""Single-head softmax attention, exactly, at the floor.

Statement.  f(X) = offset + Σ_i softmax_i(x_i · (score x_N + key_bias)) x_i · value is recovered to
            the box's last digits with d² + d questions (2d + 1 more unknowns: + d + 1 questions,
            asked only if one question shows a key bias; the offset is always asked).
Questions.  Length one: offset and value (probes/values). Probes against zero: key bias
            (probes/key_bias). Probes against anchors: score (probes/log_odds).
Algebra.    With T the probes and Ω the anchors, both orthonormal, the log-odds are T score Ωᵀ.
Fails.      value = 0: nothing of the score can be seen (NotIdentifiable). A box that is not one
            head answers outside the mean of its tokens' values, or fails verification.
Source.     Theorem 4.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026); equal-overlap probes, operating point and calibration are ours.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from keyhole.algebra.bases import Basis, equal_overlap, random_basis
from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned, InvalidArgument, NotIdentifiable
from keyhole.learners.base import Learned
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.questions import Listed
from keyhole.probes.key_bias import measure_key_bias
from keyhole.probes.log_odds import TARGET_SPREAD, LogOdds, Table
from keyhole.probes.operating_point import (
    MEASURED_BIAS_ERROR,
    Stretched,
    bias_length,
    computed_bias_error,
    evening,
    free_lengths,
    probe_set,
    stretch,
)
from keyhole.probes.values import LinearPart, measure_values, refuse_nonlinear

CHEAP_GROUP = 8  # probes read off at once from which a second look at the key bias is cheap
EVENING_ROUNDS = 6  # the length along the key bias settles in two or three
VALUE_RANK = 1e-4  # singular values of the value map below this, relative, read no weights off


@dataclass(frozen=True)
class SingleHead:
    """Learner for one softmax attention head of any rank.

    >>> import numpy as np
    >>> from keyhole.models.draw import attention
    >>> from keyhole.oracles.open import open_oracle
    >>> box = open_oracle(attention(np.random.default_rng(0), 4))
    >>> SingleHead().learn(box, np.random.default_rng(1)).model
    Attention(width=4, heads=1, outputs=scalar)
    """

    rank: int | Literal["unknown"] | None = None

    def __post_init__(self) -> None:
        if self.rank is not None and self.rank != "unknown" and self.rank < 1:
            raise InvalidArgument(f"rank must be a positive number or 'unknown', got {self.rank}")

    def expected_questions(self, spec: Spec) -> int | None:
        numbers = spec.outputs or 1
        return -(-(spec.width**2) // min(numbers, spec.width)) + spec.width + 4

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Learned:
        linear = measure_values(oracle)
        try:
            pairs = prepare(oracle, linear, rng)
            if pairs.spread is None:
                nothing = np.zeros((oracle.spec.width, oracle.spec.width))
                note = "No question showed a score: attention is uniform up to the key bias."
                return assemble(pairs, nothing, nothing, (note,))
            return assemble(pairs, *full_score(pairs, anchor_basis(pairs, rng)))
        except IllConditioned:
            refuse_nonlinear(oracle, linear, rng)  # a plainer reason, if there is one
            raise


@dataclass(frozen=True, eq=False)
class Pairs:
    """Everything known before the score is measured: linear part, key bias, probes, scale."""

    oracle: Oracle
    linear: LinearPart
    key_bias: Float[Array, " d"]
    key_bias_error: Float[Array, " d"]
    probes: Stretched
    bias: Float[Array, " d"]  # probe · key_bias
    group: int  # probes read off at once
    spread: float | None  # root mean square of probe · score · unit anchor; None: no score seen
    longest: float

    @property
    def meter(self) -> LogOdds:
        probes = probe_set(self.probes, self.linear, self.group, self.bias)
        return LogOdds(self.oracle, self.linear, probes, "score")


def prepare(oracle: Oracle, linear: LinearPart, rng: np.random.Generator) -> Pairs:
    """Key bias, scale of the score and lengths of the tokens: a handful of questions."""
    spec = oracle.spec
    left, singular, _ = np.linalg.svd(linear.value, full_matrices=False)
    if singular[0] == 0.0:
        raise NotIdentifiable(
            "the value map is zero: the box answers the same to every sequence, so nothing of "
            "its score matrix can be seen"
        )
    group = int(np.sum(singular > VALUE_RANK * singular[0]))
    if spec.domain.max_length is not None:
        if spec.domain.max_length < 2:
            raise NotIdentifiable("questions of one token say nothing about the score matrix")
        group = min(group, spec.domain.max_length - 1)
    longest = spec.domain.max_norm or np.inf
    basis = equal_overlap(rng, left[:, :group])
    bias = measure_key_bias(oracle, linear, basis, group, longest)
    linear = replace(linear, roundoff=bias.roundoff)
    shape = evening(left[:, :group], singular[:group]) if group > 1 else None
    plain = Pairs(
        oracle=oracle,
        linear=linear,
        key_bias=bias.vector,
        key_bias_error=bias.error,
        probes=Stretched(basis, 1.0, 1.0, np.zeros(spec.width), shape),
        bias=np.zeros(spec.width),
        group=group,
        spread=None,
        longest=longest,
    )
    # what a probe of length one is worth: an error of the answer becomes 1/overlap of a weight
    gains = float(np.mean(1.0 / singular[:group]))
    overlap = float(np.sqrt(group / spec.width) / gains)
    start = random_basis(rng, spec.width).rows(np.zeros(1, dtype=np.int64))[0]
    if bias.vector.any():
        return _with_bias(plain, overlap, start, rng)
    return _without_bias(plain, overlap, start)


def _without_bias(plain: Pairs, overlap: float, start: Array) -> Pairs:
    width, longest = plain.probes.width, plain.longest
    # entries of size 1/sqrt(d) are the natural guess: then |probe · score · anchor| is about that
    probe, anchor = free_lengths(TARGET_SPREAD * np.sqrt(width), plain.linear, overlap, longest)
    trial = replace(plain, probes=replace(plain.probes, across=probe, along=probe))
    seen = trial.meter.scale(start, anchor, longest)
    if seen is None:
        return trial
    product = TARGET_SPREAD * probe / seen
    better, _ = free_lengths(product, plain.linear, overlap, longest)
    probes = replace(plain.probes, across=better, along=better)
    return replace(plain, probes=probes, spread=seen * better / probe)


def _with_bias(plain: Pairs, overlap: float, start: Array, rng: np.random.Generator) -> Pairs:
    width, longest = plain.probes.width, plain.longest
    size = float(np.linalg.norm(plain.key_bias))
    axis = plain.key_bias / size
    along = bias_length(size, width, longest)
    probes = replace(plain.probes, across=along, along=along, axis=axis)
    trial = replace(plain, probes=probes, bias=probes.products(plain.key_bias[None])[:, 0])
    seen = trial.meter.scale(start, TARGET_SPREAD * np.sqrt(width) / along, longest)
    if seen is None:
        return trial
    measure_again = plain.group >= CHEAP_GROUP
    error = (
        MEASURED_BIAS_ERROR if measure_again else computed_bias_error(plain.linear, along, overlap)
    )
    across = stretch(along, TARGET_SPREAD / seen, plain.linear, overlap, error, longest)
    probes = _levelled(plain, replace(probes, across=across), rng)
    pairs = replace(
        plain,
        probes=probes,
        bias=probes.products(plain.key_bias[None])[:, 0],
        spread=seen * across / along,  # roughly: it is refined from the first answers
    )
    return _bias_measured_again(pairs) if measure_again else pairs


def _levelled(plain: Pairs, probes: Stretched, rng: np.random.Generator) -> Stretched:
    """Overlap and shape for what the stretched probes see of the value map. Evening a weak
    direction out may lengthen the probes along the key bias again: then start with less."""
    value, axis = plain.linear.value, probes.axis
    for _ in range(EVENING_ROUNDS):
        seen = probes.across * value
        seen += np.outer((probes.along - probes.across) * axis, axis @ value)
        left, singular, _ = np.linalg.svd(seen, full_matrices=False)
        left, singular = left[:, : plain.group], singular[: plain.group]
        shape = evening(left, singular) if plain.group > 1 else None
        probes = replace(probes, basis=equal_overlap(rng, left), shape=shape)
        size = float(np.sqrt(np.mean(probes.products(plain.key_bias[None]) ** 2)))
        if size < 2.0 * TARGET_SPREAD or plain.group == 1:
            break
        probes = replace(probes, along=probes.along * (TARGET_SPREAD / size) ** 2)
    return probes


def _bias_measured_again(pairs: Pairs) -> Pairs:
    """Probe · key_bias with the probes that will measure the score: no error to multiply."""
    meter, groups = pairs.meter, np.arange(pairs.meter.probes.groups)
    zero, rows = Listed(np.zeros((1, pairs.probes.width))), np.zeros_like(groups)
    meter.purpose = "key bias"
    found = meter.ask(zero, 1, rows, groups, np.zeros((len(groups), pairs.linear.offset.size)))
    if found.saturated.any():
        return pairs
    bias = found.scores.ravel()[: pairs.probes.width]
    errors = found.errors.ravel()[: pairs.probes.width]
    return replace(
        pairs,
        bias=bias,
        key_bias=pairs.probes.solve(bias[None])[0],
        key_bias_error=pairs.probes.solve_errors(errors[None])[0],
    )


def full_score(pairs: Pairs, anchors: Basis) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
    """The score matrix and its standard errors, from every probe against every anchor."""
    values = pairs.linear.at(anchors.rows(np.arange(pairs.probes.width)))
    table = measured(pairs, anchors, values)
    columns = pairs.probes.solve(np.ascontiguousarray(table.product.T))
    error = pairs.probes.solve_errors(np.ascontiguousarray(table.error.T))
    score = anchors.combine(np.ascontiguousarray(columns.T))
    return score, np.sqrt(anchors.combine_squared(np.ascontiguousarray(error.T) ** 2))


def anchor_basis(pairs: Pairs, rng: np.random.Generator) -> Basis:
    """Random anchors; all but one orthogonal to a key bias, which they would bring up against
    themselves (the box computes with anchor · key_bias, and rounds)."""
    size = float(np.linalg.norm(pairs.key_bias))
    first = pairs.key_bias / size if size > 0 else None
    return random_basis(rng, pairs.probes.width, first)


def measured(pairs: Pairs, anchors: Basis, values: Array) -> Table:
    """Every probe against the given unit anchors."""
    if pairs.spread is None:
        raise InvalidArgument("there is no score to measure")
    return pairs.meter.table(anchors, values, pairs.spread, pairs.longest)


def assemble(pairs: Pairs, score: Array, error: Array, notes: tuple[str, ...] = ()) -> Learned:
    """The hypothesis in the shape of the box's answers."""
    linear, width = pairs.linear, pairs.probes.width

    def shaped(value: Array) -> Array:
        return value[:, 0] if linear.scalar else value

    def number(offset: Array) -> Array:
        return offset.reshape(()) if linear.scalar else offset

    model = Attention([Head(score, pairs.key_bias, shaped(linear.value))], number(linear.offset))
    errors = Attention(
        [Head(error, pairs.key_bias_error, shaped(linear.value_error))],
        number(linear.offset_error),
    )
    biased = bool(pairs.key_bias.any())
    unknowns = width * width + (width if biased else 0) + linear.value.size
    if linear.offset.any():
        unknowns += linear.offset.size
    return Learned(
        model,
        errors,
        floor=unknowns / linear.offset.size,
        notes=notes,
        details={"precision": linear.roundoff.name, "key_bias": biased},
    )
