"""How long probe tokens and anchors should be.

Only the product of the two lengths enters the score, so probes are made long and anchors short:
the anchor's own value and the offset, which are subtracted from the answer, then cost no digits.

A key bias fixes the probes' length along itself (their score against any anchor holds
probe · key_bias, which must stay of order one), but not across: probes are stretched across the
key bias by STRETCH at most, as far as the error of the key bias itself allows.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int, digest
from keyhole.linalg.bases import Basis, KroneckerBasis
from keyhole.measurement.linear_response import LinearPart
from keyhole.measurement.log_odds import TARGET_SPREAD, ProbeSet
from keyhole.oracles.queries import TokenBank

IMBALANCE = 2.0**20  # probe length over anchor length where both are free
COARSEST = 2.0**-4  # the same in units of 1 / roundoff: short formats have a short range
NOISE_MARGIN = 2.0**40  # probe value over additive errors where the length is free
OFFSET_MARGIN = 2.0**20  # probe value over offset where the length is free
STRETCH = 2.0**10  # limit of the stretch across a key bias
BIAS_ERROR = 8.0  # error of probe · key_bias in roundoffs, where it is computed
MEASURED_BIAS_ERROR = 2.0  # and where it is measured with the probes themselves


@dataclass(frozen=True, eq=False)
class Shape:
    """A symmetric map that evens out what probes read of a value map with uneven singular values:
    weak directions get longer probes, by the square root of what they lack."""

    matrix: Float[Array, "d d"]
    inverse: Float[Array, "d d"]


def evening(left: Float[Array, "d k"], singular: Float[Array, " k"]) -> Shape:
    """The shape for a value map with these left singular vectors and singular values."""
    gains = np.sqrt(1.0 / singular)
    gains /= np.sqrt(np.mean(gains**2))
    eye = np.eye(len(left))
    return Shape(eye + (left * (gains - 1.0)) @ left.T, eye + (left * (1.0 / gains - 1.0)) @ left.T)


@dataclass(frozen=True, eq=False)
class Stretched:
    """A basis whose members are shaped, then scaled by `along` in the direction `axis` and by
    `across` elsewhere."""

    basis: Basis
    across: float
    along: float
    axis: Float[Array, " d"]  # unit vector, or zero where there is no axis
    shape: Shape | None = None

    @property
    def width(self) -> int:
        return self.basis.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        rows = self.basis.rows(index)
        if self.shape is not None:
            rows = rows @ self.shape.matrix
        return self.stretched(rows)

    @property
    def bank(self) -> TokenBank:
        """The same; in one go where factors of a product are only scaled."""
        if isinstance(self.basis, KroneckerBasis) and self.shape is None and not self.axis.any():
            return self.basis.scaled(self.across)
        return self

    def stretched(self, directions: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Unit directions at the length of the probes, along and across the axis."""
        return self._stretch(directions, self.across, self.along)

    def unstretched(self, vectors: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """What unit directions see, from what they see stretched, in units of `across`."""
        return self._stretch(vectors, 1.0, self.across / self.along)

    def products(self, vectors: Float[Array, "n d"]) -> Float[Array, "d n"]:
        """Every probe times every vector, without forming the probes."""
        vectors = self._stretch(vectors, self.across, self.along)
        if self.shape is not None:
            vectors = vectors @ self.shape.matrix
        return np.ascontiguousarray(self.basis.coordinates(vectors).T)

    def solve(self, products: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """q with rows @ q = product, for each product."""
        found = self.basis.combine(products)
        if self.shape is not None:
            found = found @ self.shape.inverse
        return self._stretch(found, 1 / self.across, 1 / self.along)

    def solve_variance(self, variance: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Squared standard errors of `solve` for independent errors of the products (across the
        axis and along it each exact where these are equal)."""
        if self.shape is not None:
            return variance @ self.solve(np.eye(self.width)) ** 2
        along = variance @ self.basis.coordinates(self.axis[None])[0] ** 2
        found = self.basis.combine_squared(variance)
        found /= self.across**2
        found += np.outer(along * max(0.0, self.along**-2 - self.across**-2), self.axis**2)
        return found

    def _stretch(self, vectors: Array, across: float, along: float) -> Array:
        if not self.axis.any():
            return across * vectors
        part = vectors @ self.axis
        return across * vectors + np.outer((along - across) * part, self.axis)

    def digest(self) -> bytes:
        shape = b"" if self.shape is None else digest(self.shape.matrix)
        return digest(self.basis.digest(), np.array([self.across, self.along]), self.axis, shape)


def probe_set(
    probes: Stretched,
    linear: LinearPart,
    group: int,
    bias: Float[Array, " d"],
) -> ProbeSet:
    """All members as probes, with their values and their products with the key bias."""
    values = probes.products(np.ascontiguousarray(linear.value.T))
    return ProbeSet(probes.bank, probes.width, min(group, probes.width), values, bias)


def free_lengths(
    product: float, linear: LinearPart, overlap: float, longest: float
) -> tuple[float, float]:
    """Lengths (probe, anchor) with the given product, where there is no key bias.

    `overlap` is the value of a probe of length one.
    """
    offset = float(np.linalg.norm(linear.offset))
    imbalance = min(IMBALANCE, COARSEST / linear.noise.relative)
    probe = max(np.sqrt(product * imbalance), OFFSET_MARGIN * offset / overlap)
    probe = max(probe, NOISE_MARGIN * linear.noise.error_floor / overlap)
    probe = min(probe, longest)
    return float(probe), float(min(product / probe, longest))


def stretch(
    along: float,
    anchor: float,
    linear: LinearPart,
    overlap: float,
    bias_error: float,
    longest: float,
) -> float:
    """Length across the key bias, given the length along it and the anchor length that goes
    with an unstretched probe. The stretch shortens the anchors and lengthens the probes, so that
    the anchors' value and the offset cost fewer digits, but multiplies the error of the key bias:
    the two are balanced."""
    offset = float(np.linalg.norm(linear.offset)) / (along * overlap)
    value = float(np.linalg.norm(linear.value)) / np.sqrt(len(linear.value)) / overlap
    share = anchor / (along * bias_error)
    factor = max(np.sqrt(offset / bias_error), np.sqrt(share / 2.0), np.cbrt(share * value))
    return min(along * float(np.clip(factor, 1.0, STRETCH)), longest)


def computed_bias_error(linear: LinearPart, along: float, overlap: float) -> float:
    """Error of probe · key_bias in roundoffs, from the measured key bias (see its carrier)."""
    offset = float(np.linalg.norm(linear.offset)) / (along * overlap)
    return float(BIAS_ERROR + 2.0 * np.sqrt(offset))


def bias_length(size: float, width: int, longest: float) -> float:
    """Probe length that puts probe · key_bias at the target spread, |key_bias| = size."""
    return min(TARGET_SPREAD * np.sqrt(width) / size, longest)
