"""What all learners of one head share: value, key bias and scale first, the hypothesis last."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import NotIdentifiable
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head.key_bias import measure_key_bias
from keyhole.learners.single_head.one_head import floor, shaped_head
from keyhole.learners.single_head.operating_point import (
    MEASURED_BIAS_ERROR,
    Stretched,
    bias_length,
    computed_bias_error,
    evening,
    free_lengths,
    probe_set,
    stretch,
)
from keyhole.linalg.bases import Basis, equal_overlap, random_basis
from keyhole.linalg.low_rank_fit import unknowns as unknowns_of_rank
from keyhole.measurement.linear_response import LinearPart, measure_values
from keyhole.measurement.log_odds import TARGET_SPREAD, LogOdds, ProbeSet
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import ArrayBank

CHEAP_GROUP = 8  # probes read off at once from which a second look at the key bias is cheap
EVENING_ROUNDS = 6  # the length along the key bias settles in two or three
ROOM = 0.41  # of the radius, for anchors and for probes: a probe lifted by √2 still stays inside
VALUE_RANK = 1e-4  # singular values of the value map below this, relative, read no weights off


def learn_score(
    oracle: Oracle,
    rng: np.random.Generator,
    measure: Callable[["Pairs", np.random.Generator], Hypothesis],
    linear: LinearPart | None = None,
) -> Hypothesis:
    """Everything but the score, then `measure` for the score, if there is one to see."""
    linear = measure_values(oracle, rng) if linear is None else linear
    pairs = prepare(oracle, linear, rng)
    if pairs.spread is None:
        return without_score(pairs)
    return measure(pairs, rng)


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
    start: Float[Array, " d"]  # the random unit anchor on which that was seen
    longest: float

    @property
    def scale(self) -> float:
        """The spread, where there is one."""
        return 1.0 if self.spread is None else self.spread

    def values_of(self, anchors: Basis) -> Float[Array, "d D"]:
        """Values of all members of a basis, without forming them."""
        value = np.ascontiguousarray(self.linear.value.T)
        return np.ascontiguousarray(anchors.coordinates(value).T)

    @property
    def bias_error(self) -> float:
        """Standard error of direction · key_bias for a direction at the length of the probes."""
        return float(self.probes.across * np.sqrt(np.mean(self.key_bias_error**2)))

    @property
    def meter(self) -> LogOdds:
        probes = probe_set(self.probes, self.linear, self.group, self.bias)
        return LogOdds(self.oracle, self.linear, probes, "score")

    def meter_of(self, tokens: Float[Array, "n d"], group: int, purpose: str = "score") -> LogOdds:
        """The same with these tokens as the probes."""
        values, bias = self.linear.at(tokens), tokens @ self.key_bias
        probes = ProbeSet(ArrayBank(tokens), len(tokens), group, values, bias, self.bias_error)
        return LogOdds(self.oracle, self.linear, probes, purpose)


def prepare(oracle: Oracle, linear: LinearPart, rng: np.random.Generator) -> Pairs:
    """Key bias, scale of the score and lengths of the tokens: a handful of queries."""
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
            raise NotIdentifiable("queries of one token say nothing about the score matrix")
        group = min(group, spec.domain.max_length - 1)
    longest = ROOM * spec.domain.radius
    basis = equal_overlap(rng, left[:, :group])
    bias = measure_key_bias(oracle, linear, basis, group, longest)
    linear = replace(linear, noise=bias.noise)
    shape = evening(left[:, :group], singular[:group]) if group > 1 else None
    if shape is not None:
        longest /= max(1.0, float(np.linalg.norm(shape.matrix, 2)))  # evened probes are longer
    start = rng.standard_normal(spec.width)
    plain = Pairs(
        oracle=oracle,
        linear=linear,
        key_bias=bias.vector,
        key_bias_error=bias.error,
        probes=Stretched(basis, 1.0, 1.0, np.zeros(spec.width), shape),
        bias=np.zeros(spec.width),
        group=group,
        spread=None,
        start=start / np.linalg.norm(start),
        longest=longest,
    )
    # what a probe of length one is worth: an error of the answer becomes 1/overlap of a weight
    gains = float(np.mean(1.0 / singular[:group]))
    overlap = float(np.sqrt(group / spec.width) / gains)
    if bias.vector.any():
        return _with_bias(plain, overlap, rng)
    return _without_bias(plain, overlap)


def _without_bias(plain: Pairs, overlap: float) -> Pairs:
    width, longest = plain.probes.width, plain.longest
    # entries of size 1/sqrt(d) are the natural guess: then |probe · score · anchor| is about that
    probe, anchor = free_lengths(TARGET_SPREAD * np.sqrt(width), plain.linear, overlap, longest)
    trial = replace(plain, probes=replace(plain.probes, across=probe, along=probe))
    seen = trial.meter.scale(plain.start, anchor, longest)
    if seen is None:
        return trial
    product = TARGET_SPREAD * probe / seen
    better, _ = free_lengths(product, plain.linear, overlap, longest)
    probes = replace(plain.probes, across=better, along=better)
    return replace(plain, probes=probes, spread=seen * better / probe)


def _with_bias(plain: Pairs, overlap: float, rng: np.random.Generator) -> Pairs:
    width, longest = plain.probes.width, plain.longest
    size = float(np.linalg.norm(plain.key_bias))
    axis = plain.key_bias / size
    along = bias_length(size, width, longest)
    probes = replace(plain.probes, across=along, along=along, axis=axis)
    trial = replace(plain, probes=probes, bias=probes.products(plain.key_bias[None])[:, 0])
    seen = trial.meter.scale(plain.start, TARGET_SPREAD * np.sqrt(width) / along, longest)
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
    zero, rows = ArrayBank(np.zeros((1, pairs.probes.width))), np.zeros_like(groups)
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
        key_bias_error=np.sqrt(pairs.probes.solve_variance(errors[None] ** 2)[0]),
    )


def anchor_basis(pairs: Pairs, rng: np.random.Generator) -> Basis:
    """Random anchors that begin with the one whose scale is known; or, all but the first
    orthogonal to a key bias (the box computes with anchor · key_bias, and rounds)."""
    size = float(np.linalg.norm(pairs.key_bias))
    first = pairs.key_bias / size if size > 0 else pairs.start
    return random_basis(rng, pairs.probes.width, first)


def assemble(
    pairs: Pairs,
    score: Any,
    error: Any,
    *,
    unknowns: int,
    notes: tuple[str, ...] = (),
    details: dict[str, Any] | None = None,
) -> Hypothesis:
    """The hypothesis in the shape of the box's answers; `unknowns` of the score alone."""
    linear = pairs.linear
    model = shaped_head(linear.scalar, score, pairs.key_bias, linear.value, linear.offset)
    return Hypothesis(
        model,
        shaped_head(
            linear.scalar, error, pairs.key_bias_error, linear.value_error, linear.offset_error
        ),
        floor(model, unknowns),
        notes=notes,
        noise=linear.noise,
        details={
            "precision": linear.noise.name,
            "key_bias": bool(pairs.key_bias.any()),
            **(details or {}),
        },
    )


def assemble_low_rank(
    pairs: Pairs,
    score: Any,
    error: Any,
    *,
    rank: int,
    reason: str,
    singular: Float[Array, " r"],
    truncation: float,
    details: dict[str, Any] | None = None,
) -> Hypothesis:
    """The same for a score whose rank was found out. `truncation` is what it leaves out: the root
    mean square of unit direction · score · unit direction."""
    found = {
        "rank": rank,
        "rank_reason": reason,
        "singular_values": singular,
        "truncation": truncation,
    }
    return assemble(
        pairs,
        score,
        error,
        unknowns=unknowns_of_rank(pairs.probes.width, rank),
        notes=(f"Rank {rank}: {reason}.",),
        details={**found, **(details or {})},
    )


def without_score(
    pairs: Pairs, below: float = 0.0, details: dict[str, Any] | None = None
) -> Hypothesis:
    """The hypothesis where no score was seen; its entries are `below` that."""
    width = pairs.probes.width
    zero = (np.zeros((width, 1)), np.zeros((1, width)))
    error = (np.ones((width, 1)), np.full((1, width), below))
    note = "No query showed a score: attention is uniform up to the key bias."
    return assemble(pairs, zero, error, unknowns=0, notes=(note,), details=details)
