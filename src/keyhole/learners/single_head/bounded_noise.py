"""One head behind additive errors, with tokens in a ball: the design that noise asks for.

Statement.  Answers carry errors that do not scale with them (noise, rounding to decimals, a
            tolerance), tokens have norm at most B. d² + d queries determine the head; every
            further d² + d lower the error as 1/√. They are asked until the budget is spent, or
            until the relative standard error of the score reaches what was asked for.
Queries.    [x] for offset and value. [u + x; x] with unit probes u_0 ∝ v̂ and u_i ∝ c v̂ + s q_i (of
            a vector box, v̂ is where its value map is largest) against orthonormal anchors x: the
            error of a score is noise / |u · v|, and equal overlap with v would make |u · v| small
            for all. Lengths are the longest the ball allows, twice as much information in |u| as
            in |x|, signs so that u and x point apart. Repetitions use slightly different lengths,
            so that a rounding step averages out as noise does.
Algebra.    An answer without the offset and the anchor is weight · (u · value): read along that
            vector it holds all that can be known of the weight, whose log-odds are the score. Every
            h_ij = û_i · score · x̂_j is seen by its own queries alone: its likelihood is maximised
            by Newton steps in one variable, and score = U⁻¹ H Ω. A score of low rank is the
            estimate without the singular values that noise alone explains.
Errors.     Standard errors from the Fisher information (own noise, and that of v, which all scores
            share): at one pass the queries are as many as the unknowns, and the covariance is the
            Cramér–Rao bound. For a stated tolerance, intervals that contain the truth with
            certainty.
Fails.      A value that noise hides, or scores that a tolerance leaves unbounded: NotIdentifiable.
Source.     Theorem 6.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026), whose margin condition (no small entry of v) is not needed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import expit

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import (
    BudgetExhausted,
    IllConditioned,
    KeyholeError,
    NotIdentifiable,
    WrongFamily,
)
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head.hypothesis import (
    Parameters,
    SingleHeadDiagnostics,
    assemble,
)
from keyhole.linalg.bases import random_rotation
from keyhole.linalg.low_rank import separate_errors, truncate_noise
from keyhole.linalg.low_rank_fit import count_unknowns
from keyhole.linalg.softmax import LogOdds, logit_with_error
from keyhole.measurement.noise import REPEATS, decimal_step, estimate_noise
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import DETECTION, REJECTION, NoiseModel
from keyhole.oracles.queries import QueryBatch

PILOTS = 3  # queries each that look for a key bias, and for the scale of the scores
RESERVE = 5  # queries of a budget that are left for verification
CERTAINTY = 1.0 + 1e-9  # factor for the rounding of our own arithmetic on intervals
PROBE_OVER_ANCHOR = np.sqrt(2.0)  # |u| / |x| that maximises |u|²|x|, what an answer tells

RankWanted = int | Literal["full", "unknown"]


def fewest_queries(width: int) -> int:
    """Queries of a budget that is enough where the noise of the box has to be measured too."""
    # queries beyond the unknowns: noise, offset, key bias, scale
    overhead = 3 + 3 * PILOTS + REPEATS
    return width * width + width + overhead + RESERVE


def learn_bounded_noise(
    oracle: Oracle,
    rng: np.random.Generator,
    accuracy: float | None = None,
    rank: RankWanted = "full",
) -> Hypothesis | None:
    """The head, if errors of the box are additive and tokens are bounded; None elsewhere.

    Spends the budget of the oracle, where there is one, or what `accuracy` needs: another budget
    asks other queries.
    """
    radius, stated = oracle.spec.domain.radius, oracle.spec.precision
    if not 0 < radius < np.inf:
        return None
    width, left = oracle.spec.width, oracle.remaining
    unknowns = width * width + width
    thrifty = left is not None and left < fewest_queries(width)
    if thrifty and stated is None:
        raise BudgetExhausted(
            f"with the precision of the box unknown, {fewest_queries(width)} queries are "
            f"needed, the budget leaves {left}: raise it, or state precision="
        )
    noise = estimate_noise(oracle, rng)[0] if stated is None else stated
    if noise.error_floor <= 1e3 * noise.relative:
        return None  # additive errors do not dominate the rounding of numbers of order one
    if left is not None and left < unknowns:  # before any is paid for: a plan for more is another
        raise BudgetExhausted(
            f"{unknowns} queries are the least that determine a head, the budget leaves {left}: "
            "raise it"
        )
    passes = 1
    if left is not None:
        overhead = 0 if thrifty else 3 * PILOTS + RESERVE
        passes = max(1, ((oracle.remaining or 0) - overhead) // (unknowns + 1))
    learned = _learn(oracle, rng, noise, passes, rank, thrifty)
    while accuracy is not None and (reached := _relative_error(learned)) > accuracy:
        factor = (reached / accuracy) ** 2
        # The first passes tell the error only roughly: their number grows 32-fold at most.
        passes = max(passes + 1, int(np.ceil(passes * min(factor, 32.0))))
        learned = _learn(oracle, rng, noise, passes, rank, thrifty=False)
    return learned


def _relative_error(learned: Hypothesis) -> float:
    """Of the score."""
    found = learned.diagnostics
    assert isinstance(found, SingleHeadDiagnostics)
    return float(found.cramer_rao or 0.0)


def _learn(
    oracle: Oracle,
    rng: np.random.Generator,
    noise: NoiseModel,
    passes: int,
    rank: RankWanted,
    thrifty: bool,
) -> Hypothesis:
    """All queries, then the estimate; `thrifty`: no query beyond the unknowns."""
    width, radius = oracle.spec.width, oracle.spec.domain.radius
    offset, offset_error = np.zeros(1), np.zeros(1)
    notes: tuple[str, ...] = ()
    if not thrifty:
        offset, offset_error, least = _measure_offset(oracle, noise, min(passes, width))
        if not offset.any():
            notes = (f"No offset was seen above {least:.1e}; none is assumed.",)
    linear = _measure_value(oracle, rng, noise, passes, offset, offset_error)
    pairs = AlignedPairs.towards(linear.value, linear.scalar, rng)
    reading = PairReading(pairs, linear.value, linear.offset)
    bias, share = Bias.none(width), 1.0
    if not thrifty:
        bias = _measure_key_bias(oracle, linear, reading, radius)
        share = _find_share(oracle, linear, reading, radius)

    asked: list[PairAnswers] = []  # one for every pass
    for number in range(passes):
        left = oracle.remaining
        if number and left is not None and left < width**2 + RESERVE:
            break  # a key bias, or shorter lengths, cost more than was planned
        longest = pairs.longest(radius)
        anchor = share * (longest * _draw_shares(linear.noise, rng, longest.shape, number))
        asked.append(_ask_all_pairs(oracle, pairs, pairs.probe_lengths(anchor), anchor))

    if linear.noise.tolerance > 0:
        learned = _bound(oracle, linear, reading, bias, asked, share)
    else:
        learned = _estimate(oracle, rng, linear, reading, bias, asked, rank)
    return replace(learned, notes=(*notes, *learned.notes))


def _ask(oracle: Oracle, tokens: Float[Array, "n l d"], purpose: str) -> Float[Array, "n D"]:
    answers = oracle.ask(QueryBatch.of(tokens, purpose))
    return np.asarray(answers, dtype=np.float64).reshape(len(tokens), -1)


def _draw_shares(
    noise: NoiseModel, rng: np.random.Generator, shape: tuple[int, ...], number: int
) -> Array:
    """Lengths of a pass as shares of the longest: all of it, unless repeating would repeat errors;
    then up to a tenth less."""
    if number == 0 or noise.step == 0 == noise.tolerance:
        return np.ones(shape)
    return 1.0 - 0.1 * rng.random(shape)


# -- length one --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NoisyLinear:
    """What queries of one token tell."""

    value: Float[Array, "d D"]
    value_error: Float[Array, "d D"]  # standard errors; bounds where there is a tolerance
    offset: Float[Array, " D"]
    offset_error: Float[Array, " D"]
    scalar: bool
    noise: NoiseModel

    @property
    def blur(self) -> float:
        """By how much an answer without the offset may be off, at the stated tolerance."""
        return _blur(self.noise, self.offset)


def _blur(noise: NoiseModel, offset: Float[Array, " D"]) -> float:
    """The offset, where there is one, is an answer too."""
    return CERTAINTY * noise.tolerance * (2.0 if offset.any() else 1.0)


def _measure_offset(
    oracle: Oracle, noise: NoiseModel, count: int
) -> tuple[Float[Array, " D"], Float[Array, " D"], float]:
    """The offset, zero where it is not seen above the noise, its standard error, and the least
    that would have been seen."""
    answers = _ask(oracle, np.zeros((count, 1, oracle.spec.width)), "offset")
    mean, error = answers.mean(axis=0), float(noise.error_floor / np.sqrt(count))
    offset = np.where(np.abs(mean) > DETECTION * error, mean, 0.0)
    return offset, np.where(offset != 0, error, 0.0), DETECTION * error


def _measure_value(
    oracle: Oracle,
    rng: np.random.Generator,
    noise: NoiseModel,
    passes: int,
    offset: Float[Array, " D"],
    offset_error: Float[Array, " D"],
) -> NoisyLinear:
    width, radius = oracle.spec.width, oracle.spec.domain.radius
    weight, answers, scalar = np.zeros((width, 1)), [], True
    total: Any = 0.0
    low: Any = -np.inf
    high: Any = np.inf
    for number in range(passes):
        length = radius * _draw_shares(noise, rng, (width, 1), number)
        raw = oracle.ask(QueryBatch.of(np.diag(length[:, 0])[:, None, :], "value"))
        scalar = raw.ndim == 1
        answers.append(np.asarray(raw, dtype=np.float64).reshape(width, -1))
        rest, slack = answers[-1] - offset, _blur(noise, offset) / length
        total = total + length * rest
        weight += length**2
        low = np.maximum(low, rest / length - slack)
        high = np.minimum(high, rest / length + slack)
    # A rounding step read off one answer is too coarse where that answer ends in zeros.
    step = decimal_step(np.concatenate(answers))
    if oracle.spec.precision is None and 0 < step < noise.step:
        noise = replace(noise, step=step)
    value = np.asarray(total / weight)
    error = np.broadcast_to(noise.error_floor / np.sqrt(weight), value.shape)
    bounded = noise.tolerance > 0
    value, stated = ((low + high) / 2.0, (high - low) / 2.0) if bounded else (value, error)
    if np.linalg.norm(value) <= DETECTION * np.linalg.norm(error):
        raise NotIdentifiable(
            "the value vector cannot be told from zero at this noise, so nothing of the score "
            "matrix can be seen; ask for a larger budget or a wider domain"
        )
    outputs = value.shape[1:]  # known at last, where no offset was measured
    return NoisyLinear(
        value,
        np.array(stated),
        np.broadcast_to(offset, outputs),
        np.broadcast_to(offset_error, outputs),
        scalar,
        noise,
    )


# -- pairs -------------------------------------------------------------------------------------


class PairAnswers(NamedTuple):
    """All probes against all anchors, once."""

    answers: Float[Array, "d d D"]  # NaN where a pair was left out
    probe: Float[Array, "d d"]  # signed lengths
    anchor: Float[Array, "d d"]  # lengths


@dataclass(frozen=True, eq=False)
class AlignedPairs:
    """Unit probes that lean towards the value map, and orthonormal anchors, both as rows."""

    probes: Float[Array, "d d"]
    anchors: Float[Array, "d d"]

    @classmethod
    def towards(
        cls, value: Float[Array, "d D"], scalar: bool, rng: np.random.Generator
    ) -> "AlignedPairs":
        """Probes that lean as much as is best for this value map, and random anchors. A lean is
        the squared overlap of a probe with v̂; 0.41 has the least error for every scalar box."""
        width = len(value)
        unit = np.linalg.svd(value)[0][:, 0]
        rest = np.linalg.qr(np.column_stack([unit, np.eye(width)]))[0][:, 1:width].T
        rest = random_rotation(rng, width - 1) @ rest
        candidates = [
            np.vstack([unit, np.sqrt(lean) * unit + np.sqrt(1.0 - lean) * rest])
            for lean in ((0.41,) if scalar else (0.41, 0.0, 0.1, 0.2, 0.3))
        ]
        probes = min(candidates, key=lambda probes: predict_error(probes, value))
        return cls(probes, random_rotation(rng, width))

    @cached_property
    def inverse(self) -> Float[Array, "d d"]:
        return np.linalg.inv(self.probes)

    @property
    def cosines(self) -> Float[Array, "d d"]:
        return self.probes @ self.anchors.T

    def longest(self, radius: float) -> Float[Array, "d d"]:
        """Lengths of the anchors for which both tokens of every pair are within the radius."""
        apart = 3.0 - 2.0 * PROBE_OVER_ANCHOR * np.abs(self.cosines)
        return np.asarray(radius / np.sqrt(np.maximum(apart, 1.0)))

    def probe_lengths(self, anchor: Float[Array, "d d"]) -> Float[Array, "d d"]:
        """Signed, so that a probe points away from its anchor."""
        sign = np.where(self.cosines > 0, -1.0, 1.0)
        return np.asarray(sign * PROBE_OVER_ANCHOR * anchor)

    def tokens(self, columns: slice, probe: Array, anchor: Array) -> Float[Array, "n 2 d"]:
        """Queries of all probes against some anchors, anchor by anchor."""
        x = anchor[:, columns].T[:, :, None] * self.anchors[columns][:, None, :]
        u = probe[:, columns].T[:, :, None] * self.probes[None, :, :]
        return np.stack([u + x, x], axis=2).reshape(-1, 2, self.probes.shape[1])

    def some_tokens(
        self, rows: Array, columns: Array, probe: Array, anchor: Array
    ) -> Float[Array, "n 2 d"]:
        """Queries of single probes against single anchors."""
        x = anchor[rows, columns][:, None] * self.anchors[columns]
        u = probe[rows, columns][:, None] * self.probes[rows]
        return np.stack([u + x, x], axis=1)

    def score(self, products: Float[Array, "d d"]) -> Float[Array, "d d"]:
        """The matrix that has these products with unit probes and anchors."""
        return self.inverse @ products @ self.anchors


@dataclass(frozen=True, eq=False)
class PairReading:
    """Answers to pairs, read along what each probe moves."""

    pairs: AlignedPairs
    value: Float[Array, "d D"]
    offset: Float[Array, " D"]

    @cached_property
    def _seen(self) -> tuple[Float[Array, "d D"], Float[Array, " d"]]:
        return see_probes(self.pairs.probes, self.value)

    @property
    def along(self) -> Float[Array, "d D"]:
        """Unit directions in which the probes are seen."""
        return self._seen[0]

    @property
    def sizes(self) -> Float[Array, " d"]:
        """How much of a unit probe is seen."""
        return self._seen[1]

    @cached_property
    def _fixed(self) -> Float[Array, "d d"]:
        """What a unit anchor adds to the reading of a probe."""
        return (self.along @ self.value.T) @ self.pairs.anchors.T

    def of_pairs(self, answers: Float[Array, "d d D"], anchor: Float[Array, "d d"]) -> Array:
        """weight · length of the probe · its size, for all pairs."""
        own = (answers - self.offset) @ self.along[:, :, None]
        return np.asarray(own[:, :, 0] - anchor * self._fixed)

    def of_probes(self, answers: Float[Array, "n D"]) -> Float[Array, " n"]:
        """The same for the first probes beside the zero token."""
        return np.asarray(np.sum((answers - self.offset) * self.along[: len(answers)], axis=1))


def see_probes(
    probes: Float[Array, "n d"], value: Float[Array, "d D"]
) -> tuple[Float[Array, "n D"], Float[Array, " n"]]:
    """Unit directions of the answers along which the probes are seen, and how much of them."""
    along = probes @ value
    sizes = np.linalg.norm(along, axis=1)
    return along / np.maximum(sizes, TINY)[:, None], sizes


def predict_error(probes: Float[Array, "d d"], value: Float[Array, "d D"]) -> float:
    """Of all scores, measured with these probes, in some unit."""
    visible = np.maximum(see_probes(probes, value)[1], TINY)
    return float(np.sum((np.linalg.inv(probes) / visible) ** 2))


def compute_log_odds(reading: Array, swing: Array, noise: float) -> LogOdds:
    """Scores and their errors where a reading is weight · swing + noise. Weights are kept inside
    (0, 1) by a millionth."""
    weight = np.clip(reading / swing, 1e-6, 1.0 - 1e-6)
    return logit_with_error(weight, noise / np.abs(swing))


@dataclass(frozen=True, eq=False)
class Bias:
    """A key bias, its standard error, and, for a tolerance, by how much probe · key_bias may be
    off."""

    vector: Float[Array, " d"]
    error: Float[Array, " d"]
    slack: Float[Array, " d"]

    @classmethod
    def none(cls, width: int) -> "Bias":
        return cls(*np.zeros((3, width)))


def _measure_key_bias(
    oracle: Oracle, linear: NoisyLinear, reading: PairReading, radius: float
) -> Bias:
    """A few probes against the zero token; all of them where these show a key bias."""
    width = len(linear.value)
    count, inverse = min(PILOTS, width), reading.pairs.inverse
    swing, noise = radius * reading.sizes, linear.noise.error_floor

    def ask(which: slice) -> Array:
        probes = reading.pairs.probes[which]
        tokens = np.zeros((len(probes), 2, width))
        tokens[:, 0] = radius * probes
        return _ask(oracle, tokens, "key bias")

    answers = ask(slice(count))
    scores, errors = compute_log_odds(reading.of_probes(answers), swing[:count], noise)
    if (np.abs(scores) <= DETECTION * errors).all():
        return Bias.none(width)
    answers = np.concatenate([answers, ask(slice(count, width))])
    if linear.noise.tolerance > 0:
        intervals = Intervals(reading, linear.value_error, linear.blur)
        low, high = intervals.of_log_odds(answers, np.full(width, radius))
        refuse_unbounded(low, high)
        scores, slack = (low + high) / 2.0, (high - low) / (2.0 * radius)
        return Bias(inverse @ scores / radius, np.abs(inverse) @ slack, slack)
    scores, errors = compute_log_odds(reading.of_probes(answers), swing, noise)
    error = np.sqrt(inverse**2 @ errors**2) / radius
    return Bias(inverse @ scores / radius, error, np.zeros(width))


def _find_share(oracle: Oracle, linear: NoisyLinear, reading: PairReading, radius: float) -> float:
    """Of the longest lengths, at which the scores of a few pairs are moderate: above 1.5, shorter
    tokens tell more."""
    share, pairs, moderate = 1.0, reading.pairs, 1.5
    for _ in range(8):  # lengths at which the scores may be moderate
        anchor = share * pairs.longest(radius)
        probe = pairs.probe_lengths(anchor)
        tokens = pairs.tokens(slice(0, 1), probe, anchor)[:PILOTS]
        along, sizes = see_probes(pairs.probes[:PILOTS], linear.value)
        rest = _ask(oracle, tokens, "scale") - linear.offset
        rest = rest - np.outer(anchor[:PILOTS, 0], pairs.anchors[0] @ linear.value)
        swing = probe[:PILOTS, 0] * sizes
        scores, _ = compute_log_odds(np.sum(rest * along, axis=1), swing, linear.noise.error_floor)
        size = float(np.sqrt(np.mean(scores**2)))
        if size <= moderate:
            break
        share *= max(0.25, float(np.sqrt(moderate / size)))
    return share


def _ask_all_pairs(
    oracle: Oracle, pairs: AlignedPairs, probe: Float[Array, "d d"], anchor: Float[Array, "d d"]
) -> PairAnswers:
    """All probes against all anchors, 64 anchors at once."""
    width, parts = len(probe), []
    for start in range(0, width, 64):
        tokens = pairs.tokens(slice(start, min(start + 64, width)), probe, anchor)
        answers = _ask(oracle, tokens, "score")
        parts.append(answers.reshape(-1, width, answers.shape[1]).transpose(1, 0, 2))
    return PairAnswers(np.concatenate(parts, axis=1), probe, anchor)


# -- the most likely scores --------------------------------------------------------------------


def find_most_likely(
    reading: PairReading, asked: Sequence[PairAnswers], key_bias: Float[Array, " d"], noise: float
) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
    """Scores per unit lengths, and the information that the answers hold of them: four Newton
    steps for each."""
    biases = (reading.pairs.probes @ key_bias)[:, None]
    best: Array | None = None
    for _ in range(4):
        slope_sum: Any = 0.0
        information: Any = 0.0
        for answers, probe, anchor in asked:
            rest = reading.of_pairs(answers, anchor)
            swing, bias = probe * reading.sizes[:, None], probe * biases
            if best is None:
                score, error = compute_log_odds(rest, swing, 1.0)
                weight = (probe * anchor / error) ** 2
                slope_sum += weight * (score - bias) / (probe * anchor)
                information += weight
                continue
            share = expit(best * probe * anchor + bias)
            slope = share * (1.0 - share) * swing * probe * anchor
            slope_sum += slope * (rest - share * swing)
            information += slope**2
        if not (information > 0).all():
            raise explain_unreadable(reading, asked, noise)
        best = slope_sum / information + (0.0 if best is None else best)
    return np.asarray(best), information / noise**2


def explain_unreadable(
    reading: PairReading, asked: Sequence[PairAnswers], noise: float
) -> KeyholeError:
    """Why some score has no likely value: answers that no weight gives, or noise."""
    for answers, probe, anchor in asked:
        rest = np.sign(probe) * reading.of_pairs(answers, anchor)
        beyond = np.maximum(-rest, rest - np.abs(probe) * reading.sizes[:, None])
        if beyond.max() > REJECTION * noise:
            return WrongFamily("no scores of one head explain the answers to pairs")
    return IllConditioned("noise hides the score of some pairs: they need more queries")


def _estimate(
    oracle: Oracle,
    rng: np.random.Generator,
    linear: NoisyLinear,
    reading: PairReading,
    bias: Bias,
    asked: Sequence[PairAnswers],
    rank: RankWanted,
) -> Hypothesis:
    """The score from the most likely products; all of them share the error of v, which is
    estimated from 64 disturbed values."""
    pairs, noise = reading.pairs, linear.noise.error_floor
    products, information = find_most_likely(reading, asked, bias.vector, noise)
    score = pairs.score(products)
    own = np.sqrt(pairs.inverse**2 @ (1.0 / information) @ pairs.anchors**2)
    off = []
    for _ in range(64):
        other = linear.value + linear.value_error * rng.standard_normal(linear.value.shape)
        disturbed = replace(reading, value=other)
        moved = find_most_likely(disturbed, asked, bias.vector, noise)[0]
        off.append(pairs.score(moved) - score)
    error = np.sqrt(own**2 + np.mean(np.square(off), axis=0))
    if rank == "full":
        return _assemble(oracle, linear, bias, score, error, score.size, len(asked))
    for shift in off:
        shift += pairs.score(rng.standard_normal(products.shape) / np.sqrt(information))
    kept = truncate_noise(score, error, off, rank if isinstance(rank, int) else None)
    found = len(kept.singular)
    reason = f"the next singular values are what noise shows ({kept.level:.1e})"
    return _assemble(
        oracle,
        linear,
        bias,
        (kept.left * kept.singular, kept.right) if found else np.zeros_like(score),
        kept.error,
        count_unknowns(len(score), found),
        len(asked),
        (f"Rank {found}: {reason}.",),
        SingleHeadDiagnostics(rank=found, rank_reason=reason, singular_values=kept.singular),
    )


# -- intervals for a tolerance -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Intervals:
    """Bounds that hold for every answer within the tolerance."""

    reading: PairReading
    slack: Float[Array, "d D"]  # by how much the value map may be off
    blur: float  # by how much an answer without the offset may be off

    def of_scores(
        self,
        asked: Sequence[PairAnswers],
        key_bias: Float[Array, " d"],
        bias_slack: Float[Array, " d"],  # by how much probe · key_bias may be off
    ) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
        """Of every score per unit lengths; infinite where the answers bound it nowhere."""
        low = np.full(self.reading.pairs.probes.shape, -np.inf)
        high = -low
        bias = (self.reading.pairs.probes @ key_bias)[:, None]
        for answers, probe, anchor in asked:
            ends = self.of_log_odds(answers, probe, anchor)
            slack = np.abs(probe) * bias_slack[:, None]
            shifted = (ends[0] - probe * bias - slack, ends[1] - probe * bias + slack)
            scores = np.sort(np.array(shifted) / (probe * anchor), axis=0)
            low, high = np.fmax(low, scores[0]), np.fmin(high, scores[1])
        return low, high

    def of_log_odds(
        self, answers: Array, probe: Array, anchor: Array | None = None
    ) -> tuple[Array, Array]:
        """Lengths of the probes, and of the anchors (None: the zero token)."""
        reading, pairs = self.reading, self.reading.pairs
        reach = np.abs(reading.along)  # an answer off by so much in every number is off along it
        blur, swing = self.blur * reach.sum(axis=1), reading.sizes
        swing_blur = np.sum((np.abs(pairs.probes) @ self.slack) * reach, axis=1)
        if anchor is None:
            rest = reading.of_probes(answers)
        else:
            rest = reading.of_pairs(answers, anchor)
            blur = blur[:, None] + anchor * (reach @ (np.abs(pairs.anchors) @ self.slack).T)
            swing, swing_blur = swing[:, None], swing_blur[:, None]
        swing, swing_blur = probe * swing, np.abs(probe) * swing_blur
        certain = np.abs(swing) > swing_blur
        safe = np.where(certain, swing_blur, 0.0)
        ends = [(rest + a * blur) / (swing + b * safe) for a in (-1, 1) for b in (-1, 1)]
        weights = np.clip([np.min(ends, axis=0), np.max(ends, axis=0)], 0.0, 1.0)
        with np.errstate(divide="ignore"):
            low, high = np.log(weights) - np.log1p(-weights)
        return np.where(certain, low, -np.inf), np.where(certain, high, np.inf)


def refuse_unbounded(low: Array, high: Array) -> None:
    if not np.isfinite(low).all() or not np.isfinite(high).all():
        raise NotIdentifiable(
            "at this tolerance some scores are not bounded at all: widen the domain"
        )


def _bound(
    oracle: Oracle,
    linear: NoisyLinear,
    reading: PairReading,
    bias: Bias,
    asked: Sequence[PairAnswers],
    share: float,
) -> Hypothesis:
    """Midpoint and half width that hold for every answer within the tolerance. Pairs whose score
    is too strong to be bounded are asked again with tokens of half the length."""
    intervals, pairs = Intervals(reading, linear.value_error, linear.blur), reading.pairs
    asked = list(asked)
    low, high = intervals.of_scores(asked, bias.vector, bias.slack)
    for _ in range(8):  # lengths at which the scores may be moderate
        unbounded = np.argwhere(~np.isfinite(high - low))
        if not len(unbounded):
            break
        share /= 2.0
        anchor = share * pairs.longest(oracle.spec.domain.radius)
        probe = pairs.probe_lengths(anchor)
        asked.append(_ask_some_pairs(oracle, pairs, unbounded, probe, anchor))
        low, high = intervals.of_scores(asked, bias.vector, bias.slack)
    refuse_unbounded(low, high)
    half = np.abs(pairs.inverse) @ ((high - low) / 2.0) @ np.abs(pairs.anchors)
    score = pairs.score((low + high) / 2.0)
    note = "Errors are bounds, not standard errors: the truth lies within."
    return _assemble(oracle, linear, bias, score, CERTAINTY * half, score.size, len(asked), (note,))


def _ask_some_pairs(
    oracle: Oracle,
    pairs: AlignedPairs,
    chosen: Int[Array, "n 2"],
    probe: Float[Array, "d d"],
    anchor: Float[Array, "d d"],
) -> PairAnswers:
    rows, columns = chosen.T
    found = _ask(oracle, pairs.some_tokens(rows, columns, probe, anchor), "score")
    answers = np.full((*probe.shape, found.shape[1]), np.nan)
    answers[rows, columns] = found
    return PairAnswers(answers, probe, anchor)


# -- the result --------------------------------------------------------------------------------


def _assemble(
    oracle: Oracle,
    linear: NoisyLinear,
    bias: Bias,
    score: Any,
    error: Float[Array, "d d"],
    unknowns: int,
    passes: int,
    notes: tuple[str, ...] = (),
    diagnostics: SingleHeadDiagnostics | None = None,
) -> Hypothesis:
    """The hypothesis; `score` is a matrix or two factors, `error` always a matrix."""
    rigorous = linear.noise.tolerance > 0
    offset_error = linear.blur * (linear.offset != 0) if rigorous else linear.offset_error
    size = float(np.linalg.norm(score[0] @ score[1] if isinstance(score, tuple) else score))
    parts = separate_errors(error) if isinstance(score, tuple) else error
    return assemble(
        linear.scalar,
        Parameters(score, bias.vector, linear.value, linear.offset),
        Parameters(parts, bias.error, linear.value_error, offset_error),
        unknowns=unknowns,
        noise=linear.noise,
        notes=notes,
        diagnostics=replace(
            diagnostics or SingleHeadDiagnostics(),
            precision="stated" if oracle.spec.precision else "measured",
            noise=linear.noise.error_floor,
            passes=passes,
            rigorous=rigorous,
            cramer_rao=float(np.linalg.norm(error)) / size if size else np.inf,
        ),
    )
