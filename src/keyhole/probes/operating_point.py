"""How long probe tokens and anchors should be.

Only the product of the two lengths enters the score, so probes are made long and anchors short:
the anchor's own value and the offset, which are subtracted from the answer, then cost no digits.

A key bias fixes the probes' length along itself (their score against any anchor holds
probe · key_bias, which must stay of order one), but not across: probes are stretched across the
key bias by STRETCH at most, as far as the error of the key bias itself allows.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.algebra.bases import Basis
from keyhole.arrays import Array, Float, Int, digest
from keyhole.probes.log_odds import TARGET_SPREAD, ProbeSet
from keyhole.probes.values import LinearPart

IMBALANCE = 2.0**20  # probe length over anchor length where both are free
OFFSET_MARGIN = 2.0**20  # probe value over offset where the length is free
STRETCH = 2.0**10  # limit of the stretch across a key bias
BIAS_ERROR = 8.0  # error of probe · key_bias in roundoffs: what the stretch multiplies


@dataclass(frozen=True, eq=False)
class Stretched:
    """A basis whose members are scaled by `along` in the direction `axis`, `across` elsewhere."""

    basis: Basis
    across: float
    along: float
    axis: Float[Array, " d"]  # unit vector, or zero where there is no axis

    @property
    def width(self) -> int:
        return self.basis.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        return self._stretch(self.basis.rows(index), self.across, self.along)

    def solve(self, products: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """q with rows @ q = product, for each product."""
        return self._stretch(self.basis.combine(products), 1 / self.across, 1 / self.along)

    def solve_errors(self, errors: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Standard errors of `solve` for independent errors of the products."""
        return np.sqrt(self.basis.combine_squared(errors**2)) / min(self.across, self.along)

    def _stretch(self, vectors: Array, across: float, along: float) -> Array:
        if not self.axis.any():
            return across * vectors
        part = vectors @ self.axis
        return across * vectors + np.outer((along - across) * part, self.axis)

    def digest(self) -> bytes:
        return digest(self.basis.digest(), np.array([self.across, self.along]), self.axis)


def probe_set(
    probes: Stretched, linear: LinearPart, group: int, key_bias: Float[Array, " d"]
) -> ProbeSet:
    """All members of the basis as probes; their values computed without forming them at once."""
    axis, value = probes.axis, linear.value
    stretched = probes.across * value + np.outer(
        (probes.along - probes.across) * axis, axis @ value
    )
    width = probes.width
    values = probes.basis.coordinates(np.ascontiguousarray(stretched.T)).T
    along = probes.along if axis.any() else probes.across
    bias = along * probes.basis.coordinates(key_bias[None])[0]
    return ProbeSet(probes, width, min(group, width), np.ascontiguousarray(values), bias)


def free_lengths(
    product: float, linear: LinearPart, overlap: float, longest: float
) -> tuple[float, float]:
    """Lengths (probe, anchor) with the given product, where there is no key bias.

    `overlap` is the value of a probe of length one.
    """
    offset = float(np.linalg.norm(linear.offset))
    probe = max(np.sqrt(product * IMBALANCE), OFFSET_MARGIN * offset / overlap)
    probe = min(probe, longest)
    return float(probe), float(min(product / probe, longest))


def stretch(
    along: float, anchor: float, linear: LinearPart, overlap: float, longest: float
) -> float:
    """Length across the key bias, given the length along it and the anchor length that goes
    with an unstretched probe. The stretch shortens the anchors and lengthens the probes, so that
    the anchors' value and the offset cost fewer digits, but multiplies the error of the key bias:
    the two are balanced."""
    offset = float(np.linalg.norm(linear.offset)) / (along * overlap)
    bias_error = BIAS_ERROR + 2.0 * np.sqrt(offset)  # see the carrier in probes/key_bias
    anchor_share = anchor / (along * bias_error)
    factor = max(np.sqrt(offset / bias_error), np.sqrt(anchor_share / 2.0), np.cbrt(anchor_share))
    return min(along * float(np.clip(factor, 1.0, STRETCH)), longest)


def bias_length(size: float, width: int, longest: float) -> float:
    """Probe length that puts probe · key_bias at the target spread, |key_bias| = size."""
    return min(TARGET_SPREAD * np.sqrt(width) / size, longest)
