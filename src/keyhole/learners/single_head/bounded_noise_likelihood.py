"""The most likely scores behind answers to leaning pairs with additive noise.

Every score h_ij = û_i · score · x̂_j is seen by its own queries alone: its likelihood is maximised
by Newton steps in one variable. At one pass the queries are as many as the unknowns, and this is
the maximum-likelihood estimate; its covariance is the Cramér–Rao bound.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.special import expit

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned, KeyholeError, WrongFamily
from keyhole.learners.single_head.leaning_pairs import Asked, PairReading, log_odds

NEWTON_STEPS = 4
IMPOSSIBLE = 10.0  # standard errors by which an answer is beyond what any weight gives


def most_likely(
    reading: PairReading, asked: Sequence[Asked], key_bias: Float[Array, " d"], noise: float
) -> tuple[Float[Array, "d d"], Float[Array, "d d"]]:
    """Scores per unit lengths, and the information that the answers hold of them."""
    biases = (reading.pairs.probes @ key_bias)[:, None]
    best: Array | None = None
    for _ in range(NEWTON_STEPS):
        slope_sum: Any = 0.0
        information: Any = 0.0
        for answers, probe, anchor in asked:
            rest = reading.of_pairs(answers, anchor)
            swing, bias = probe * reading.sizes[:, None], probe * biases
            if best is None:
                score, error = log_odds(rest, swing, 1.0)
                weight = (probe * anchor / error) ** 2
                slope_sum += weight * (score - bias) / (probe * anchor)
                information += weight
                continue
            share = expit(best * probe * anchor + bias)
            slope = share * (1.0 - share) * swing * probe * anchor
            slope_sum += slope * (rest - share * swing)
            information += slope**2
        if not (information > 0).all():
            raise unreadable(reading, asked, noise)
        best = slope_sum / information + (0.0 if best is None else best)
    return np.asarray(best), information / noise**2


def unreadable(reading: PairReading, asked: Sequence[Asked], noise: float) -> KeyholeError:
    """Why some score has no likely value: answers that no weight gives, or noise."""
    for answers, probe, anchor in asked:
        rest = np.sign(probe) * reading.of_pairs(answers, anchor)
        beyond = np.maximum(-rest, rest - np.abs(probe) * reading.sizes[:, None])
        if beyond.max() > IMPOSSIBLE * noise:
            return WrongFamily("no scores of one head explain the answers to pairs")
    return IllConditioned("noise hides the score of some pairs: they need more queries")
