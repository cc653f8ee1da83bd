"""Labels of pairs of tokens: "is probe · score · anchor above t?", for any t.

X = [u + x ; x] with u · value > 0 > x · value has a positive label exactly if
u · score x > log(B / A), where B = -x · value and A = (u + x) · value. Multiply u by λ and x by
1/λ: the left side stays, the right side takes every real value. So the threshold is chosen freely,
a root always exists, and each query of a bisection is a full bit of the entry itself.

With unit vectors and s = κ · entry, κ = |u| |x|, an error r of a token's value relative to it moves
the entry by (1 + e^s) r / κ. Hence κ is chosen query by query: as large as the threshold allows
with s at most 1.28 (positive), which minimises (1 + e^s) / s, or 3 (negative), where the token
u + x is 21 times as long as x and more gains little.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from keyhole.arrays import Array, Float, Int, digest
from keyhole.learners.label_only.value_direction import LabelReader
from keyhole.linalg.bases import Basis
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class PairBank:
    """Token 2k is along_k probe_k + across_k anchor_k, token 2k + 1 is across_k anchor_k."""

    probes: Basis
    anchors: Basis
    probe: Int[Array, " n"]
    anchor: Int[Array, " n"]
    along: Float[Array, " n"]
    across: Float[Array, " n"]

    @property
    def width(self) -> int:
        return self.probes.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        k, anchor = np.divmod(index, 2)
        rows = self.across[k][:, None] * self.anchors.rows(self.anchor[k])
        first = k[anchor == 0]
        rows[anchor == 0] += self.along[first][:, None] * self.probes.rows(self.probe[first])
        return rows

    @cached_property
    def _digest(self) -> bytes:
        parts = (self.probe, self.anchor, self.along, self.across)
        return digest(self.probes.digest(), self.anchors.digest(), *parts)

    def digest(self) -> bytes:
        return self._digest


@dataclass(frozen=True, eq=False)
class Thresholds:
    """Threshold queries about probe · score · anchor for all pairs of two orthonormal bases.

    Number i * d + j is the pair (probe i, anchor j); overlaps are their products with the value,
    and a pair is asked with the signs that make them positive and negative.
    """

    reader: LabelReader
    probes: Basis
    anchors: Basis
    probe_overlap: Float[Array, " d"]
    anchor_overlap: Float[Array, " d"]
    spread: float  # typical size of an entry

    @property
    def flips(self) -> Float[Array, " m"]:
        """Sign of the entry as asked relative to probe · score · anchor."""
        return -np.outer(np.sign(self.probe_overlap), np.sign(self.anchor_overlap)).ravel()

    def above(self, index: Int[Array, " n"], at: Float[Array, " n"]) -> Float[Array, " n"]:
        return self.reader.ask(self.queries(index, at))

    def choose_scale(self, at: Float[Array, " n"], ratio: Float[Array, " n"]) -> Float[Array, " n"]:
        """κ for each threshold; `ratio` is |anchor overlap / probe overlap|."""
        with np.errstate(divide="ignore"):
            limit = np.where(at > 0, 1.28, 3.0) / np.abs(at)
        # where the threshold itself does not limit κ, a typical entry has s = 2
        wanted = np.minimum(limit, 2.0 / self.spread)
        if np.isinf(self.reader.size):
            return wanted
        # the largest κ with (|u| + |x|)² = κ (ρ + 2 + 1/ρ) inside the ball, from a safe one up
        square = self.reader.size**2
        low = np.minimum(wanted, square / _square_length(wanted, at, ratio))
        high = np.minimum(wanted, square / 4.0)
        for _ in range(12):  # to a thousandth
            middle = np.sqrt(low * high)
            fits = middle * _square_length(middle, at, ratio) <= square
            low, high = np.where(fits, middle, low), np.where(fits, high, middle)
        return low

    def queries(
        self,
        index: Int[Array, " n"],
        at: Float[Array, " n"],
        *,
        purpose: str = "score",
        shrink: float = 1.0,
        mirror: bool = False,
    ) -> QueryBatch:
        """`shrink` asks the same at another κ; `mirror` with all tokens reversed."""
        probe, anchor = np.divmod(index, self.anchors.width)
        over, under = self.probe_overlap[probe], self.anchor_overlap[anchor]
        ratio = np.abs(under / over)
        scale = self.choose_scale(at, ratio) * shrink
        tilt = _find_ratio(scale, at, ratio)
        turn = -1.0 if mirror else 1.0
        along = turn * np.sign(over) * np.sqrt(scale * tilt)
        across = -turn * np.sign(under) * np.sqrt(scale / tilt)
        bank = PairBank(self.probes, self.anchors, probe, anchor, along, across)
        pairs = np.arange(2 * len(index), dtype=np.int64).reshape(-1, 2)
        return QueryBatch(bank, pairs, purpose)

    def amplification(self, index: Int[Array, " n"], at: Float[Array, " n"]) -> Array:
        """What an error of a token's value, relative to that value, does to the entry."""
        probe, anchor = np.divmod(index, self.anchors.width)
        ratio = np.abs(self.anchor_overlap[anchor] / self.probe_overlap[probe])
        scale = self.choose_scale(at, ratio)
        return (1.0 + np.exp(scale * at)) / scale


def _find_ratio(scale: Array, at: Array, ratio: Array) -> Array:
    """ρ = |u| / |x| that puts the threshold at `at`."""
    return np.asarray(ratio * (1.0 + np.exp(-scale * at)))


def _square_length(scale: Array, at: Array, ratio: Array) -> Array:
    """(|u| + |x|)² / κ, and no less than at any smaller κ."""
    longest = np.maximum(_find_ratio(scale, at, ratio), 2.0 * ratio)
    shortest = np.minimum(_find_ratio(scale, at, ratio), ratio)
    return np.asarray(np.maximum(longest + 1.0 / longest, shortest + 1.0 / shortest) + 2.0)
