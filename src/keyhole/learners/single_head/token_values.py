"""Queries of one token of a vocabulary: f([t]) = offset + t · value.

d + 1 affinely independent tokens determine the value map and the offset. Where d of them predict
the answer to the last one, there is no offset.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.measurement.linear_response import answer_noise
from keyhole.measurement.noise import noise_of_type, recognise_format
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ArrayBank, QueryBatch

TERMS = 0.45  # the terms' root sum of squares exceeds the answer (measured: tests of calibration)
UNSEEN = 16.0  # an offset below so many standard errors is called zero


@dataclass(frozen=True, eq=False)
class AnswerNoise:
    """Standard error of an answer: what the box's arithmetic loses, and what is added on top."""

    relative: float  # of the terms of which an answer is the sum
    absolute: float  # noise and rounding of the answer itself

    def of(self, size: Array) -> Array:
        return np.hypot(self.relative * size, self.absolute)


@dataclass(frozen=True, eq=False)
class TokenValues:
    """What single tokens tell. `answers` are those of all tokens, asked or predicted."""

    value: Float[Array, "d D"]
    value_error: Float[Array, "d D"]
    offset: Float[Array, " D"]
    offset_error: Float[Array, " D"]
    answers: Float[Array, "m D"]
    errors: Float[Array, "m D"]  # standard errors of these
    sizes: Float[Array, "m D"]  # of the terms that the box adds up for them
    scalar: bool
    kind: NoiseModel
    noise: AnswerNoise


def noise_of(oracle: Oracle, kind: NoiseModel) -> AnswerNoise:
    stated = oracle.spec.precision
    absolute = 0.0 if stated is None else stated.error_floor
    return AnswerNoise(TERMS * answer_noise(kind, oracle.spec.width), absolute)


def measure_token_values(
    oracle: Oracle, tokens: Float[Array, "m d"], chosen: Int[Array, " n"]
) -> TokenValues:
    """Asks the d + 1 chosen tokens; the first d of them span."""
    width = tokens.shape[1]
    raw = oracle.ask(QueryBatch(ArrayBank(tokens), chosen[:, None], "value"))
    kind = recognise_format(noise_of_type(oracle.spec.precision, raw), raw)
    noise = noise_of(oracle, kind)
    asked = np.asarray(raw, dtype=np.float64).reshape(width + 1, -1)
    # without an offset: d tokens, and the last one as a test
    basis, last = tokens[chosen[:width]], tokens[chosen[width]]
    inverse = np.linalg.inv(basis)
    value = solved(basis, asked[:width])
    sizes = _sizes(tokens, value, asked, chosen)
    error = noise.of(sizes[chosen])
    share = last @ inverse
    gap = asked[width] - last @ value
    gap_error = np.sqrt(share**2 @ error[:width] ** 2 + error[width] ** 2)
    offset, lever = np.zeros(asked.shape[1]), abs(1.0 - float(share.sum()))
    offset_error = gap_error / max(lever, TINY)
    value_error = np.sqrt(inverse**2 @ error[:width] ** 2)
    coordinates = tokens @ inverse
    if (np.abs(gap) > UNSEEN * gap_error).any():
        basis = np.hstack([tokens[chosen], np.ones((width + 1, 1))])
        inverse, solution = np.linalg.inv(basis), solved(basis, asked)
        value, offset = solution[:width], solution[width]
        sizes = np.hypot(_sizes(tokens, value, asked, chosen), np.abs(offset))
        error = noise.of(sizes[chosen])
        errors = np.sqrt(inverse**2 @ error**2)
        value_error, offset_error = errors[:width], errors[width]
        coordinates = np.hstack([tokens, np.ones((len(tokens), 1))]) @ inverse
    answers = tokens @ value + offset
    spread = np.sqrt(coordinates**2 @ error[: coordinates.shape[1]] ** 2)
    answers[chosen], spread[chosen] = asked, error
    return TokenValues(
        value=value,
        value_error=value_error,
        offset=offset,
        offset_error=offset_error,
        answers=answers,
        errors=spread,
        sizes=sizes,
        scalar=raw.ndim == 1,
        kind=kind,
        noise=noise,
    )


def solved(matrix: Float[Array, "n n"], right: Float[Array, "n D"]) -> Float[Array, "n D"]:
    """Solves, with one step of refinement in longer arithmetic: a moderately conditioned choice
    of tokens then costs none of the answers' digits."""
    solution = np.linalg.solve(matrix, right)
    rest = right - matrix.astype(np.longdouble) @ solution.astype(np.longdouble)
    return np.asarray(solution + np.linalg.solve(matrix, rest.astype(np.float64)))


def _sizes(tokens: Array, value: Array, asked: Array, chosen: Array) -> Array:
    """Root sum of squares of the terms t_i value_i: the scale of the box's rounding."""
    sizes = np.sqrt(tokens**2 @ value**2)
    sizes[chosen] = np.maximum(sizes[chosen], np.abs(asked))
    return sizes
