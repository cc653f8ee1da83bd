"""A single head from labels alone: score and the direction of the value, one bit per query.

Statement.  The box answers with the sign of f(X) = Σ_i softmax_i(x_i · score x_N) x_i · value only.
            The score and the direction of the value are recovered to about `bits` bits relative to
            the largest entry of the score, with about bits · (d² + d − 1) queries.
Queries.  One token: coding of the labels, direction of the value (value_direction). Pairs:
            "is probe · score · anchor above t?" for any t (score_thresholds), all entries bisected
            side by side from a prediction of their scale (learners/label_only/bisection).
Algebra.    With T the probes and Ω the anchors, both orthonormal and of equal overlap with the
            value, the entries are T score Ωᵀ. A number is uniform in its last bracket.
Fails.      value = 0 or one label only (NotIdentifiable). An offset, a key bias, a second head or
            anything else shows as a wrong label close to the border where labels change
            (WrongFamily). No room around zero, or a vocabulary: DomainError before any query.
Source.     Appendix B of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Anchors" (2026); the free threshold, scales and predictions are ours.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float, whole_number
from keyhole.errors import IllConditioned, InvalidArgument, NotIdentifiable
from keyhole.learners.base import Hypothesis
from keyhole.learners.label_only.bisection import Brackets, bisect, gallop
from keyhole.learners.label_only.boundary_checks import refuse_other_pairs, refuse_other_sequences
from keyhole.learners.label_only.score_thresholds import Thresholds
from keyhole.learners.label_only.value_direction import (
    Direction,
    measure_direction,
    open_reader,
    resolution,
)
from keyhole.linalg.bases import Basis, equal_overlap
from keyhole.models.attention import Attention, Head
from keyhole.models.sign_attention import NO_ERROR, LabelledAttention
from keyhole.oracles.base import Oracle, Spec

MOST_BITS = 40  # beyond, a float64 box's own rounding decides the labels
FIRST_WIDTH = 2.0**-16  # of the value's ratios: enough to find the scale of the score
LAST_WIDTH = 2.0  # final bracket in units of 2^-bits · largest entry: 0.6 of it one standard error
VALUE_SHARE = 0.6  # value's ratios: their error, even if all adds up in one column of the score,
# then stays below a quarter of 2^-bits · typical entry
SCOUTS = 6  # entries that find the order of magnitude: the largest is rarely a small one
SCOUT_FACTOR = 8.0  # between the magnitudes tried
MOST_STEPS = 16  # magnitudes tried: 8^16 = 2^48 up or down, beyond which the score counts as zero
FEIGNED = 4.0  # standard errors that an entry must have to count
LARGEST = 1.5  # of so many entries, in root mean squares
OVERHEAD = 150  # queries for coding, scale and checks
SAMPLE = 48  # entries bisected first, for the root mean square of all
ROUGH = 0.5  # width of a bracket in spreads, for that
COARSE = 0.25  # width in spreads at which the largest entry of the score is well enough known
PREDICTION = 0.8  # spread of the prediction in root mean squares: best for normal entries
USELESS = 0.1  # error of a typical entry, relative to it, beyond which asking on is pointless
ROUNDINGS = 3.0  # rounding errors of a token's value, in units of the roundoff


@dataclass(frozen=True)
class LabelOnly:
    """Learner for one softmax attention head that tells only the sign of its answer.

    >>> from keyhole.models.random import attention
    >>> from keyhole.oracles.open import open_oracle
    >>> from keyhole.oracles.wrappers.degrade import Labels
    >>> box = Labels(open_oracle(attention(np.random.default_rng(0), 3)))
    >>> LabelOnly(bits=8).learn(box, np.random.default_rng(1)).model
    LabelledAttention(width=3, heads=1)
    """

    bits: int = 20

    def __post_init__(self) -> None:
        if whole_number("bits", self.bits, 1) > MOST_BITS:
            raise InvalidArgument(f"bits must lie in 1 … {MOST_BITS}, got {self.bits}")

    def expected_queries(self, spec: Spec) -> int | None:
        d = spec.width
        ratios = (d - 1) * (self.bits + 3 + int(np.log2(d)))
        return d * d * self.bits + ratios + 2 * d + OVERHEAD

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        if (oracle.spec.domain.max_length or 2) < 2:
            raise NotIdentifiable("queries of one token say nothing about the score matrix")
        reader = open_reader(oracle, rng)
        stated = oracle.spec.precision
        roundoff = UNIT_ROUNDOFF if stated is None else max(stated.relative, UNIT_ROUNDOFF)
        rough = measure_direction(reader, max(FIRST_WIDTH, 2.0 * roundoff))
        scouting = thresholds(rough, rng, 1.0 / np.sqrt(oracle.spec.width))
        magnitude, seen = scout(rough, scouting, roundoff)
        if not seen and np.isfinite(reader.size):  # short tokens need a more exact value
            rough = rough.refined(2.0 * roundoff)
            scouting = thresholds(rough, rng, magnitude)
            magnitude, seen = scout(rough, scouting, roundoff)
        trial = replace(scouting, spread=magnitude) if seen else scouting
        width = max(self._value_width(trial), 2.0 * roundoff)
        direction = rough.refined(width)
        roundoff = resolution(direction, roundoff, rng)
        table = LabelTable(direction, thresholds(direction, rng, trial.spread), roundoff)
        if seen:
            refuse_short_tokens(table)
            return self._learned(table, self._entries(table), rng)
        note = f"No score was seen: its entries are below about {magnitude:.1e}."
        return self._learned(table, within(magnitude, oracle.spec.width), rng, note)

    def _value_width(self, trial: Thresholds) -> float:
        typical = np.array([trial.spread])
        gain = float(trial.amplification(np.zeros(1, dtype=np.int64), typical)[0])
        d = trial.probes.width
        return float(VALUE_SHARE * 2.0**-self.bits * trial.spread / (gain * d))

    def _entries(self, table: "LabelTable") -> Brackets:
        """All entries, to a bracket that is small beside the largest entry of the score."""
        asked, spread = table.asked, table.asked.spread
        count = asked.probes.width * asked.anchors.width
        brackets = Brackets.unknown(count, spread)
        # a stride coprime to the width visits all probes and anchors
        sample = np.unique((np.arange(min(SAMPLE, count)) * (asked.probes.width + 1)) % count)
        brackets = bisect(asked.above, brackets, ROUGH * spread, sample)
        spread = rms(brackets.middle[sample])
        asked = replace(asked, spread=spread)
        brackets = brackets.predicted(PREDICTION * spread)
        brackets = bisect(asked.above, brackets, COARSE * spread)
        spread = rms(brackets.middle)
        asked = replace(asked, spread=spread)
        largest = float(np.abs(replace(table, asked=asked).score(brackets)).max())
        width = LAST_WIDTH * 2.0**-self.bits * largest
        noise = replace(table, asked=asked).noise(brackets)
        brackets = brackets.predicted(PREDICTION * spread)
        return bisect(asked.above, brackets, np.maximum(width, noise))

    def _learned(
        self, table: "LabelTable", brackets: Brackets, rng: np.random.Generator, *notes: str
    ) -> Hypothesis:
        direction, reader = table.direction, table.direction.reader
        table = replace(table, asked=replace(table.asked, spread=rms(brackets.middle)))
        score, error = table.score(brackets), table.error(brackets)
        model = LabelledAttention(
            Attention([Head(score, None, direction.value)], 0.0), reader.coding
        )
        errors = LabelledAttention(
            Attention([Head(error, None, direction.error(table.roundoff))], 0.0), NO_ERROR
        )
        refuse_other_pairs(table.asked, brackets.middle, table.entry_error(brackets), rng)
        refuse_other_sequences(reader, model, errors, rng)
        d = score.shape[0]
        notes = ("Labels tell the value up to a positive factor: it has norm one.", *notes)
        if table.roundoff > UNIT_ROUNDOFF:
            notes += (f"Labels are exact to about {table.roundoff:.1e} of a token's value.",)
        return Hypothesis(
            model,
            errors,
            floor=float(self.bits * (d * d + d - 1)),
            notes=notes,
            details={"bits": self.bits, "resolution": table.roundoff},
        )


@dataclass(frozen=True, eq=False)
class LabelTable:
    """Entries probe · score · anchor, as asked, and how errors travel from there to the score."""

    direction: Direction
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
        value = ROUNDINGS * self.roundoff * np.abs(self.direction.value)
        score = ROUNDINGS * self.roundoff * np.sqrt(self.asked.probes.width) * self.asked.spread
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


def thresholds(direction: Direction, rng: np.random.Generator, spread: float) -> Thresholds:
    """Fresh probes and anchors of equal overlap with the value as it is known."""
    value = direction.value
    probes, anchors = equal_overlap(rng, value[:, None]), equal_overlap(rng, value[:, None])
    first, second = (b.coordinates(value[None])[0] for b in (probes, anchors))
    return Thresholds(direction.reader, probes, anchors, first, second, spread)


def scout(direction: Direction, asked: Thresholds, roundoff: float) -> tuple[float, bool]:
    """The order of magnitude of the entries; a bound and False where none was seen."""
    d = asked.probes.width
    chosen = (np.arange(min(SCOUTS, d)) * (d + 1)).astype(np.int64)
    free = replace(asked, spread=TINY)  # scaled by the threshold and the domain
    least = smallest(direction, free, roundoff)
    _, level, seen = gallop(
        free.above,
        Brackets.unknown(d * d, asked.spread),
        chosen,
        max(asked.spread, least),
        factor=SCOUT_FACTOR,
        most=MOST_STEPS,
        least=least,
    )
    # the largest lies in (level, SCOUT_FACTOR * level]
    return (level * np.sqrt(SCOUT_FACTOR) / LARGEST if seen else level), seen


def smallest(direction: Direction, asked: Thresholds, roundoff: float) -> float:
    """Where tokens cannot be long: the entry that errors of value and rounding could feign."""
    table = LabelTable(direction, asked, roundoff)
    return FEIGNED * float(np.median(table.entry_error(within(0.0, asked.probes.width))))


def refuse_short_tokens(table: LabelTable) -> None:
    """Raises before paying for the entries where the domain hides them in the box's rounding."""
    d, spread = table.asked.probes.width, table.asked.spread
    noise = float(np.median(table.entry_error(within(0.0, d))))
    if noise > USELESS * spread:
        raise IllConditioned(
            f"tokens of norm up to {table.direction.reader.size:.2g} move the scores so little "
            "that the box's rounding hides them: entries of the score could be told to within "
            f"{noise / spread:.0%} of their size only. Allow longer tokens"
        )


def rms(numbers: Float[Array, " m"]) -> float:
    return float(max(np.sqrt(np.mean(numbers**2)), TINY))


def within(reach: float, width: int) -> Brackets:
    """All entries somewhere within reach of zero."""
    everywhere = np.ones(width * width)
    return Brackets(-reach * everywhere, reach * everywhere, 0.0 * everywhere, everywhere)
