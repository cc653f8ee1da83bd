"""Which way to learn one head: decided by the domain and by how exact the box is."""

from typing import Literal

import numpy as np

from keyhole.errors import BudgetExhausted
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head.bounded_noise import LOOKS, RESERVE, Ball
from keyhole.measurement.noise import REPEATS, estimate_noise
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel

OVERHEAD = 3 + 3 * LOOKS + REPEATS  # beyond the unknowns: precision, offset, key bias, scale
ROUGH = 1e3  # additive errors above this many roundoffs of the largest answers ask for the ball
GROWTH = 32.0  # of the number of passes from one attempt to the next, at most


def noisy_in_ball(
    oracle: Oracle,
    rng: np.random.Generator,
    accuracy: float | None = None,
    rank: int | Literal["full", "unknown"] = "full",
) -> Hypothesis | None:
    """The head, if errors of the box are additive and tokens are bounded; None elsewhere.

    Spends the budget of the oracle, where there is one, or what `accuracy` needs: another budget
    asks other queries.
    """
    radius, stated = oracle.spec.domain.radius, oracle.spec.precision
    if not 0 < radius < np.inf:
        return None
    width, left = oracle.spec.width, oracle.remaining
    unknowns = width * width + width
    thrifty = left is not None and left < unknowns + OVERHEAD + RESERVE
    if thrifty and stated is None:
        raise BudgetExhausted(
            f"with the precision of the box unknown, {unknowns + OVERHEAD + RESERVE} queries are "
            f"needed, the budget leaves {left}: raise it, or state precision="
        )
    precision = estimate_noise(oracle, rng)[0] if stated is None else stated
    if not rough(precision):
        return None
    if left is not None and left < unknowns:  # before any is paid for: a plan for more is another
        raise BudgetExhausted(
            f"{unknowns} queries are the least that determine a head, the budget leaves {left}: "
            "raise it"
        )
    passes = 1
    if left is not None:
        passes = max(
            1, ((oracle.remaining or 0) - (0 if thrifty else 3 * LOOKS + RESERVE)) // (unknowns + 1)
        )
    learned = Ball(oracle, rng, precision, passes, rank).run(thrifty)
    while accuracy is not None and learned.details["cramer_rao"] > accuracy:
        factor = (float(learned.details["cramer_rao"]) / accuracy) ** 2
        passes = max(passes + 1, int(np.ceil(passes * min(factor, GROWTH))))
        learned = Ball(oracle, rng, precision, passes, rank).run(thrifty=False)
    return learned


def rough(precision: NoiseModel) -> bool:
    """Whether additive errors dominate the rounding of numbers of order one."""
    return precision.error_floor > ROUGH * precision.relative
