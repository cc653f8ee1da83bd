"""Scores of all heads at one anchor, from answers to soft queries.

Statement.  Tokens x_1 ... x_m, m up to the rank r of the value maps, stand at chosen distances
            before the anchor b, all other places hold copies of b. One answer tells, for every
            head, log w_i - log(1 - sum w): the score of token i minus log L, where L, the sum of
            the exponentials of the scores of all copies, is the same for all queries at these
            places.
Algebra.    y - y([b]) = sum_h sum_i w_hi M_h (x_i - b): the heads are kept apart by their outputs,
            and each gives r equations for its m weights.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, Array, Float, Int
from keyhole.errors import IllConditioned
from keyhole.learners.positions.forward import Answered
from keyhole.learners.positions.values import ValueMaps
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import ROUNDINGS

PURPOSE = "scores"
NEGATIVE = "the value maps explain soft answers by negative weights only"


class Saturated(IllConditioned):
    """A weight is too small, or not positive: tokens must come nearer to the anchor. `negative`:
    by more than rounding, which no weight of these heads is."""

    def __init__(self, message: str, negative: bool = False) -> None:
        super().__init__(message)
        self.negative: bool = negative


@dataclass(frozen=True, eq=False)
class Ratios:
    """Log-ratios of weights and their standard errors, by query, head and token."""

    ratios: Float[Array, "n heads m"]
    errors: Float[Array, "n heads m"]

    def perturb(self, rng: np.random.Generator) -> "Ratios":
        """The same with other rounding."""
        noise = self.errors * rng.standard_normal(self.errors.shape)
        return Ratios(self.ratios + noise, self.errors)

    def round_scores(self) -> "Ratios":
        """The same with standard errors for scores whose waves are rounded to float32."""
        rounding = SINGLE_ROUNDOFF * np.maximum(1.0, np.abs(self.ratios))
        return Ratios(self.ratios, np.hypot(self.errors, rounding))


@dataclass(frozen=True, eq=False)
class Reader:
    """Asks soft queries and turns answers into log-ratios of weights."""

    ask: Asker
    values: ValueMaps
    smallest: float = 1e-9  # weight below which its logarithm has no digits
    answered: list[Answered] = field(default_factory=list)  # short sequences, for a later fit

    def place(
        self, anchor: Array, tokens: Float[Array, "n m d"], distances: Int[Array, " m"]
    ) -> Float[Array, "n length d"]:
        """Sequences in which all other places hold copies of the anchor."""
        length = int(distances.max()) + 1
        placed = np.broadcast_to(anchor, (len(tokens), length, len(anchor))).copy()
        placed[:, length - 1 - distances] = tokens
        return placed

    def keep(
        self,
        anchor: Float[Array, " d"],
        tokens: Float[Array, "n m d"],
        distances: Int[Array, " m"],
        answers: Float[Array, "n D"],
    ) -> None:
        """For a fit to all answers; sequences of many copies say little for what they cost."""
        length, longest = int(distances.max()) + 1, 256
        if length <= longest:
            places = np.arange(length)[::-1].copy()
            errors = self.ask.unit * np.abs(answers).max(axis=1)
            placed = self.place(anchor, tokens, distances)
            lasts = np.full(len(placed), length - 1)
            self.answered.append(Answered(placed, places, answers, errors, lasts))

    def log_ratios(
        self,
        anchor: Float[Array, " d"],
        alone: Float[Array, " D"] | None,
        tokens: Float[Array, "n m d"],
        distances: Int[Array, " m"],
    ) -> "Ratios":
        """log w - log(1 - sum w) of every token; `alone` is the answer to the anchor alone, which
        the value maps tell where it was not asked."""
        anchor, tokens = self.ask.representable(anchor), self.ask.representable(tokens)
        answers = self.ask(self.place(anchor, tokens, distances), PURPOSE)
        self.keep(anchor, tokens, distances, answers)
        noise = self.ask.unit * np.abs(answers).max() + self.ask.additive
        if alone is None:
            alone = self.values.offset + anchor @ self.values.total
            noise += self.values.total_error * float(np.abs(anchor @ self.values.total).max())
        parts = self.values.split(answers - alone)
        ratios = np.empty((len(tokens), self.values.heads, len(distances)))
        errors = np.empty_like(ratios)
        for h, part in enumerate(parts):
            # what the value maps miss is a part of what a head adds
            missed = self.values.error * float(np.sqrt((part**2).mean()))
            for n in range(len(tokens)):
                inverse = np.linalg.pinv(((tokens[n] - anchor) @ self.values.ins[h]).T)
                weights = inverse @ part[n]
                seen = noise * np.linalg.norm(inverse @ self.splits[h], axis=1)
                doubt = np.hypot(seen, missed * np.linalg.norm(inverse, axis=1))
                rest = 1.0 - weights.sum()
                least = np.maximum(self.smallest, 3.0 * np.append(doubt, np.linalg.norm(doubt)))
                if (np.append(weights, rest) < least).any():
                    bounds = ROUNDINGS * np.append(doubt, np.linalg.norm(doubt))
                    negative = bool((np.append(weights, rest) < -bounds).any())
                    raise Saturated("a weight is too small to be read, or not positive", negative)
                ratios[n, h] = np.log(weights) - np.log(rest)
                errors[n, h] = doubt / weights + np.linalg.norm(doubt) / rest
        return Ratios(ratios, errors)

    @property
    def first_size(self) -> float:
        """Length of the first moves that are tried: one where answers have digits to spare, and
        longer, for scores that differ more, where they have fewer. Who saturates takes half."""
        ample = 1e-12  # roundoff that leaves digits to spare
        return float(np.clip((self.ask.unit / ample) ** 0.125, 1.0, 4.0))

    @cached_property
    def splits(self) -> list[Float[Array, "r D"]]:
        """What of an answer belongs to each head, as matrices."""
        inverse = np.linalg.pinv(np.concatenate(self.values.outs).T)
        return np.split(inverse, np.cumsum(self.values.ranks)[:-1])
