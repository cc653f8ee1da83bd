"""A single head from labels alone: score and the direction of the value, one bit per query.

Statement.  The box answers with the sign of f(X) = Σ_i softmax_i(x_i · score x_N) x_i · value only.
            The score and the direction of the value are recovered to about `bits` bits relative to
            the largest entry of the score, with about bits · (d² + d − 1) queries.
Queries.    One token: coding of the labels, direction of the value (value_direction). Pairs:
            "is probe · score · anchor above t?" for any t (score_thresholds), all entries bisected
            side by side from a prediction of their scale (learners/label_only/bisection).
Algebra.    With T the probes and Ω the anchors, both orthonormal and of equal overlap with the
            value, the entries are T score Ωᵀ. A number is uniform in its last bracket.
Fails.      value = 0 or one label only (NotIdentifiable). An offset, a key bias, a second head or
            anything else shows as a wrong label close to the border where labels change
            (WrongFamily). No room around zero, or a vocabulary: DomainError before any query.
Source.     Appendix B of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026); the free threshold, scales and predictions are ours.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float, whole_number
from keyhole.errors import IllConditioned, InvalidArgument, NotIdentifiable
from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.learners.label_only.bisection import Brackets, bisect, find_magnitude
from keyhole.learners.label_only.boundary_checks import refuse_other_pairs, refuse_other_sequences
from keyhole.learners.label_only.score_thresholds import Thresholds
from keyhole.learners.label_only.value_direction import (
    ValueDirection,
    find_roundoff,
    measure_direction,
    open_reader,
)
from keyhole.linalg.bases import Basis, equal_overlap
from keyhole.models.attention import Attention, Head
from keyhole.models.sign_attention import NO_ERROR, LabelledAttention
from keyhole.oracles.base import Oracle, Spec


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelDiagnostics(Diagnostics):
    """What was found out beside the head."""

    bits: int  # asked for
    resolution: float  # rounding of a token's value relative to it, at which labels are exact


@dataclass(frozen=True)
class LabelOnly:
    """Learner for one softmax attention head of whose answer only the sign is given.

    Args:
        bits: Binary digits of each entry that are found, at about one query each.

    Example:
        >>> from keyhole.models.random import attention
        >>> from keyhole.oracles.open import open_oracle
        >>> from keyhole.oracles.wrappers.degrade import Labels
        >>> box = Labels(open_oracle(attention(np.random.default_rng(0), 3)))
        >>> LabelOnly(bits=8).learn(box, np.random.default_rng(1)).model
        LabelledAttention(width=3, heads=1)
    """

    bits: int = 20

    def __post_init__(self) -> None:
        most_bits = 40  # beyond, a float64 box's own rounding decides the labels
        if whole_number("bits", self.bits, 1) > most_bits:
            raise InvalidArgument(f"bits must lie in 1 … {most_bits}, got {self.bits}")

    def expected_queries(self, spec: Spec) -> int | None:
        d = spec.width
        ratios = (d - 1) * (self.bits + 3 + int(np.log2(d)))
        return d * d * self.bits + ratios + 2 * d + 150  # for coding, scale and checks

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        if (oracle.spec.domain.max_length or 2) < 2:
            raise NotIdentifiable("queries of one token say nothing about the score matrix")
        reader, d = open_reader(oracle, rng), oracle.spec.width
        stated = oracle.spec.precision
        roundoff = UNIT_ROUNDOFF if stated is None else max(stated.relative, UNIT_ROUNDOFF)

        # 1. The direction of the value, to 16 bits: enough to find the scale of the score.
        rough = measure_direction(reader, max(2.0**-16, 2.0 * roundoff))
        trial = draw_thresholds(rough, rng, 1.0 / np.sqrt(d))
        magnitude, seen = scout_magnitude(rough, trial, roundoff)
        if not seen and np.isfinite(reader.size):  # short tokens need a more exact value
            rough = rough.refine(2.0 * roundoff)
            trial = draw_thresholds(rough, rng, magnitude)
            magnitude, seen = scout_magnitude(rough, trial, roundoff)
        trial = replace(trial, spread=magnitude) if seen else trial

        # 2. The value as exactly as the score asks for, and how exactly the box computes.
        direction = rough.refine(max(choose_value_width(trial, self.bits), 2.0 * roundoff))
        roundoff = find_roundoff(direction, roundoff, rng)
        table = LabelTable(direction, draw_thresholds(direction, rng, trial.spread), roundoff)

        # 3. The entries of the score.
        notes = ["Labels tell the value up to a positive factor: it has norm one."]
        if seen:
            refuse_short_tokens(table)
            brackets = bisect_entries(table, self.bits)
        else:
            brackets = bracket_zero(magnitude, d)
            notes.append(f"No score was seen: its entries are below about {magnitude:.1e}.")
        table = replace(table, asked=replace(table.asked, spread=rms(brackets.middle)))
        score, error = table.score(brackets), table.error(brackets)
        value_error = direction.error(roundoff)
        model = LabelledAttention(
            Attention([Head(score, None, direction.value)], 0.0), reader.coding
        )
        errors = LabelledAttention(Attention([Head(error, None, value_error)], 0.0), NO_ERROR)

        # 4. Labels that only this head gives.
        refuse_other_pairs(table.asked, brackets.middle, table.entry_error(brackets), rng)
        refuse_other_sequences(reader, model, errors, rng)
        if roundoff > UNIT_ROUNDOFF:
            notes.append(f"Labels are exact to about {roundoff:.1e} of a token's value.")
        return Hypothesis(
            model,
            errors,
            floor=float(self.bits * (d * d + d - 1)),
            notes=tuple(notes),
            diagnostics=LabelDiagnostics(bits=self.bits, resolution=roundoff),
        )


# -- the scale of the score --------------------------------------------------------------------


def draw_thresholds(
    direction: ValueDirection, rng: np.random.Generator, spread: float
) -> Thresholds:
    """Fresh probes and anchors of equal overlap with the value as it is known."""
    value = direction.value
    probes, anchors = equal_overlap(rng, value[:, None]), equal_overlap(rng, value[:, None])
    first, second = (b.coordinates(value[None])[0] for b in (probes, anchors))
    return Thresholds(direction.reader, probes, anchors, first, second, spread)


def scout_magnitude(
    direction: ValueDirection, asked: Thresholds, roundoff: float
) -> tuple[float, bool]:
    """The order of magnitude of the entries, from six of them: the largest is rarely a small one.
    A bound and False where none was seen.

    Where tokens cannot be long, errors of the value and rounding could feign an entry: only what
    is four standard errors of that counts.
    """
    d = asked.probes.width
    chosen = (np.arange(min(6, d)) * (d + 1)).astype(np.int64)
    free = replace(asked, spread=TINY)  # scaled by the threshold and the domain
    feigned = LabelTable(direction, free, roundoff).entry_error(bracket_zero(0.0, d))
    least = 4.0 * float(np.median(feigned))
    magnitude_step = 8.0  # factor between the magnitudes of the score that are tried
    _, level, seen = find_magnitude(
        free.above,
        Brackets.unknown(d * d, asked.spread),
        chosen,
        max(asked.spread, least),
        factor=magnitude_step,
        most=16,  # 2^48 up or down, beyond which the score counts as zero
        least=least,
    )
    # The largest of six, 1.5 root mean squares, lies in (level, magnitude_step * level].
    return (level * np.sqrt(magnitude_step) / 1.5 if seen else level), seen


def choose_value_width(trial: Thresholds, bits: int) -> float:
    """Brackets of the value's ratios for which their error, even if all adds up in one column of
    the score, stays below a quarter of 2^-bits · typical entry."""
    typical = np.array([trial.spread])
    gain = float(trial.amplification(np.zeros(1, dtype=np.int64), typical)[0])
    return float(0.6 * 2.0**-bits * trial.spread / (gain * trial.probes.width))


# -- the entries -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Entries probe · score · anchor, as asked, and how errors travel from there to the score."""

    direction: ValueDirection
    asked: Thresholds
    roundoff: float

    def score(self, brackets: Brackets) -> Float[Array, "d d"]:
        entries = (self.asked.flips * brackets.middle).reshape(-1, self.asked.anchors.width)
        half = self.asked.anchors.combine(np.ascontiguousarray(entries))
        return np.ascontiguousarray(self.asked.probes.combine(np.ascontiguousarray(half.T)).T)

    def error(self, brackets: Brackets) -> Float[Array, "d d"]:
        variance = self.entry_error(brackets).reshape(-1, self.asked.anchors.width) ** 2
        half = self.asked.anchors.combine_squared(variance)
        return np.sqrt(self.asked.probes.combine_squared(np.ascontiguousarray(half.T)).T)

    def entry_error(self, brackets: Brackets) -> Float[Array, " m"]:
        """Bracket, error of the value and the box's rounding, of each entry."""
        wrong = self._relative(self.direction.error(self.roundoff))
        return np.sqrt(
            brackets.width**2 / 12.0
            + (self._gain(brackets) * wrong) ** 2
            + self.noise(brackets) ** 2
        )

    def noise(self, brackets: Brackets) -> Float[Array, " m"]:
        """What the box's rounding does to the entries: narrower brackets tell nothing."""
        rounding = 3.0 * self.roundoff  # of a token's value, and of a sum of products
        value = rounding * np.abs(self.direction.value)
        score = rounding * np.sqrt(self.asked.probes.width) * self.asked.spread
        return np.hypot(self._gain(brackets) * self._relative(value), score)

    def _gain(self, brackets: Brackets) -> Float[Array, " m"]:
        return self.asked.amplification(np.arange(len(brackets)), brackets.middle)

    def _relative(self, error: Float[Array, " d"]) -> Float[Array, " m"]:
        """Relative error of the values of both tokens, given that of the value's components."""

        def one(basis: Basis, overlap: Array) -> Array:
            rows = basis.rows(np.arange(basis.width))
            return np.asarray(rows**2 @ error**2 / overlap**2)

        first = one(self.asked.probes, self.asked.probe_overlap)
        second = one(self.asked.anchors, self.asked.anchor_overlap)
        return np.sqrt(first[:, None] + second[None, :]).ravel()


