"""Queries of probes against the zero token: [u_1; …; u_k; 0] gives u_i · key_bias.

One query with long probes decides whether there is a key bias at all: without one the weights
are equal to the last digit, however long the probes. (Where probes must be short and digits are
few, all probes are asked.)

A strong key bias forces short probes, whose value then drowns in the rounding of the offset. The
probes of a scalar box are therefore carried by a vector n with n · key_bias = 0 and a long value:
u_i = λ t_i + L n. Two rough measurements determine n (up to four where it would have little value),
one more each few digits; L balances the rounding of the offset against that of n · key_bias, whose
terms cancel only in exact arithmetic.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned
from keyhole.linalg.bases import Basis
from keyhole.measurement.linear_response import LinearPart, answer_noise
from keyhole.measurement.log_odds import (
    LOOSE,
    ROUNDS,
    SHRINK,
    STEEPEST,
    TARGET_SPREAD,
    UNSEEN,
    LogOdds,
    ProbeSet,
    Weights,
)
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ArrayBank, ScaledBank, SumBank

# of the probes that look for a key bias, in units of offset / value. Not a round number: a round
# answer of a float64 box (value e_1, width 16) would pass for one of a box with fewer bits
FIRST_LENGTH = 326.0 * np.pi
FIRST_GROUPS = 4  # asked before the rest, for the scale
MODERATE = 0.125  # step of the length where a score came out steep
VAGUE = 0.02  # a score that may pass unseen up to this size: then one query does not decide
CHANCE = 4.0  # mean square of a key bias in standard errors up to which it is none
WORTHWHILE = 8.0  # lengthening from which a carrier is worth its queries
LEVEL = 0.1  # squared share of the probes' common value that a carrier should keep
CERTAIN = 0.25  # error of the carrier's own score that still leaves it in range


@dataclass(frozen=True, eq=False)
class KeyBias:
    vector: Float[Array, " d"]
    error: Float[Array, " d"]
    noise: NoiseModel


@dataclass(frozen=True, eq=False)
class Carrier:
    """n in coordinates of the probe basis, times its length L."""

    coordinates: Float[Array, " d"]


class _Zero:
    """Asks probe groups of one basis against the zero token."""

    def __init__(self, oracle: Oracle, linear: LinearPart, basis: Basis, group: int) -> None:
        self.oracle, self.linear, self.basis, self.group = oracle, linear, basis, group
        self.values = np.ascontiguousarray(
            basis.coordinates(np.ascontiguousarray(linear.value.T)).T
        )
        self.noise = linear.noise

    def ask(self, length: float, groups: Array, carrier: Carrier | None = None) -> Weights:
        width = self.basis.width
        bank, values = ScaledBank(self.basis, length), length * self.values
        if carrier is None:
            probes = ProbeSet(bank, width, self.group, values, np.zeros(width))
        else:
            shift = self.basis.combine(carrier.coordinates[None])
            carried = SumBank(bank, ArrayBank(shift), 1)
            values = values + carrier.coordinates @ self.values
            probes = ProbeSet(carried, width, self.group, values, np.zeros(width))
        return self._against_zero(probes, groups)

    def ask_vector(self, coordinates: Float[Array, " d"]) -> tuple[float, float, bool]:
        """Score, its error, and whether it is saturated, of one vector as the only probe."""
        vector = ArrayBank(self.basis.combine(coordinates[None]))
        value = coordinates[None] @ self.values
        found = self._against_zero(
            ProbeSet(vector, 1, 1, value, np.zeros(1)), np.zeros(1, dtype=np.int64)
        )
        return float(found.scores[0, 0]), float(found.errors[0, 0]), bool(found.saturated[0])

    def _against_zero(self, probes: ProbeSet, groups: Array) -> Weights:
        meter = LogOdds(self.oracle, self.linear, probes, "key bias")
        zero, rows = (
            ArrayBank(np.zeros((1, self.basis.width))),
            np.zeros(len(groups), dtype=np.int64),
        )
        found = meter.ask(zero, 1, rows, groups, np.zeros((len(groups), self.values.shape[1])))
        self.noise = meter.noise
        return found


def measure_key_bias(
    oracle: Oracle, linear: LinearPart, basis: Basis, group: int, longest: float = np.inf
) -> KeyBias:
    """One query where there is no key bias, about ceil(d / group) + 5 where there is."""
    width = basis.width
    zero = _Zero(oracle, linear, basis, group)
    first = np.zeros(1, dtype=np.int64)
    offset = float(np.linalg.norm(linear.offset)) / float(np.linalg.norm(zero.values[:group]))
    length = min(FIRST_LENGTH * max(1.0, offset), longest)
    found = zero.ask(length, first)
    unseen = not found.saturated[0] and (np.abs(found.scores) <= UNSEEN * found.errors).all()
    if unseen and (length < longest or UNSEEN * found.errors.max() <= VAGUE):
        return KeyBias(np.zeros(width), np.zeros(width), zero.noise)
    for _ in range(ROUNDS):
        if not found.saturated[0]:
            break
        length *= SHRINK
        found = zero.ask(length, first)
    # one score of a few may be small by chance, so assume a larger scale than was seen
    size = max(float(np.sqrt(np.mean(found.scores**2))), float(np.max(found.errors)))
    length = min(TARGET_SPREAD * length / (2.0 * size), longest)
    if group == 1 and linear.offset.any() and np.isinf(longest):
        return _sweep(zero, length, _carrier(zero, length), longest)
    bias = _sweep(zero, length, None, longest)
    if unseen and np.mean((bias.vector / bias.error) ** 2) <= CHANCE:
        return replace(bias, vector=np.zeros(width))
    return bias


def _carrier(zero: _Zero, length: float) -> Carrier | None:
    """A vector without score and with a value far above the offset."""
    width = zero.basis.width
    # the box rounds n · key_bias too, term by term: the offset's rounding, which falls with the
    # carrier's length, is balanced against that one, which grows with it
    offset = float(np.linalg.norm(zero.linear.offset))
    typical = float(np.linalg.norm(zero.values[0]))
    if width < 2 or np.sqrt(2.0 * offset / (typical * length)) < WORTHWHILE:
        return None
    scores, error, square = np.zeros(0), 0.0, 0.0
    for fresh in (np.arange(2), *np.arange(2, min(width, FIRST_GROUPS))[:, None]):
        found = zero.ask(length, fresh)
        if found.saturated.any() or not found.scores.any():
            return None
        scores = np.append(scores, found.scores[:, 0] / length)
        error = max(error, float(found.errors.max()))
        # all probes have the same value: what is left of their sum without the key bias's part
        slope = scores / (scores @ scores)
        level = 1.0 - scores.sum() * slope
        square = float(level @ level)
        if square > LEVEL * len(scores):
            break
    coordinates = np.zeros(width)
    coordinates[: len(scores)] = level / np.sqrt(square)
    value = float(np.linalg.norm(coordinates @ zero.values))
    if value == 0.0:
        return None
    final, long = np.sqrt(2.0 * length * offset / value), length
    while error * final / long > CERTAIN:
        long = min(final, long * CERTAIN / error)
        score, error, saturated = zero.ask_vector(long * coordinates)
        if saturated:
            return None
        coordinates[: len(scores)] -= score / long * slope
    return Carrier(final * coordinates)


def _sweep(zero: _Zero, length: float, carrier: Carrier | None, longest: float) -> KeyBias:
    """All probe groups against zero; what comes out steep is asked again with shorter probes."""
    width, group = zero.basis.width, zero.group
    groups = -(-width // group)
    scores, errors = np.zeros((groups, group)), np.zeros((groups, group))
    lengths, known = np.full((groups, 1), length), np.zeros(groups, dtype=bool)
    pending = np.arange(min(FIRST_GROUPS, groups))
    for _ in range(ROUNDS):
        asked, before = pending, length
        found = zero.ask(length, pending, carrier)
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
            length = min(length, MODERATE * before)
        if known.all() and length == before and np.array_equal(pending, asked):
            break  # the same queries once more: no length is better
    else:
        raise IllConditioned("the key bias spans more decades than the box's precision can show")
    plain = (scores / lengths).ravel()[:width]
    inverse = np.broadcast_to(1.0 / lengths, scores.shape).ravel()[:width]
    noise = (errors / lengths).ravel()[:width]
    variance = zero.basis.combine_squared(noise[None] ** 2)[0]
    if carrier is not None:  # its own small score is in every measurement, and in their sum
        weight = carrier.coordinates / (1.0 + carrier.coordinates @ inverse)
        plain = plain - (weight @ plain) * inverse
        variance += (weight**2 @ noise**2) * zero.basis.combine(inverse[None])[0] ** 2
    return KeyBias(zero.basis.combine(plain[None])[0], np.sqrt(variance), zero.noise)
