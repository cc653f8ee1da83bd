"""What is certain of scores where every answer may be off by up to a stated tolerance."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import NotIdentifiable
from keyhole.learners.single_head.leaning_pairs import Asked, PairReading

CERTAINTY = 1.0 + 1e-9  # rounding of our own arithmetic on intervals


@dataclass(frozen=True, eq=False)
class Intervals:
    """Bounds that hold for every answer within the tolerance."""

    reading: PairReading
    slack: Float[Array, "d D"]  # by how much the value map may be off
    blur: float  # by how much an answer without the offset may be off

    def of_scores(
        self,
        asked: Sequence[Asked],
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