def bisect_entries(table: LabelTable, bits: int) -> Brackets:
    """All entries, to brackets of 2 · 2^-bits of the largest entry of the score: 0.6 of that is
    one standard error.

    A sample tells the root mean square of all roughly, all of them to a quarter of it tell the
    largest; 0.8 of the root mean square is the best prediction for normal entries.
    """
    asked, spread = table.asked, table.asked.spread
    count = asked.probes.width * asked.anchors.width
    brackets = Brackets.unknown(count, spread)
    # a stride coprime to the width visits all probes and anchors
    sample = np.unique((np.arange(min(48, count)) * (asked.probes.width + 1)) % count)
    brackets = bisect(asked.above, brackets, 0.5 * spread, sample)
    spread = rms(brackets.middle[sample])
    asked = replace(asked, spread=spread)
    brackets = bisect(asked.above, brackets.predict(0.8 * spread), 0.25 * spread)
    spread = rms(brackets.middle)
    table = replace(table, asked=replace(asked, spread=spread))
    width = 2.0 * 2.0**-bits * float(np.abs(table.score(brackets)).max())
    wanted = np.maximum(width, table.noise(brackets))
    return bisect(table.asked.above, brackets.predict(0.8 * spread), wanted)


def refuse_short_tokens(table: LabelTable) -> None:
    """Raises before paying for the entries where the domain hides them in the box's rounding: an
    error of a tenth of a typical entry."""
    d, spread = table.asked.probes.width, table.asked.spread
    noise = float(np.median(table.entry_error(bracket_zero(0.0, d))))
    if noise > 0.1 * spread:
        raise IllConditioned(
            f"tokens of norm up to {table.direction.reader.size:.2g} move the scores so little "
            "that the box's rounding hides them: entries of the score could be told to within "
            f"{noise / spread:.0%} of their size only. Allow longer tokens"
        )


def rms(numbers: Float[Array, " m"]) -> float:
    return float(max(np.sqrt(np.mean(numbers**2)), TINY))


def bracket_zero(reach: float, width: int) -> Brackets:
    """All entries somewhere within reach of zero."""
    everywhere = np.ones(width * width)
    return Brackets(-reach * everywhere, reach * everywhere, 0.0 * everywhere, everywhere)
