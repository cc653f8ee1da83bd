"""How exact is the box that is being verified? Found out beside the queries that are compared.

The number format and a rounding step show in the answers. Noise shows where one query is asked
again; only then more is spent on it, at two sizes of answers, to tell noise that grows with the
answer from noise that does not. Levels are taken at the upper end of what the repeats leave
possible: an honest box must not be wronged.
"""

import numpy as np
from scipy.special import gammaincinv

from keyhole.arrays import TINY, Array
from keyhole.measurement.noise import (
    SAME,
    decimal_step,
    decimals,
    noise_of_type,
    recognise_format,
)
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

PURPOSE = "verification"
REPEATS = 3  # of one query, to see whether the box is noisy
NOISY_REPEATS = 16  # at each of two sizes, if it is: the level is then taken up to 4 times too high
MISJUDGED = 1e-6  # chance that the level of the noise is taken too low
SMALL, LARGE = 2.0**-6, 2.0**6  # sizes of tokens whose answers show whether noise grows with them
TELLING = 4.0  # growth of the answers between them from which that can be told


def measured(box: Oracle, tokens: Array, answers: list[Array]) -> NoiseModel:
    """Number format and rounding step from the answers given so far, noise from the first of
    these queries, asked again."""
    numbers = np.concatenate([np.ravel(a) for a in answers])
    kind = recognise_format(noise_of_type(None, answers[0]), numbers)
    again = _again(box, tokens, REPEATS)
    noisy = np.max(np.ptp(again, axis=0)) > SAME * kind.relative * np.max(np.abs(again))
    if not noisy and (rounded := decimals(numbers)) is not None:
        return rounded
    relative, additive = _noise(box, tokens) if noisy else (0.0, 0.0)
    return NoiseModel(max(kind.relative, relative), additive, decimal_step(numbers))


def _again(box: Oracle, tokens: Array, times: int) -> Array:
    answers = box.ask(QueryBatch.of(np.repeat(tokens[None], times, axis=0), PURPOSE))
    return np.asarray(answers, dtype=np.float64).reshape(times, -1)


def _noise(box: Oracle, tokens: Array) -> tuple[float, float]:
    """Relative and additive noise, from small and from large answers."""
    domain = box.spec.domain
    sizes = (1.0, 1.0) if domain.vocabulary is not None else (SMALL, LARGE)
    low, high = (
        _again(box, tokens if size == 1.0 else domain.drawn_in(size * tokens), NOISY_REPEATS)
        for size in sizes
    )
    scales = [max(float(np.sqrt(np.mean(part**2))), TINY) for part in (low, high)]
    scatter = [float(np.sqrt(np.mean(np.var(part, axis=0, ddof=1)))) for part in (low, high)]
    growth = scales[1] / scales[0]
    grows = growth < TELLING or scatter[1] > np.sqrt(growth) * scatter[0]
    relative = upper_level(high) / scales[1] if grows else 0.0
    if grows and growth >= TELLING:
        return relative, upper_level(low)
    return relative, max(upper_level(low), upper_level(high))


def upper_level(repeats: Array) -> float:
    """Standard deviation of repeated answers, as high as it may be."""
    freedom = (len(repeats) - 1) * repeats.shape[1]
    square = float(np.mean(np.var(repeats, axis=0, ddof=1)))
    low = 2.0 * gammaincinv(freedom / 2.0, MISJUDGED)  # quantile of chi square
    return float(np.sqrt(square * freedom / low))
