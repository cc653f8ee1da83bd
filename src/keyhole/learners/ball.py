"""One head behind additive errors, with tokens in a ball: the design that noise asks for.

Statement.  Answers carry errors that do not scale with them (noise, rounding to decimals, a
            tolerance), tokens have norm at most B. d² + d questions determine the head; every
            further d² + d lower the error as 1/√.
Questions.  [x], [u + x; x] as for a single head, but probes lean towards the value vector,
            u_0 ∝ v̂ and u_i ∝ c v̂ + s q_i: the error of a score is noise / |u · v|, and equal
            overlap would make |u · v| small for all. Lengths are the longest the ball allows, twice
            as much information in |u| as in |x|, signs so that u and x point apart. Repetitions
            use slightly different lengths, so that a rounding step averages out as noise does.
Algebra.    With v from the length-one questions every score h_ij = û_i · score · x̂_j is seen by
            its own questions alone: its likelihood is maximised by Newton steps in one variable,
            and score = U⁻¹ H Ω. At one pass the questions are as many as the unknowns, and this is
            the maximum-likelihood estimate; its covariance is the Cramér–Rao bound.
Errors.     Standard errors from the Fisher information (own noise, and that of v, which all scores
            share); for a stated tolerance, intervals that contain the truth with certainty.
Source.     Theorem 6.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026), whose margin condition (no small entry of v) is not needed here.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.algebra.bases import random_rotation
from keyhole.arrays import Array, Float
from keyhole.errors import NotIdentifiable
from keyhole.learners.base import Learned
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Oracle, Precision
from keyhole.oracles.questions import Questions
from keyhole.probes.precision import decimal_step

LEAN = 0.41  # squared overlap of a leaning probe with v̂: minimises the total error
DITHER = 0.1  # repetitions shorten their tokens by up to this fraction
PROBE_OVER_ANCHOR = np.sqrt(2.0)  # |u| / |x| that maximises |u|²|x|, what an answer tells
SEEN = 5.0  # standard errors from which an offset or a key bias is there
LOOKS = 3  # questions that look for a key bias
RESERVE = 5  # questions of a budget that are left for verification
NEWTON_STEPS = 4
MODERATE_SCORE = 1.5  # root mean square of scores above which shorter tokens tell more
SHORTENINGS, SHORTEN = 8, 0.25  # attempts, and the least factor of one
SHARED_DRAWS = 64  # disturbed value vectors from which the shared error is estimated
CHUNK_ANCHORS = 64  # anchors asked at once
EDGE = 1e-6  # weights are kept this far inside (0, 1) before their logarithm is taken


@dataclass(eq=False)
class _Sums:
    """Normal equations of the scores, one scalar each, and the raw answers behind them."""

    answers: list[Array]  # per pass (d, d): probes by anchors
    probe_length: list[Array]
    anchor_length: list[Array]


class Ball:
    """Measures one scalar head in a ball."""

    def __init__(
        self, oracle: Oracle, rng: np.random.Generator, precision: Precision, passes: int
    ) -> None:
        self.oracle, self.rng, self.precision, self.passes = oracle, rng, precision, passes
        self.width, self.radius = oracle.spec.width, oracle.spec.domain.radius
        self.noise = precision.floor
        self.offset, self.key_bias = 0.0, np.zeros(self.width)
        self.key_bias_error = np.zeros(self.width)
        self.bias_slack = np.zeros(self.width)  # of probe · key_bias, for a tolerance
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

    def _ask(self, tokens: Float[Array, "n l d"], purpose: str) -> Float[Array, " n"]:
        answers = self.oracle.ask(Questions.of(tokens, purpose))
        return np.asarray(answers, dtype=np.float64)

    # -- length one ------------------------------------------------------------------------

    def _measure_offset(self) -> None:
        count = min(self.passes, self.width)
        answers = self._ask(np.zeros((count, 1, self.width)), "offset")
        mean, error = float(answers.mean()), self.noise / np.sqrt(count)
        self.offset_error = error
        if abs(mean) > SEEN * error:
            self.offset = mean
        else:
            self.notes.append(f"No offset was seen above {SEEN * error:.1e}; none is assumed.")

    def _dithered(self, shape: tuple[int, ...], number: int) -> Array:
        """Lengths as a share of the longest: all of it, unless repeating would repeat errors."""
        if number == 0 or self.precision.step == 0 == self.precision.tolerance:
            return np.ones(shape)
        return 1.0 - DITHER * self.rng.random(shape)

    def _measure_value(self) -> None:
        total, weight = np.zeros(self.width), np.zeros(self.width)
        seen: list[Array] = []
        self.value_slack = np.full(self.width, np.inf)
        low, high = np.full(self.width, -np.inf), np.full(self.width, np.inf)
        for number in range(self.passes):
            length = self.radius * self._dithered((self.width,), number)
            answers = self._ask(np.diag(length)[:, None, :], "value")
            seen.append(answers)
            rest = answers - self.offset
            total += length * rest
            weight += length**2
            slack = self._blur / length
            low, high = (
                np.maximum(low, rest / length - slack),
                np.minimum(high, rest / length + slack),
            )
        self._refine_step(decimal_step(np.concatenate(seen)))
        self.value, self.value_error = total / weight, self.noise / np.sqrt(weight)
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
        return CERTAINTY * self.precision.tolerance * (2.0 if self.offset else 1.0)

    def _refine_step(self, step: float) -> None:
        """A rounding step read off one answer is too coarse where that answer ends in zeros."""
        if self.oracle.spec.precision is None and 0 < step < self.precision.step:
            self.precision = replace(self.precision, step=step)
            self.noise = self.precision.floor

    # -- pairs -----------------------------------------------------------------------------

    def _design(self) -> None:
        """Leaning probe directions (rows of `probes`) and random anchors."""
        unit = self.value / np.linalg.norm(self.value)
        rest = np.linalg.qr(np.column_stack([unit, np.eye(self.width)]))[0][:, 1 : self.width].T
        rest = random_rotation(self.rng, self.width - 1) @ rest
        self.probes = np.vstack([unit, np.sqrt(LEAN) * unit + np.sqrt(1.0 - LEAN) * rest])
        self.anchors = random_rotation(self.rng, self.width)
        self.inverse = np.linalg.inv(self.probes)

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
        length = self.radius
        seen = length * self.probes @ self.value
        count = min(LOOKS, self.width)
        answers = self._bias_answers(np.arange(count))
        scores, errors = self._scores(answers - self.offset, seen[:count], self.noise)
        if (np.abs(scores) <= SEEN * errors).all():
            return
        answers = np.concatenate([answers, self._bias_answers(np.arange(count, self.width))])
        scores, errors = self._scores(answers - self.offset, seen, self.noise)
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
            rest = self._ask(tokens, "scale") - self.offset
            rest = rest - anchor[:LOOKS, 0] * (self.anchors[0] @ self.value)
            swing = probe[:LOOKS, 0] * (self.probes[:LOOKS] @ self.value)
            scores, _ = self._scores(rest, swing, self.noise)
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
        self.sums = _Sums([], [], [])
        for number in range(self.passes):
            probe, anchor = self._lengths(number)
            parts = []
            for start in range(0, self.width, CHUNK_ANCHORS):
                rows = slice(start, min(start + CHUNK_ANCHORS, self.width))
                answers = self._ask(self._pair_tokens(rows, probe, anchor), "score")
                parts.append(answers.reshape(-1, self.width).T)
            self.sums.answers.append(np.concatenate(parts, axis=1))
            self.sums.probe_length.append(probe)
            self.sums.anchor_length.append(anchor)

    # -- the estimate ----------------------------------------------------------------------

    def _likelihood(self, value: Array) -> tuple[Array, Array]:
        """Scores per unit lengths that maximise the likelihood given v, and their information."""
        best: Array | None = None
        information = np.zeros((self.width, self.width))
        for _ in range(NEWTON_STEPS):
            slope_sum, information = np.zeros_like(information), np.zeros_like(information)
            for answers, probe, anchor in self._passes():
                rest = answers - self.offset - anchor * (self.anchors @ value)
                swing = probe * (self.probes @ value)[:, None]
                bias = probe * (self.probes @ self.key_bias)[:, None]
                if best is None:
                    score, error = self._scores(rest, swing, 1.0)
                    weight = (probe * anchor / error) ** 2
                    slope_sum += weight * (score - bias) / (probe * anchor)
                    information += weight
                    continue
                share = 1.0 / (1.0 + np.exp(-(best * probe * anchor + bias)))
                slope = share * (1.0 - share) * swing * probe * anchor
                slope_sum += slope * (rest - share * swing)
                information += slope**2
            best = slope_sum / information + (0.0 if best is None else best)
        return np.asarray(best), information / self.noise**2

    def _passes(self) -> list[tuple[Array, Array, Array]]:
        sums = self.sums
        return list(zip(sums.answers, sums.probe_length, sums.anchor_length, strict=True))

    def _score_from(self, products: Array) -> Array:
        return self.inverse @ products @ self.anchors

    def _estimate(self) -> Learned:
        products, information = self._likelihood(self.value)
        score = self._score_from(products)
        if self.precision.tolerance > 0:
            return self._learned(*self._intervals(), products.size)
        own = np.sqrt(self.inverse**2 @ (1.0 / information) @ self.anchors**2)
        shared = np.zeros_like(own)
        for _ in range(SHARED_DRAWS):  # all scores share the error of v
            other = self.value + self.value_error * self.rng.standard_normal(self.width)
            shared += (self._score_from(self._likelihood(other)[0]) - score) ** 2 / SHARED_DRAWS
        return self._learned(score, np.sqrt(own**2 + shared), products.size)

    def _intervals(self) -> tuple[Array, Array]:
        """Midpoint and half width that hold for every answer within the tolerance."""
        low = np.full((self.width, self.width), -np.inf)
        high = -low
        bias = (self.probes @ self.key_bias)[:, None]
        for answers, probe, anchor in self._passes():
            ends = self._between(answers, probe, anchor)
            slack = np.abs(probe) * self.bias_slack[:, None]
            shifted = (ends[0] - probe * bias - slack, ends[1] - probe * bias + slack)
            scores = np.sort(np.array(shifted) / (probe * anchor), axis=0)
            low, high = np.maximum(low, scores[0]), np.minimum(high, scores[1])
        _refuse_unbounded(low, high)
        half = np.abs(self.inverse) @ ((high - low) / 2.0) @ np.abs(self.anchors)
        return self._score_from((low + high) / 2.0), half * CERTAINTY

    def _between(
        self, answers: Array, probe: Array, anchor: Array | None = None
    ) -> tuple[Array, Array]:
        """Bounds of the log-odds that hold for every answer within the tolerance; infinite where
        there is none. Lengths of the probes, and of the anchors (None: the zero token)."""
        slack = self.value_slack
        blur: Array | float = self._blur
        rest, swing = answers - self.offset, self.probes @ self.value
        swing_blur = np.abs(self.probes) @ slack
        if anchor is not None:
            rest = rest - anchor * (self.anchors @ self.value)
            blur = blur + anchor * (np.abs(self.anchors) @ slack)
            swing, swing_blur = swing[:, None], swing_blur[:, None]
        swing, swing_blur = probe * swing, np.abs(probe) * swing_blur
        certain = np.abs(swing) > swing_blur
        safe = np.where(certain, swing_blur, 0.0)
        ends = [(rest + a * blur) / (swing + b * safe) for a in (-1, 1) for b in (-1, 1)]
        weights = np.clip([np.min(ends, axis=0), np.max(ends, axis=0)], 0.0, 1.0)
        with np.errstate(divide="ignore"):
            low, high = np.log(weights) - np.log1p(-weights)
        return np.where(certain, low, -np.inf), np.where(certain, high, np.inf)

    def _learned(self, score: Array, error: Array, unknowns: int) -> Learned:
        rigorous = self.precision.tolerance > 0
        if rigorous:
            self.notes.append("Errors are bounds, not standard errors: the truth lies within.")
        value_error = self.value_slack if rigorous else self.value_error
        model = Attention([Head(score, self.key_bias, self.value)], self.offset)
        offset_error = getattr(self, "offset_error", 0.0) if self.offset else 0.0
        offset_error = self._blur if rigorous and self.offset else offset_error
        errors = Attention([Head(error, self.key_bias_error, value_error)], offset_error)
        floor = unknowns + self.width + (1 if self.offset else 0)
        floor += self.width if self.key_bias.any() else 0
        relative = float(np.linalg.norm(error) / np.linalg.norm(score))
        return Learned(
            model,
            errors,
            floor=float(floor),
            notes=tuple(self.notes),
            precision=self.precision,
            details={
                "precision": "stated" if self.oracle.spec.precision else "measured",
                "noise": self.noise,
                "passes": self.passes,
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
