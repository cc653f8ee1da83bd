"""One head behind additive errors, with tokens in a ball: the design that noise asks for.

Statement.  Answers carry errors that do not scale with them (noise, rounding to decimals, a
            tolerance), tokens have norm at most B. d² + d queries determine the head; every
            further d² + d lower the error as 1/√.
Queries.  [x], [u + x; x] as for a single head, but probes lean towards the value map
            (leaning_pairs). Repetitions use slightly different lengths, so that a rounding
            step averages out as noise does.
Algebra.    With v from the length-one queries, every score û_i · score · x̂_j has a most likely
            value of its own (bounded_noise_likelihood), and score = U⁻¹ H Ω. A score of low rank
            is the estimate without the singular values that noise alone explains.
Errors.     Standard errors from the Fisher information (own noise, and that of v, which all scores
            share); for a stated tolerance, intervals that contain the truth with certainty
            (learners/single_head/bounded_noise_intervals).
Source.     Theorem 6.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Anchors" (2026), whose margin condition (no small entry of v) is not needed here.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import NotIdentifiable
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head.bounded_noise_intervals import (
    CERTAINTY,
    Intervals,
    refuse_unbounded,
)
from keyhole.learners.single_head.bounded_noise_likelihood import most_likely
from keyhole.learners.single_head.leaning_pairs import (
    Asked,
    LeaningPairs,
    PairReading,
    log_odds,
    seen_along,
)
from keyhole.learners.single_head.one_head import floor, shaped_head
from keyhole.linalg.truncation import separated, without_noise
from keyhole.measurement.noise import decimal_step
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

DITHER = 0.1  # repetitions shorten their tokens by up to this fraction
SEEN = 5.0  # standard errors from which an offset or a key bias is there
LOOKS = 3  # queries that look for a key bias
RESERVE = 5  # queries of a budget that are left for verification
MODERATE_SCORE = 1.5  # root mean square of scores above which shorter tokens tell more
SHORTENINGS, SHORTEN = 8, 0.25  # attempts, and the least factor of one
SHORTER = 0.5  # factor of the lengths where a tolerance leaves a score unbounded
SHARED_DRAWS = 64  # disturbed value vectors from which the shared error is estimated
CHUNK_ANCHORS = 64  # anchors asked at once


class Ball:
    """Measures one head in a ball."""

    def __init__(
        self,
        oracle: Oracle,
        rng: np.random.Generator,
        precision: NoiseModel,
        passes: int,
        rank: int | Literal["full", "unknown"] = "full",
    ) -> None:
        self.oracle, self.rng, self.precision, self.passes = oracle, rng, precision, passes
        self.rank, self.scalar = rank, True
        self.width, self.radius = oracle.spec.width, oracle.spec.domain.radius
        self.noise = precision.error_floor
        self.offset, self.key_bias = np.zeros(1), np.zeros(self.width)
        self.offset_error = np.zeros(1)
        self.key_bias_error = np.zeros(self.width)
        self.bias_slack = np.zeros(self.width)  # of probe · key_bias, for a tolerance
        self.asked: list[Asked] = []  # one for every pass
        self.notes: list[str] = []
        self.share = 1.0  # of the longest lengths: less where the scores would be large

    def run(self, thrifty: bool) -> Hypothesis:
        """All queries, then the estimate; `thrifty`: no query beyond the unknowns."""
        if not thrifty:
            self._measure_offset()
        self._measure_value()
        self.pairs = LeaningPairs.towards(self.value, self.scalar, self.rng)
        self.reading = PairReading(self.pairs, self.value, self.offset)
        if not thrifty:
            self._measure_key_bias()
            self._find_scale()
        self._ask_scores()
        return self._estimate()

    def _ask(self, tokens: Float[Array, "n l d"], purpose: str) -> Float[Array, "n D"]:
        answers = self.oracle.ask(QueryBatch.of(tokens, purpose))
        self.scalar = answers.ndim == 1
        return np.asarray(answers, dtype=np.float64).reshape(len(tokens), -1)

    # -- length one ------------------------------------------------------------------------

    def _measure_offset(self) -> None:
        count = min(self.passes, self.width)
        answers = self._ask(np.zeros((count, 1, self.width)), "offset")
        mean, error = answers.mean(axis=0), float(self.noise / np.sqrt(count))
        self.offset = np.where(np.abs(mean) > SEEN * error, mean, 0.0)
        self.offset_error = np.where(self.offset != 0, error, 0.0)
        if not self.offset.any():
            self.notes.append(f"No offset was seen above {SEEN * error:.1e}; none is assumed.")

    def _dithered(self, shape: tuple[int, ...], number: int) -> Array:
        """Lengths as a share of the longest: all of it, unless repeating would repeat errors."""
        if number == 0 or self.precision.step == 0 == self.precision.tolerance:
            return np.ones(shape)
        return 1.0 - DITHER * self.rng.random(shape)

    def _measure_value(self) -> None:
        weight, seen = np.zeros((self.width, 1)), []
        total: Any = 0.0
        low: Any = -np.inf
        high: Any = np.inf
        for number in range(self.passes):
            length = self.radius * self._dithered((self.width, 1), number)
            answers = self._ask(np.diag(length[:, 0])[:, None, :], "value")
            seen.append(answers)
            rest = answers - self.offset
            total = total + length * rest
            weight += length**2
            slack = self._blur / length
            low = np.maximum(low, rest / length - slack)
            high = np.minimum(high, rest / length + slack)
        outputs = seen[0].shape[1:]  # known at last, where no offset was measured
        self.offset = np.broadcast_to(self.offset, outputs)
        self.offset_error = np.broadcast_to(self.offset_error, outputs)
        self._refine_step(decimal_step(np.concatenate(seen)))
        self.value = np.asarray(total / weight)
        self.value_error = np.broadcast_to(self.noise / np.sqrt(weight), self.value.shape)
        if self.precision.tolerance > 0:
            self.value, self.value_slack = (low + high) / 2.0, (high - low) / 2.0
        if np.linalg.norm(self.value) <= SEEN * np.linalg.norm(self.value_error):
            raise NotIdentifiable(
                "the value vector cannot be told from zero at this noise, so nothing of the score "
                "matrix can be seen; ask for a larger budget or a wider domain"
            )

    @property
    def _blur(self) -> float:
        """By how much an answer without the offset may be off: the offset is an answer too."""
        return CERTAINTY * self.precision.tolerance * (2.0 if self.offset.any() else 1.0)

    def _refine_step(self, step: float) -> None:
        """A rounding step read off one answer is too coarse where that answer ends in zeros."""
        if self.oracle.spec.precision is None and 0 < step < self.precision.step:
            self.precision = replace(self.precision, step=step)
            self.noise = self.precision.error_floor

    # -- pairs -----------------------------------------------------------------------------

    def _lengths(self, number: int) -> tuple[Array, Array]:
        """Signed probe lengths and anchor lengths for every pair, inside the ball."""
        longest = self.pairs.longest(self.radius)
        anchor = self.share * (longest * self._dithered(longest.shape, number))
        return self.pairs.probe_lengths(anchor), anchor

    def _measure_key_bias(self) -> None:
        length, count = self.radius, min(LOOKS, self.width)
        reading, inverse = self.reading, self.pairs.inverse
        answers = self._bias_answers(slice(count))
        swing = length * reading.sizes
        scores, errors = log_odds(reading.of_probes(answers), swing[:count], self.noise)
        if (np.abs(scores) <= SEEN * errors).all():
            return
        answers = np.concatenate([answers, self._bias_answers(slice(count, self.width))])
        if self.precision.tolerance > 0:
            low, high = self._intervals.of_log_odds(answers, np.full(self.width, length))
            refuse_unbounded(low, high)
            scores, self.bias_slack = (low + high) / 2.0, (high - low) / (2.0 * length)
            self.key_bias_error = np.abs(inverse) @ self.bias_slack
        else:
            scores, errors = log_odds(reading.of_probes(answers), swing, self.noise)
            self.key_bias_error = np.sqrt(inverse**2 @ errors**2) / length
        self.key_bias = inverse @ scores / length

    def _bias_answers(self, which: slice) -> Array:
        probes = self.pairs.probes[which]
        tokens = np.zeros((len(probes), 2, self.width))
        tokens[:, 0] = self.radius * probes
        return self._ask(tokens, "key bias")

    def _find_scale(self) -> None:
        """Shortens all lengths until the scores of a few pairs are moderate."""
        for _ in range(SHORTENINGS):
            probe, anchor = self._lengths(0)
            tokens = self.pairs.tokens(slice(0, 1), probe, anchor)[:LOOKS]
            along, sizes = seen_along(self.pairs.probes[:LOOKS], self.value)
            rest = self._ask(tokens, "scale") - self.offset
            rest = rest - np.outer(anchor[:LOOKS, 0], self.pairs.anchors[0] @ self.value)
            swing = probe[:LOOKS, 0] * sizes
            scores, _ = log_odds(np.sum(rest * along, axis=1), swing, self.noise)
            size = float(np.sqrt(np.mean(scores**2)))
            if size <= MODERATE_SCORE:
                return
            self.share *= max(SHORTEN, float(np.sqrt(MODERATE_SCORE / size)))

    def _ask_scores(self) -> None:
        for number in range(self.passes):
            left = self.oracle.remaining
            if number and left is not None and left < self.width**2 + RESERVE:
                return  # a key bias, or shorter lengths, cost more than was planned
            probe, anchor = self._lengths(number)
            parts = []
            for start in range(0, self.width, CHUNK_ANCHORS):
                rows = slice(start, min(start + CHUNK_ANCHORS, self.width))
                answers = self._ask(self.pairs.tokens(rows, probe, anchor), "score")
                shape = (-1, self.width, answers.shape[1])
                parts.append(answers.reshape(shape).transpose(1, 0, 2))
            self.asked.append(Asked(np.concatenate(parts, axis=1), probe, anchor))

    # -- the estimate ----------------------------------------------------------------------

    def _estimate(self) -> Hypothesis:
        if self.precision.tolerance > 0:
            return self._learned(*self._bounded(), self.width**2)
        pairs, key_bias, noise = self.pairs, self.key_bias, self.noise
        products, information = most_likely(self.reading, self.asked, key_bias, noise)
        score = pairs.score(products)
        own = np.sqrt(pairs.inverse**2 @ (1.0 / information) @ pairs.anchors**2)
        off = []
        for _ in range(SHARED_DRAWS):  # all scores share the error of v
            other = self.value + self.value_error * self.rng.standard_normal(self.value.shape)
            reading = replace(self.reading, value=other)
            off.append(pairs.score(most_likely(reading, self.asked, key_bias, noise)[0]) - score)
        error = np.sqrt(own**2 + np.mean(np.square(off), axis=0))
        if self.rank == "full":
            return self._learned(score, error, products.size)
        for shift in off:
            shift += pairs.score(self.rng.standard_normal(products.shape) / np.sqrt(information))
        return self._of_low_rank(score, error, off)

    def _of_low_rank(self, score: Array, error: Array, off: list[Array]) -> Hypothesis:
        rank = self.rank if isinstance(self.rank, int) else None
        kept = without_noise(score, error, off, rank)
        found = len(kept.singular)
        learned = self._learned(
            (kept.left * kept.singular, kept.right) if found else np.zeros_like(score),
            kept.error,
            2 * found * self.width - found * found,
        )
        reason = f"the next singular values are what noise shows ({kept.level:.1e})"
        details = {"rank": found, "rank_reason": reason, "singular_values": kept.singular}
        notes = (*learned.notes, f"Rank {found}: {reason}.")
        return replace(learned, notes=notes, details={**learned.details, **details})

    @property
    def _intervals(self) -> Intervals:
        return Intervals(self.reading, self.value_slack, self._blur)

    def _bounded(self) -> tuple[Array, Array]:
        """Midpoint and half width that hold for every answer within the tolerance."""
        intervals, share = self._intervals, SHORTER
        low, high = intervals.of_scores(self.asked, self.key_bias, self.bias_slack)
        for _ in range(SHORTENINGS):
            unbounded = np.argwhere(~np.isfinite(high - low))
            if not len(unbounded):
                break
            self._ask_again(unbounded, share)
            low, high = intervals.of_scores(self.asked, self.key_bias, self.bias_slack)
            share *= SHORTER
        refuse_unbounded(low, high)
        half = np.abs(self.pairs.inverse) @ ((high - low) / 2.0) @ np.abs(self.pairs.anchors)
        return self.pairs.score((low + high) / 2.0), half * CERTAINTY

    def _ask_again(self, unbounded: Int[Array, "n 2"], share: float) -> None:
        """Pairs whose score was too strong to be bounded, with shorter tokens."""
        probe, anchor = (share * lengths for lengths in self._lengths(0))
        rows, columns = unbounded.T
        answers = np.full((self.width, self.width, self.offset.size), np.nan)
        tokens = self.pairs.some_tokens(rows, columns, probe, anchor)
        answers[rows, columns] = self._ask(tokens, "score")
        self.asked.append(Asked(answers, probe, anchor))

    def _learned(self, score: Any, error: Array, unknowns: int) -> Hypothesis:
        rigorous = self.precision.tolerance > 0
        if rigorous:
            self.notes.append("Errors are bounds, not standard errors: the truth lies within.")
        value_error = self.value_slack if rigorous else np.array(self.value_error)
        offset_error = self._blur * (self.offset != 0) if rigorous else self.offset_error
        model = shaped_head(self.scalar, score, self.key_bias, self.value, self.offset)
        size = float(np.linalg.norm(model.heads[0].score))
        relative = float(np.linalg.norm(error)) / size if size else np.inf
        parts = separated(error) if isinstance(score, tuple) else error
        errors = shaped_head(self.scalar, parts, self.key_bias_error, value_error, offset_error)
        return Hypothesis(
            model,
            errors,
            floor=floor(model, unknowns),
            notes=tuple(self.notes),
            noise=self.precision,
            details={
                "precision": "stated" if self.oracle.spec.precision else "measured",
                "noise": self.noise,
                "passes": len(self.asked),
                "rigorous": rigorous,
                "cramer_rao": relative,
            },
        )
