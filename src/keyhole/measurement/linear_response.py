"""Queries of length one: with a single token the softmax is 1, so f([x]) = offset + x · value.

The zero token gives the offset, the multiples of the unit vectors the value map: 1 + d queries.
With an offset, tokens are made long, so that the offset subtracted from the answer costs no digits.
One random token is asked twice before: how exact is the box, and is it linear at all?
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.errors import Counterexample, WrongFamily
from keyhole.measurement.noise import estimate_noise, is_settled, recognise_format
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import DETECTION, REJECTION, NoiseModel
from keyhole.oracles.queries import QueryBatch, UnitVectorBank

SHORT = 2.0**-12  # roundoff of formats so short that sums are kept in longer ones


@dataclass(frozen=True, eq=False)
class LinearPart:
    """What queries of length one tell: answers are offset + x · value."""

    value: Float[Array, "d D"]
    offset: Float[Array, " D"]
    value_error: Float[Array, "d D"]
    offset_error: Float[Array, " D"]
    scalar: bool  # whether the box answers with numbers rather than vectors
    noise: NoiseModel

    def at(self, tokens: Float[Array, "n d"]) -> Float[Array, "n D"]:
        return tokens @ self.value


def answer_noise(noise: NoiseModel, width: int) -> float:
    """Standard error of an answer relative to the size of its terms (measured, see the tests of
    calibration: errors of a NumPy box grow about as the fourth root of the width)."""
    # roundings of one answer at small width: fewer where our own arithmetic is finer than the box's
    roundings = 3.0 if noise.relative <= UNIT_ROUNDOFF else 1.5
    if noise.relative > SHORT and not is_settled(noise):
        roundings = 0.8
    blocked_sum = 32.0  # width from which the rounding of sums of products shows, as width**(1/4)
    return float(roundings * noise.relative * (1.0 + width / blocked_sum) ** 0.25)


def measure_values(
    oracle: Oracle,
    rng: np.random.Generator,
    looked: tuple[NoiseModel, QueryBatch, Array] | None = None,
) -> LinearPart:
    """Asks 3 + d queries of length one: a random token twice (how exact is the box? unless that
    is known), the zero token, and the unit vectors at a length that makes offset and noise
    harmless."""
    width = oracle.spec.width
    noise, queries, twice = estimate_noise(oracle, rng) if looked is None else looked
    zero = oracle.ask(QueryBatch.of(np.zeros((1, 1, width)), "offset"))
    offset = np.asarray(zero, dtype=np.float64).reshape(-1)
    long_token = 2.0**30  # an offset as large as the values then costs nothing in float64
    size = long_token if offset.any() else 1.0
    if noise.error_floor > 0:
        longest_token = 2.0**50  # additive errors cost nothing either
        size = longest_token
        offset = np.where(np.abs(offset) > DETECTION * noise.error_floor, offset, 0.0)
    coarsest = 2.0**-6  # longest token times the roundoff: short formats have a short range
    size = min(size, max(1.0, coarsest / noise.relative), oracle.spec.domain.radius)
    answers = oracle.ask(
        QueryBatch(UnitVectorBank(width, size), np.arange(width)[:, None], "value")
    )
    rows = np.asarray(answers, dtype=np.float64).reshape(width, -1)
    # one answer does not tell the shortest formats apart
    noise = recognise_format(noise, np.concatenate([np.ravel(twice), np.ravel(answers)]))
    level, floor = answer_noise(noise, width), noise.error_floor
    linear = LinearPart(
        value=(rows - offset) / size,
        offset=offset,
        value_error=(level * (np.abs(rows) + np.abs(offset)) + floor) / size,
        offset_error=np.where(offset == 0, 0.0, level * np.abs(offset) + floor),
        scalar=zero.ndim == 1,
        noise=noise,
    )
    refuse_nonlinear(linear, queries.tokens()[0], twice[:1])
    return linear


def refuse_nonlinear(
    linear: LinearPart, token: Float[Array, "1 d"], answer: Float[Array, "1 *out"]
) -> None:
    """Raises WrongFamily where the box is not linear in this single token."""
    answer = np.asarray(answer, dtype=np.float64)
    predicted = (linear.offset + linear.at(token)).reshape(answer.shape)
    terms = np.abs(linear.offset) + np.abs(token) @ np.abs(linear.value)
    nonlinear = 64.0  # rounding errors beyond which an answer is not linear in its token
    allowed = nonlinear * answer_noise(linear.noise, token.shape[1]) * terms
    allowed += REJECTION * (linear.noise.error_floor + np.abs(token) @ linear.value_error)
    if (np.abs(answer - predicted) > allowed.reshape(answer.shape)).any():
        raise WrongFamily(
            "an attention head is linear in a sequence of one token, this box is not",
            Counterexample(token, answer[0], predicted[0], "not linear in a single token"),
        )
