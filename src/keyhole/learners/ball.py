"""One head behind additive errors, with tokens in a ball: the design that noise asks for.

Statement.  Answers carry errors that do not scale with them (noise, rounding to decimals, a
            tolerance), tokens have norm at most B. d² + d questions determine the head; every
            further d² + d lower the error as 1/√.
Questions.  [x], [u + x; x] as for a single head, but probes lean towards the value vector (of a
            vector box: to where its value map is largest), u_0 ∝ v̂ and u_i ∝ c v̂ + s q_i: the
            error of a score is noise / |u · v|, and equal overlap would make |u · v| small for
            all. Lengths are the longest the ball allows, twice
            as much information in |u| as in |x|, signs so that u and x point apart. Repetitions
            use slightly different lengths, so that a rounding step averages out as noise does.
Algebra.    With v from the length-one questions every score h_ij = û_i · score · x̂_j is seen by
            its own questions alone: its likelihood is maximised by Newton steps in one variable,
            and score = U⁻¹ H Ω. At one pass the questions are as many as the unknowns, and this is
            the maximum-likelihood estimate; its covariance is the Cramér–Rao bound. Vector answers
            are read along u · value, which holds all they tell about a score. A score of low rank
            is the estimate without the singular values that noise alone explains.
Errors.     Standard errors from the Fisher information (own noise, and that of v, which all scores
            share); for a stated tolerance, intervals that contain the truth with certainty.
Source.     Theorem 6.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026), whose margin condition (no small entry of v) is not needed here.
"""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
from scipy.special import expit

from keyhole.algebra.bases import random_rotation
from keyhole.algebra.truncation import separated, without_noise
from keyhole.arrays import Array, Float, Int
from keyhole.errors import IllConditioned, KeyholeError, NotIdentifiable, WrongFamily
from keyhole.learners.base import Learned
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Oracle, Precision
from keyhole.oracles.questions import Questions
from keyhole.probes.precision import decimal_step

LEANS = (0.41, 0.0, 0.1, 0.2, 0.3)  # squared overlap of a probe with v̂: the one with the least
# total error is taken, the first for a scalar box
DITHER = 0.1  # repetitions shorten their tokens by up to this fraction
PROBE_OVER_ANCHOR = np.sqrt(2.0)  # |u| / |x| that maximises |u|²|x|, what an answer tells
SEEN = 5.0  # standard errors from which an offset or a key bias is there
LOOKS = 3  # questions that look for a key bias
RESERVE = 5  # questions of a budget that are left for verification
NEWTON_STEPS = 4
MODERATE_SCORE = 1.5  # root mean square of scores above which shorter tokens tell more
SHORTENINGS, SHORTEN = 8, 0.25  # attempts, and the least factor of one
SHORTER = 0.5  # factor of the lengths where a tolerance leaves a score unbounded
SHARED_DRAWS = 64  # disturbed value vectors from which the shared error is estimated
CHUNK_ANCHORS = 64  # anchors asked at once
IMPOSSIBLE = 10.0  # standard errors by which an answer is beyond what any weight gives
EDGE = 1e-6  # weights are kept this far inside (0, 1) before their logarithm is taken


