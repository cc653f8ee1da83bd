"""Pairs [u + x; x] of bounded tokens, with probes that lean towards the value map.

Queries. Unit probes u_0 ∝ v̂ and u_i ∝ c v̂ + s q_i (of a vector box, v̂ is where its value map is
largest) against orthonormal anchors. The error of a score is noise / |u · v|: equal overlap with v
would make |u · v| small for all. Lengths are the longest the ball allows, twice as much
information in |u| as in |x|, signs so that u and x point apart.

Inversion. An answer without the offset and the anchor is weight · (u · value): read along u · value
it holds all that can be known of the weight, whose log-odds are the score.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.linalg.bases import random_rotation

LEANS = (0.41, 0.0, 0.1, 0.2, 0.3)  # squared overlap of a probe with v̂: the one with the least
# total error is taken, the first for a scalar box
PROBE_OVER_ANCHOR = np.sqrt(2.0)  # |u| / |x| that maximises |u|²|x|, what an answer tells
EDGE = 1e-6  # weights are kept this far inside (0, 1) before their logarithm is taken


class Asked(NamedTuple):
    """All probes against all anchors, once."""

    answers: Float[Array, "d d D"]  # NaN where a pair was left out
    probe: Float[Array, "d d"]  # signed lengths
    anchor: Float[Array, "d d"]  # lengths


@dataclass(frozen=True, eq=False)
class LeaningPairs:
    """Unit probes and orthonormal anchors, both as rows."""

    probes: Float[Array, "d d"]
    anchors: Float[Array, "d d"]

    @classmethod
    def towards(
        cls, value: Float[Array, "d D"], scalar: bool, rng: np.random.Generator
    ) -> "LeaningPairs":
        """Probes that lean as much as is best for this value map, and random anchors."""
        width = len(value)
        unit = np.linalg.svd(value)[0][:, 0]
        rest = np.linalg.qr(np.column_stack([unit, np.eye(width)]))[0][:, 1:width].T
        rest = random_rotation(rng, width - 1) @ rest
        leaning = [
            np.vstack([unit, np.sqrt(lean) * unit + np.sqrt(1.0 - lean) * rest])
            for lean in (LEANS[:1] if scalar else LEANS)
        ]
        probes = min(leaning, key=lambda probes: total_error(probes, value))
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
    """Answers to leaning pairs, read along what each probe moves."""

    pairs: LeaningPairs
    value: Float[Array, "d D"]
    offset: Float[Array, " D"]

    @cached_property
    def _seen(self) -> tuple[Float[Array, "d D"], Float[Array, " d"]]:
        return seen_along(self.pairs.probes, self.value)

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


def seen_along(
    probes: Float[Array, "n d"], value: Float[Array, "d D"]
) -> tuple[Float[Array, "n D"], Float[Array, " n"]]:
    """Unit directions of the answers along which the probes are seen, and how much of them."""
    along = probes @ value
    sizes = np.linalg.norm(along, axis=1)
    return along / np.maximum(sizes, TINY)[:, None], sizes


def total_error(probes: Float[Array, "d d"], value: Float[Array, "d D"]) -> float:
    """Of all scores, measured with these probes, in some unit."""
    visible = np.maximum(seen_along(probes, value)[1], TINY)
    return float(np.sum((np.linalg.inv(probes) / visible) ** 2))


def log_odds(reading: Array, swing: Array, noise: float) -> tuple[Array, Array]:
    """Scores and their errors where a reading is weight · swing + noise."""
    weight = np.clip(reading / swing, EDGE, 1.0 - EDGE)
    slope = weight * (1.0 - weight) * np.abs(swing)
    return np.log(weight / (1.0 - weight)), noise / slope
