"""Everything of one head but its score: key bias, scale of the score, lengths of the tokens.

Statement.  With the linear part known, about one query (ceil(d / k) + 5 where there is a key bias)
            tells the key bias, and a handful the scale of the score, from which the probes that
            measure the score follow. k probes share a query: the rank of the value map, 1 for a
            scalar box.
Queries.    [u_1; …; u_k; 0] gives u_i · key_bias. One such query with long probes decides whether
            there is a key bias at all: without one the weights are equal to the last digit.
            [u_1 + x; …; x] for one random anchor x tells the scale.
Algebra.    Only the product of the lengths of probe and anchor enters the score, so probes are made
            long and anchors short: the anchor's own value and the offset, which are subtracted from
            the answer, then cost no digits. A key bias fixes the probes' length along itself (their
            score against any anchor holds probe · key_bias, which must stay of order one), but not
            across: there they are longer, as far as the error of the key bias allows.
Fails.      value = 0, or sequences of one token: nothing of the score can be seen
            (NotIdentifiable). A key bias of too many decades: IllConditioned.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float, Int, digest
from keyhole.errors import IllConditioned, NotIdentifiable
from keyhole.linalg.bases import Basis, KroneckerBasis, equal_overlap, random_basis
from keyhole.linalg.rank import count_above_share
from keyhole.measurement.linear_response import LinearPart, answer_noise
from keyhole.measurement.log_odds import (
    LOOSE,
    ROUNDS,
    SHRINK,
    STEEPEST,
    TARGET_SPREAD,
    UNSEEN,
    LogOddsMeter,
    MeasuredWeights,
    ProbeSet,
)
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ArrayBank, ScaledBank, SumBank, TokenBank

LONGEST_ACROSS = 2.0**10  # length of a probe across a key bias over that along it, at most


# -- the probes --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Equilibration:
    """A symmetric map that evens out what probes read of a value map with uneven singular values:
    weak directions get longer probes, by the square root of what they lack."""

    matrix: Float[Array, "d d"]
    inverse: Float[Array, "d d"]

    @classmethod
    def of(cls, left: Float[Array, "d k"], singular: Float[Array, " k"]) -> "Equilibration":
        """For a value map with these left singular vectors and singular values."""
        gains = np.sqrt(1.0 / singular)
        gains /= np.sqrt(np.mean(gains**2))
        eye = np.eye(len(left))
        return cls(
            eye + (left * (gains - 1.0)) @ left.T, eye + (left * (1.0 / gains - 1.0)) @ left.T
        )


@dataclass(frozen=True, eq=False)
class Probes:
    """A basis whose members are equilibrated, then scaled by `along` in the direction `axis` and
    by `across` elsewhere."""

    basis: Basis
    across: float
    along: float
    axis: Float[Array, " d"]  # unit vector, or zero where there is no axis
    equilibration: Equilibration | None = None

    @property
    def width(self) -> int:
        return self.basis.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        rows = self.basis.rows(index)
        if self.equilibration is not None:
            rows = rows @ self.equilibration.matrix
        return self.scale(rows)

    @property
    def bank(self) -> TokenBank:
        """The same; in one go where factors of a product are only scaled."""
        plain = self.equilibration is None and not self.axis.any()
        if isinstance(self.basis, KroneckerBasis) and plain:
            return self.basis.scale(self.across)
        return self

    def scale(self, directions: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Unit directions at the length of the probes, along and across the axis."""
        return self._stretch(directions, self.across, self.along)

    def unscale(self, vectors: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """What unit directions see, from what they see scaled, in units of `across`."""
        return self._stretch(vectors, 1.0, self.across / self.along)

    def products(self, vectors: Float[Array, "n d"]) -> Float[Array, "d n"]:
        """Every probe times every vector, without forming the probes."""
        vectors = self.scale(vectors)
        if self.equilibration is not None:
            vectors = vectors @ self.equilibration.matrix
        return np.ascontiguousarray(self.basis.coordinates(vectors).T)

    def solve(self, products: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """q with rows @ q = product, for each product."""
        found = self.basis.combine(products)
        if self.equilibration is not None:
            found = found @ self.equilibration.inverse
        return self._stretch(found, 1 / self.across, 1 / self.along)

    def solve_variance(self, variance: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """Squared standard errors of `solve` for independent errors of the products (across the
        axis and along it each exact where these are equal)."""
        if self.equilibration is not None:
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
        shape = b"" if self.equilibration is None else digest(self.equilibration.matrix)
        return digest(self.basis.digest(), np.array([self.across, self.along]), self.axis, shape)


# -- the value map -----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Overlap:
    """Orthonormal probes that all see as much of the value map."""

    basis: Basis
    left: Float[Array, "d k"]  # singular vectors of the value map that are seen,
    singular: Float[Array, " k"]  # and its singular values
    longest: float  # of the tokens' parts: a probe lifted by √2 and an anchor add up inside

    @property
    def group(self) -> int:
        """Probes that share a query."""
        return len(self.singular)


def draw_probes(spec: Spec, linear: LinearPart, rng: np.random.Generator) -> Overlap:
    """A random basis in which the probes of every query have equal overlap with the value map."""
    left, singular, _ = np.linalg.svd(linear.value, full_matrices=False)
    if singular[0] == 0.0:
        raise NotIdentifiable(
            "the value map is zero: the box answers the same to every sequence, so nothing of "
            "its score matrix can be seen"
        )
    group = count_above_share(singular, 1e-4)  # smaller ones read no weights off
    if spec.domain.max_length is not None:
        if spec.domain.max_length < 2:
            raise NotIdentifiable("queries of one token say nothing about the score matrix")
        group = min(group, spec.domain.max_length - 1)
    left = left[:, :group]
    return Overlap(equal_overlap(rng, left), left, singular[:group], 0.41 * spec.domain.radius)


# -- the key bias ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class KeyBias:
    vector: Float[Array, " d"]
    error: Float[Array, " d"]
    noise: NoiseModel


class _ZeroAnchor:
    """Asks probe groups of one basis against the zero token."""

    def __init__(self, oracle: Oracle, linear: LinearPart, basis: Basis, group: int) -> None:
        self.oracle, self.linear, self.basis, self.group = oracle, linear, basis, group
        value = np.ascontiguousarray(linear.value.T)
        self.values = np.ascontiguousarray(basis.coordinates(value).T)
        self.noise = linear.noise

    def probes(self, length: float, carrier: Float[Array, " d"] | None = None) -> ProbeSet:
        """Probes of this length, all moved by a carrier, which is given by its coordinates."""
        width, values = self.basis.width, length * self.values
        bank: TokenBank = ScaledBank(self.basis, length)
        if carrier is not None:
            bank = SumBank(bank, ArrayBank(self.basis.combine(carrier[None])), 1)
            values = values + carrier @ self.values
        return ProbeSet(bank, width, self.group, values, np.zeros(width))

    def vector(self, coordinates: Float[Array, " d"]) -> ProbeSet:
        """One vector as the only probe."""
        bank = ArrayBank(self.basis.combine(coordinates[None]))
        return ProbeSet(bank, 1, 1, coordinates[None] @ self.values, np.zeros(1))

    def ask(self, probes: ProbeSet, groups: Int[Array, " n"]) -> MeasuredWeights:
        meter = LogOddsMeter(self.oracle, self.linear, probes, "key bias")
        zero = ArrayBank(np.zeros((1, self.basis.width)))
        rows = np.zeros(len(groups), dtype=np.int64)
        found = meter.ask(zero, 1, rows, groups, np.zeros((len(groups), self.values.shape[1])))
        self.noise = meter.noise
        return found


def measure_key_bias(oracle: Oracle, linear: LinearPart, overlap: Overlap) -> KeyBias:
    """One query where there is no key bias, about ceil(d / group) + 5 where there is. (Where
    probes must be short and digits are few, all probes are asked.)"""
    width, group, longest = overlap.basis.width, overlap.group, overlap.longest
    zero = _ZeroAnchor(oracle, linear, overlap.basis, group)
    first = np.zeros(1, dtype=np.int64)
    offset = float(np.linalg.norm(linear.offset)) / float(np.linalg.norm(zero.values[:group]))
    # Not a round number: a round answer of a float64 box (value e_1, width 16) would pass for one
    # of a box with fewer bits.
    length = min(326.0 * np.pi * max(1.0, offset), longest)
    found = zero.ask(zero.probes(length), first)
    unseen = not found.saturated[0] and (np.abs(found.scores) <= UNSEEN * found.errors).all()
    # One query does not decide where a score of size 0.02 might pass unseen.
    if unseen and (length < longest or UNSEEN * found.errors.max() <= 0.02):
        return KeyBias(np.zeros(width), np.zeros(width), zero.noise)
    for _ in range(ROUNDS):
        if not found.saturated[0]:
            break
        length *= SHRINK
        found = zero.ask(zero.probes(length), first)
    # one score of a few may be small by chance, so assume a larger scale than was seen
    size = max(float(np.sqrt(np.mean(found.scores**2))), float(np.max(found.errors)))
    length = min(TARGET_SPREAD * length / (2.0 * size), longest)
    if group == 1 and linear.offset.any() and np.isinf(longest):
        return _measure_all_probes(zero, length, _find_carrier(zero, length), longest)
    bias = _measure_all_probes(zero, length, None, longest)
    if unseen and np.mean((bias.vector / bias.error) ** 2) <= 4.0:  # no more than chance explains
        return replace(bias, vector=np.zeros(width))
    return bias


def _find_carrier(zero: _ZeroAnchor, length: float) -> Float[Array, " d"] | None:
    """A vector without score and with a value far above the offset, by its coordinates.

    A strong key bias forces short probes, whose value drowns in the rounding of the offset. The
    probes of a scalar box are therefore carried by a vector L n with n · key_bias = 0 and a long
    value. Two rough measurements determine n (up to four where it would have little value), one
    more each few digits. The box rounds n · key_bias term by term: L balances the rounding of the
    offset, which falls with the carrier's length, against that one, which grows with it.
    """
    width = zero.basis.width
    offset = float(np.linalg.norm(zero.linear.offset))
    typical = float(np.linalg.norm(zero.values[0]))
    # A carrier is worth its queries where it lengthens the probes eight times or more.
    if width < 2 or np.sqrt(2.0 * offset / (typical * length)) < 8.0:
        return None
    scores, error, square = np.zeros(0), 0.0, 0.0
    for fresh in (np.arange(2), *np.arange(2, min(width, 4))[:, None]):
        found = zero.ask(zero.probes(length), fresh)
        if found.saturated.any() or not found.scores.any():
            return None
        scores = np.append(scores, found.scores[:, 0] / length)
        error = max(error, float(found.errors.max()))
        # all probes have the same value: what is left of their sum without the key bias's part
        slope = scores / (scores @ scores)
        level = 1.0 - scores.sum() * slope
        square = float(level @ level)
        if square > 0.1 * len(scores):
            break
    coordinates = np.zeros(width)
    coordinates[: len(scores)] = level / np.sqrt(square)
    value = float(np.linalg.norm(coordinates @ zero.values))
    if value == 0.0:
        return None
    final, long = np.sqrt(2.0 * length * offset / value), length
    in_range = 0.25  # an error of the carrier's own score that leaves it in range
    while error * final / long > in_range:
        long = min(final, long * in_range / error)
        found = zero.ask(zero.vector(long * coordinates), np.zeros(1, dtype=np.int64))
        if found.saturated[0]:
            return None
        error = float(found.errors[0, 0])
        coordinates[: len(scores)] -= float(found.scores[0, 0]) / long * slope
    return np.asarray(final * coordinates)


def _measure_all_probes(
    zero: _ZeroAnchor, length: float, carrier: Float[Array, " d"] | None, longest: float
) -> KeyBias:
    """All probe groups against zero; what comes out steep is asked again with shorter probes."""
    width, group = zero.basis.width, zero.group
    groups = -(-width // group)
    scores, errors = np.zeros((groups, group)), np.zeros((groups, group))
    lengths, known = np.full((groups, 1), length), np.zeros(groups, dtype=bool)
    pending = np.arange(min(4, groups))  # for the scale, before the rest
    for _ in range(ROUNDS):
        asked, before = pending, length
        found = zero.ask(zero.probes(length, carrier), pending)
        scores[pending], errors[pending], lengths[pending] = found.scores, found.errors, length
        noise = LOOSE * answer_noise(zero.noise, width)
        loose = (np.abs(found.scores) > STEEPEST) & (found.errors > noise)
        steep = ((found.scores > STEEPEST) | loose).any(axis=1)
        known[pending] = ~found.saturated
        again = pending[found.saturated | steep]
        fresh = np.arange(pending.max() + 1, groups)
        pending = np.concatenate([again, fresh])
        if not len(pending):
            break
        if known.any():  # the scale as far as it is known by now
            size = float(np.sqrt(np.mean((scores[known] / lengths[known]) ** 2)))
            length = min(TARGET_SPREAD / size if size > 0 else length, longest)
        if found.saturated.any():  # those known may be the small ones
            length = min(length, before / 8.0)
        if known.all() and length == before and np.array_equal(pending, asked):
            break  # the same queries once more: no length is better
    else:
        raise IllConditioned("the key bias spans more decades than the box's precision can show")
    plain = (scores / lengths).ravel()[:width]
    inverse = np.broadcast_to(1.0 / lengths, scores.shape).ravel()[:width]
    noise = (errors / lengths).ravel()[:width]
    variance = zero.basis.combine_squared(noise[None] ** 2)[0]
    if carrier is not None:  # its own small score is in every measurement, and in their sum
        weight = carrier / (1.0 + carrier @ inverse)
        plain = plain - (weight @ plain) * inverse
        variance += (weight**2 @ noise**2) * zero.basis.combine(inverse[None])[0] ** 2
    return KeyBias(zero.basis.combine(plain[None])[0], np.sqrt(variance), zero.noise)


# -- scale and lengths -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Calibration:
    """Everything known before the score is measured: linear part, key bias, probes, scale."""

    oracle: Oracle
    linear: LinearPart
    key_bias: Float[Array, " d"]
    key_bias_error: Float[Array, " d"]
    probes: Probes
    bias: Float[Array, " d"]  # probe · key_bias
    group: int  # probes read off at once
    spread: float | None  # root mean square of probe · score · unit anchor; None: no score seen
    start: Float[Array, " d"]  # the random unit anchor on which that was seen
    longest: float  # of the tokens' parts: a probe and an anchor of this length add up inside

    @property
    def width(self) -> int:
        return self.probes.width

    @property
    def scale(self) -> float:
        """The spread, where there is one."""
        return 1.0 if self.spread is None else self.spread

    @property
    def bias_error(self) -> float:
        """Standard error of direction · key_bias for a direction at the length of the probes."""
        return float(self.probes.across * np.sqrt(np.mean(self.key_bias_error**2)))

    def values_of(self, anchors: Basis) -> Float[Array, "d D"]:
        """Values of all members of a basis, without forming them."""
        value = np.ascontiguousarray(self.linear.value.T)
        return np.ascontiguousarray(anchors.coordinates(value).T)

    def meter(self, purpose: str = "score", bias_error: float = 0.0) -> LogOddsMeter:
        """Log-odds of all probes, without forming them."""
        values = self.probes.products(np.ascontiguousarray(self.linear.value.T))
        group = min(self.group, self.width)
        probes = ProbeSet(self.probes.bank, self.width, group, values, self.bias, bias_error)
        return LogOddsMeter(self.oracle, self.linear, probes, purpose)

    def meter_of(
        self, tokens: Float[Array, "n d"], group: int, purpose: str = "score"
    ) -> LogOddsMeter:
        """Log-odds with these tokens as the probes."""
        values, bias = self.linear.at(tokens), tokens @ self.key_bias
        probes = ProbeSet(ArrayBank(tokens), len(tokens), group, values, bias, self.bias_error)
        return LogOddsMeter(self.oracle, self.linear, probes, purpose)

    def draw_anchors(self, rng: np.random.Generator) -> Basis:
        """Random anchors that begin with the one whose scale is known; or, all but the first
        orthogonal to a key bias (the box computes with anchor · key_bias, and rounds)."""
        size = float(np.linalg.norm(self.key_bias))
        first = self.key_bias / size if size > 0 else self.start
        return random_basis(rng, self.width, first)


def calibrate(
    oracle: Oracle,
    linear: LinearPart,
    overlap: Overlap,
    bias: KeyBias,
    rng: np.random.Generator,
) -> Calibration:
    """The scale of the score and the lengths of the tokens: a handful of queries."""
    width, group, longest = oracle.spec.width, overlap.group, overlap.longest
    even = Equilibration.of(overlap.left, overlap.singular) if group > 1 else None
    if even is not None:
        longest /= max(1.0, float(np.linalg.norm(even.matrix, 2)))  # such probes are longer
    start = rng.standard_normal(width)
    plain = Calibration(
        oracle=oracle,
        linear=replace(linear, noise=bias.noise),
        key_bias=bias.vector,
        key_bias_error=bias.error,
        probes=Probes(overlap.basis, 1.0, 1.0, np.zeros(width), even),
        bias=np.zeros(width),
        group=group,
        spread=None,
        start=start / np.linalg.norm(start),
        longest=longest,
    )
    # what a probe of length one is worth: an error of the answer becomes 1/worth of a weight
    worth = float(np.sqrt(group / width) / np.mean(1.0 / overlap.singular))
    if bias.vector.any():
        trial, anchor = _start_with_bias(plain)
    else:  # entries of size 1/√d are the natural guess for the product of the lengths
        product = TARGET_SPREAD * np.sqrt(width)
        probe, anchor = choose_lengths(product, plain.linear, worth, longest)
        trial = replace(plain, probes=replace(plain.probes, across=probe, along=probe))
    seen = trial.meter().scale(plain.start, anchor, longest)
    if seen is None:
        return trial
    if bias.vector.any():
        return _lengthen_across(trial, seen, worth, rng)
    length = trial.probes.across
    better, _ = choose_lengths(TARGET_SPREAD * length / seen, plain.linear, worth, longest)
    probes = replace(plain.probes, across=better, along=better)
    return replace(plain, probes=probes, spread=seen * better / length)


def choose_lengths(
    product: float, linear: LinearPart, worth: float, longest: float
) -> tuple[float, float]:
    """Lengths (probe, anchor) with the given product, where there is no key bias.

    `worth` is the value of a probe of length one. Short number formats have a short range.
    """
    offset = float(np.linalg.norm(linear.offset))
    margin = 2.0**20  # probe over anchor length, and probe value over offset, where both are free
    imbalance = min(margin, 2.0**-4 / linear.noise.relative)
    probe = max(np.sqrt(product * imbalance), margin * offset / worth)
    probe = max(probe, margin**2 * linear.noise.error_floor / worth)
    probe = min(probe, longest)
    return float(probe), float(min(product / probe, longest))


def _start_with_bias(plain: Calibration) -> tuple[Calibration, float]:
    """Probes that are everywhere as short as the key bias asks for, and the length of an anchor
    for them."""
    size = float(np.linalg.norm(plain.key_bias))
    along = choose_length_along(size, plain.width, plain.longest)
    probes = replace(plain.probes, across=along, along=along, axis=plain.key_bias / size)
    trial = replace(plain, probes=probes, bias=probes.products(plain.key_bias[None])[:, 0])
    return trial, TARGET_SPREAD * np.sqrt(plain.width) / along


def _lengthen_across(
    trial: Calibration, seen: float, worth: float, rng: np.random.Generator
) -> Calibration:
    """Probes that are long across the key bias. Where eight or more share a query, probe ·
    key_bias is then measured once more with the probes that will measure the score."""
    along, longest, linear = trial.probes.along, trial.longest, trial.linear
    measure_again = trial.group >= 8
    # Error of probe · key_bias in roundoffs: less where it is measured with the probes themselves.
    offset = float(np.linalg.norm(linear.offset)) / (along * worth)
    error = 2.0 if measure_again else float(8.0 + 2.0 * np.sqrt(offset))
    across = choose_length_across(along, TARGET_SPREAD / seen, linear, worth, error, longest)
    probes = _equilibrate(trial, replace(trial.probes, across=across), rng)
    calibration = replace(
        trial,
        probes=probes,
        bias=probes.products(trial.key_bias[None])[:, 0],
        spread=seen * across / along,  # roughly: it is refined from the first answers
    )
    return _measure_bias_again(calibration) if measure_again else calibration


def choose_length_along(size: float, width: int, longest: float) -> float:
    """Probe length that puts probe · key_bias at the target spread, |key_bias| = size."""
    return min(TARGET_SPREAD * np.sqrt(width) / size, longest)


def choose_length_across(
    along: float,
    anchor: float,
    linear: LinearPart,
    worth: float,
    bias_error: float,
    longest: float,
) -> float:
    """Length across the key bias, given the length along it and the anchor length that goes with
    a probe of that length. Longer probes make shorter anchors, so that the anchors' value and the
    offset cost fewer digits, but multiply the error of the key bias: the two are balanced."""
    offset = float(np.linalg.norm(linear.offset)) / (along * worth)
    value = float(np.linalg.norm(linear.value)) / np.sqrt(len(linear.value)) / worth
    share = anchor / (along * bias_error)
    factor = max(np.sqrt(offset / bias_error), np.sqrt(share / 2.0), np.cbrt(share * value))
    return min(along * float(np.clip(factor, 1.0, LONGEST_ACROSS)), longest)


def _equilibrate(plain: Calibration, probes: Probes, rng: np.random.Generator) -> Probes:
    """Overlap and equilibration for what the scaled probes see of the value map. Evening a weak
    direction out may lengthen the probes along the key bias again: then start with less. (The
    length along the key bias settles in two or three rounds.)"""
    value, axis = plain.linear.value, probes.axis
    for _ in range(6):
        seen = probes.across * value
        seen += np.outer((probes.along - probes.across) * axis, axis @ value)
        left, singular, _ = np.linalg.svd(seen, full_matrices=False)
        left, singular = left[:, : plain.group], singular[: plain.group]
        even = Equilibration.of(left, singular) if plain.group > 1 else None
        probes = replace(probes, basis=equal_overlap(rng, left), equilibration=even)
        size = float(np.sqrt(np.mean(probes.products(plain.key_bias[None]) ** 2)))
        if size < 2.0 * TARGET_SPREAD or plain.group == 1:
            break
        probes = replace(probes, along=probes.along * (TARGET_SPREAD / size) ** 2)
    return probes


def _measure_bias_again(calibration: Calibration) -> Calibration:
    """Probe · key_bias with the probes that will measure the score: no error to multiply."""
    meter, probes = calibration.meter("key bias"), calibration.probes
    groups = np.arange(meter.probes.groups)
    zero, rows = ArrayBank(np.zeros((1, probes.width))), np.zeros_like(groups)
    values = np.zeros((len(groups), calibration.linear.offset.size))
    found = meter.ask(zero, 1, rows, groups, values)
    if found.saturated.any():
        return calibration
    bias = found.scores.ravel()[: probes.width]
    errors = found.errors.ravel()[: probes.width]
    return replace(
        calibration,
        bias=bias,
        key_bias=probes.solve(bias[None])[0],
        key_bias_error=np.sqrt(probes.solve_variance(errors[None] ** 2)[0]),
    )