class Ball:
    """Measures one scalar head in a ball."""

    def __init__(
        self,
        oracle: Oracle,
        rng: np.random.Generator,
        precision: Precision,
        passes: int,
        rank: int | Literal["full", "unknown"] = "full",
    ) -> None:
        self.oracle, self.rng, self.precision, self.passes = oracle, rng, precision, passes
        self.rank, self.scalar = rank, True
        self.width, self.radius = oracle.spec.width, oracle.spec.domain.radius
        self.noise = precision.floor
        self.offset, self.key_bias = np.zeros(1), np.zeros(self.width)
        self.offset_error = np.zeros(1)
        self.key_bias_error = np.zeros(self.width)
        self.bias_slack = np.zeros(self.width)  # of probe · key_bias, for a tolerance
        # per pass: answers (d, d, D), probes by anchors, and the lengths of both (d, d)
        self.asked: list[tuple[Array, Array, Array]] = []
        self.notes: list[str] = []
        self.share = 1.0  # of the longest lengths: less where the scores would be large

    def run(self, thrifty: bool) -> Learned:
        """All questions, then the estimate; `thrifty`: no question beyond the unknowns."""
        if not thrifty:
            self._measure_offset()
        self._measure_value()
        self._design()
        if not thrifty:
            self._measure_key_bias()
            self._find_scale()
        self._ask_scores()
        return self._estimate()

    def _ask(self, tokens: Float[Array, "n l d"], purpose: str) -> Float[Array, "n D"]:
        answers = self.oracle.ask(Questions.of(tokens, purpose))
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
            self.noise = self.precision.floor

    # -- pairs -----------------------------------------------------------------------------

    def _design(self) -> None:
        """Leaning probe directions (rows of `probes`) and random anchors."""
        unit = np.linalg.svd(self.value)[0][:, 0]
        rest = np.linalg.qr(np.column_stack([unit, np.eye(self.width)]))[0][:, 1 : self.width].T
        rest = random_rotation(self.rng, self.width - 1) @ rest
        leaning = [
            np.vstack([unit, np.sqrt(lean) * unit + np.sqrt(1.0 - lean) * rest])
            for lean in (LEANS[:1] if self.scalar else LEANS)
        ]
        self.probes = min(leaning, key=self._total_error)
        self.anchors = random_rotation(self.rng, self.width)
        self.inverse = np.linalg.inv(self.probes)

    def _total_error(self, probes: Float[Array, "d d"]) -> float:
        """Of all scores, measured with these probes, in some unit."""
        visible = np.maximum(self._seen(probes, self.value)[1], np.finfo(float).tiny)
        return float(np.sum((np.linalg.inv(probes) / visible) ** 2))

    @staticmethod
    def _seen(
        probes: Float[Array, "n d"], value: Float[Array, "d D"]
    ) -> tuple[Float[Array, "n D"], Float[Array, " n"]]:
        """Unit directions of the answers along which the probes are seen, and how much of them."""
        along = probes @ value
        sizes = np.linalg.norm(along, axis=1)
        return along / np.maximum(sizes, np.finfo(float).tiny)[:, None], sizes

    def _lengths(self, number: int) -> tuple[Array, Array]:
        """Signed probe lengths and anchor lengths for every pair, inside the ball."""
        cosine = self.probes @ self.anchors.T
        apart = 3.0 - 2.0 * PROBE_OVER_ANCHOR * np.abs(cosine)
        anchor = (
            self.radius / np.sqrt(np.maximum(apart, 1.0)) * self._dithered(cosine.shape, number)
        )
        anchor = self.share * anchor
        sign = np.where(cosine > 0, -1.0, 1.0)
        return sign * PROBE_OVER_ANCHOR * anchor, anchor

    def _pair_tokens(self, rows: slice, probe: Array, anchor: Array) -> Array:
        """Questions of all probes against some anchors, anchors first in order."""
        x = anchor[:, rows].T[:, :, None] * self.anchors[rows][:, None, :]
        u = probe[:, rows].T[:, :, None] * self.probes[None, :, :]
        tokens = np.stack([u + x, x], axis=2)
        return tokens.reshape(-1, 2, self.width)

    def _measure_key_bias(self) -> None:
        length, count = self.radius, min(LOOKS, self.width)
        along, sizes = self._seen(self.probes, self.value)
        answers = self._bias_answers(np.arange(count))
        rest = np.sum((answers - self.offset) * along[:count], axis=1)
        scores, errors = self._scores(rest, length * sizes[:count], self.noise)
        if (np.abs(scores) <= SEEN * errors).all():
            return
        answers = np.concatenate([answers, self._bias_answers(np.arange(count, self.width))])
        rest = np.sum((answers - self.offset) * along, axis=1)
        scores, errors = self._scores(rest, length * sizes, self.noise)
        if self.precision.tolerance > 0:
            low, high = self._between(answers, np.full(self.width, length))
            _refuse_unbounded(low, high)
            scores, self.bias_slack = (low + high) / 2.0, (high - low) / (2.0 * length)
            self.key_bias_error = np.abs(self.inverse) @ self.bias_slack
        else:
            self.key_bias_error = np.sqrt(self.inverse**2 @ errors**2) / length
        self.key_bias = self.inverse @ scores / length

    def _find_scale(self) -> None:
        """Shortens all lengths until the scores of a few pairs are moderate."""
        for _ in range(SHORTENINGS):
            probe, anchor = self._lengths(0)
            tokens = self._pair_tokens(slice(0, 1), probe, anchor)[:LOOKS]
            along, sizes = self._seen(self.probes[:LOOKS], self.value)
            rest = self._ask(tokens, "scale") - self.offset
            rest = rest - np.outer(anchor[:LOOKS, 0], self.anchors[0] @ self.value)
            swing = probe[:LOOKS, 0] * sizes
            scores, _ = self._scores(np.sum(rest * along, axis=1), swing, self.noise)
            size = float(np.sqrt(np.mean(scores**2)))
            if size <= MODERATE_SCORE:
                return
            self.share *= max(SHORTEN, float(np.sqrt(MODERATE_SCORE / size)))

    def _bias_answers(self, index: Array) -> Array:
        tokens = np.zeros((len(index), 2, self.width))
        tokens[:, 0] = self.radius * self.probes[index]
        return self._ask(tokens, "key bias")

    @staticmethod
    def _scores(rest: Array, swing: Array, noise: float) -> tuple[Array, Array]:
        weight = np.clip(rest / swing, EDGE, 1.0 - EDGE)
        slope = weight * (1.0 - weight) * np.abs(swing)
        return np.log(weight / (1.0 - weight)), noise / slope

    def _ask_scores(self) -> None:
        for number in range(self.passes):
            left = self.oracle.remaining
            if number and left is not None and left < self.width**2 + RESERVE:
                return  # a key bias, or shorter lengths, cost more than was planned
            probe, anchor = self._lengths(number)
            parts = []
            for start in range(0, self.width, CHUNK_ANCHORS):
                rows = slice(start, min(start + CHUNK_ANCHORS, self.width))
                answers = self._ask(self._pair_tokens(rows, probe, anchor), "score")
                shape = (-1, self.width, answers.shape[1])
                parts.append(answers.reshape(shape).transpose(1, 0, 2))
            self.asked.append((np.concatenate(parts, axis=1), probe, anchor))

    # -- the estimate ----------------------------------------------------------------------

    def _likelihood(self, value: Array) -> tuple[Array, Array]:
        """Scores per unit lengths that maximise the likelihood given v, and their information."""
        best: Array | None = None
        along, sizes = self._seen(self.probes, value)
        information = np.zeros((self.width, self.width))
        for _ in range(NEWTON_STEPS):
            slope_sum, information = np.zeros_like(information), np.zeros_like(information)
            for answers, probe, anchor in self.asked:
                rest = self._read(answers, anchor, value, along)
                swing = probe * sizes[:, None]
                bias = probe * (self.probes @ self.key_bias)[:, None]
                if best is None:
                    score, error = self._scores(rest, swing, 1.0)
                    weight = (probe * anchor / error) ** 2
                    slope_sum += weight * (score - bias) / (probe * anchor)
                    information += weight
                    continue
                share = expit(best * probe * anchor + bias)
                slope = share * (1.0 - share) * swing * probe * anchor
                slope_sum += slope * (rest - share * swing)
                information += slope**2
            if not (information > 0).all():
                raise self._unreadable(value, along, sizes)
            best = slope_sum / information + (0.0 if best is None else best)
        return np.asarray(best), information / self.noise**2

    def _unreadable(self, value: Array, along: Array, sizes: Array) -> KeyholeError:
        """Why some score has no likely value: answers that no weight gives, or noise."""
        for answers, probe, anchor in self.asked:
            rest = np.sign(probe) * self._read(answers, anchor, value, along)
            beyond = np.maximum(-rest, rest - np.abs(probe) * sizes[:, None])
            if beyond.max() > IMPOSSIBLE * self.noise:
                return WrongFamily("no scores of one head explain the answers to pairs")
        return IllConditioned("noise hides the score of some pairs: they need more questions")

    def _read(self, answers: Array, anchor: Array, value: Array, along: Array) -> Array:
        """What answers to pairs tell of the probes: without offset and anchor, along `along`."""
        fixed = (along @ value.T) @ self.anchors.T  # of a unit anchor, read along a probe's
        own = (answers - self.offset) @ along[:, :, None]
        return np.asarray(own[:, :, 0] - anchor * fixed)

    def _score_from(self, products: Array) -> Array:
        return self.inverse @ products @ self.anchors

    def _estimate(self) -> Learned:
        if self.precision.tolerance > 0:
            return self._learned(*self._intervals(), self.width**2)
        products, information = self._likelihood(self.value)
        score = self._score_from(products)
        own = np.sqrt(self.inverse**2 @ (1.0 / information) @ self.anchors**2)
        off = []
        for _ in range(SHARED_DRAWS):  # all scores share the error of v
            other = self.value + self.value_error * self.rng.standard_normal(self.value.shape)
            off.append(self._score_from(self._likelihood(other)[0]) - score)
        error = np.sqrt(own**2 + np.mean(np.square(off), axis=0))
        if self.rank == "full":
            return self._learned(score, error, products.size)
        for shift in off:
            noise = self.rng.standard_normal(products.shape) / np.sqrt(information)
            shift += self._score_from(noise)
        return self._of_low_rank(score, error, off)

    def _of_low_rank(self, score: Array, error: Array, off: list[Array]) -> Learned:
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

    def _intervals(self) -> tuple[Array, Array]:
        """Midpoint and half width that hold for every answer within the tolerance."""
        low, high = self._bounds()
        share = SHORTER
        for _ in range(SHORTENINGS):
            unbounded = np.argwhere(~np.isfinite(high - low))
            if not len(unbounded):
                break
            self._ask_again(unbounded, share)
            low, high = self._bounds()
            share *= SHORTER
        _refuse_unbounded(low, high)
        half = np.abs(self.inverse) @ ((high - low) / 2.0) @ np.abs(self.anchors)
        return self._score_from((low + high) / 2.0), half * CERTAINTY

    def _bounds(self) -> tuple[Array, Array]:
        """Of every score per unit lengths; infinite where the answers so far bound it nowhere."""
        low = np.full((self.width, self.width), -np.inf)
        high = -low
        bias = (self.probes @ self.key_bias)[:, None]
        for answers, probe, anchor in self.asked:
            ends = self._between(answers, probe, anchor)
            slack = np.abs(probe) * self.bias_slack[:, None]
            shifted = (ends[0] - probe * bias - slack, ends[1] - probe * bias + slack)
            scores = np.sort(np.array(shifted) / (probe * anchor), axis=0)
            low, high = np.fmax(low, scores[0]), np.fmin(high, scores[1])
        return low, high

    def _ask_again(self, pairs: Int[Array, "n 2"], share: float) -> None:
        """Pairs whose score was too strong to be bounded, with shorter tokens."""
        probe, anchor = (share * lengths for lengths in self._lengths(0))
        rows, columns = pairs.T
        x = anchor[rows, columns][:, None] * self.anchors[columns]
        u = probe[rows, columns][:, None] * self.probes[rows]
        answers = np.full((self.width, self.width, self.offset.size), np.nan)
        answers[rows, columns] = self._ask(np.stack([u + x, x], axis=1), "score")
        self.asked.append((answers, probe, anchor))

    def _between(
        self, answers: Array, probe: Array, anchor: Array | None = None
    ) -> tuple[Array, Array]:
        """Bounds of the log-odds that hold for every answer within the tolerance; infinite where
        there is none. Lengths of the probes, and of the anchors (None: the zero token)."""
        slack = self.value_slack
        along, sizes = self._seen(self.probes, self.value)
        reach = np.abs(along)  # an answer off by so much in every number is off by that along it
        blur, swing, swing_blur = self._blur * reach.sum(axis=1), sizes, self._blurred(slack, reach)
        if anchor is None:
            rest = np.sum((answers - self.offset) * along, axis=1)
        else:
            rest = self._read(answers, anchor, self.value, along)
            blur = blur[:, None] + anchor * (reach @ (np.abs(self.anchors) @ slack).T)
            swing, swing_blur = swing[:, None], swing_blur[:, None]
        swing, swing_blur = probe * swing, np.abs(probe) * swing_blur
        certain = np.abs(swing) > swing_blur
        safe = np.where(certain, swing_blur, 0.0)
        ends = [(rest + a * blur) / (swing + b * safe) for a in (-1, 1) for b in (-1, 1)]
        weights = np.clip([np.min(ends, axis=0), np.max(ends, axis=0)], 0.0, 1.0)
        with np.errstate(divide="ignore"):
            low, high = np.log(weights) - np.log1p(-weights)
        return np.where(certain, low, -np.inf), np.where(certain, high, np.inf)

    def _blurred(self, slack: Array, reach: Array) -> Array:
        """By how much probe · value may be off along each probe's direction."""
        return np.asarray(np.sum((np.abs(self.probes) @ slack) * reach, axis=1))

    def _shaped(self, value: Array) -> Array:
        return value[:, 0] if self.scalar else value

    def _number(self) -> Array:
        return self.offset.reshape(()) if self.scalar else self.offset

    def _learned(self, score: Any, error: Array, unknowns: int) -> Learned:
        rigorous = self.precision.tolerance > 0
        if rigorous:
            self.notes.append("Errors are bounds, not standard errors: the truth lies within.")
        value_error = self.value_slack if rigorous else np.array(self.value_error)
        offset_error = self._blur * (self.offset != 0) if rigorous else self.offset_error
        model = Attention([Head(score, self.key_bias, self._shaped(self.value))], self._number())
        size = float(np.linalg.norm(model.heads[0].score))
        relative = float(np.linalg.norm(error)) / size if size else np.inf
        parts = separated(error) if isinstance(score, tuple) else error
        errors = Attention(
            [Head(parts, self.key_bias_error, self._shaped(value_error))],
            offset_error.reshape(()) if self.scalar else offset_error,
        )
        floor = unknowns + self.value.size + int(np.count_nonzero(self.offset))
        floor += self.width if self.key_bias.any() else 0
        return Learned(
            model,
            errors,
            floor=floor / self.offset.size,
            notes=tuple(self.notes),
            precision=self.precision,
            details={
                "precision": "stated" if self.oracle.spec.precision else "measured",
                "noise": self.noise,
                "passes": len(self.asked),
                "rigorous": rigorous,
                "cramer_rao": relative,
            },
        )


def _refuse_unbounded(low: Array, high: Array) -> None:
    if not np.isfinite(low).all() or not np.isfinite(high).all():
        raise NotIdentifiable(
            "at this tolerance some scores are not bounded at all: widen the domain"
        )


CERTAINTY = 1.0 + 1e-9  # rounding of our own arithmetic on intervals
