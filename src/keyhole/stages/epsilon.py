"""The epsilon of a norm, from what the norm makes of small streams.

Statement.  A norm divides by sqrt(v + epsilon), v the mean square of what it reads. Epsilon shows
            where v is of its size, and nowhere else.
Queries.    Those of `look` for one size; of sizes, until one is near the root of epsilon: the next
            size is where the last answer puts epsilon.
Algebra.    What the norm reads comes out with mean square q = v / (v + epsilon).
When it fails. Epsilon is zero, or the errors of what stands before the norm hide streams as small
            as it: then no size is right.
"""

from collections.abc import Callable

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.models.norm import Norm

USUAL = 1e-5  # epsilon of most libraries, with which the search begins
NEAR = 10.0  # factor between epsilon and the mean square at which it shows well
FARTHEST = 1e3  # by which the size changes at once: what shows hardly at all says no more
MOST_SIZES = 8  # from the usual one up and down to where the numbers end


def find_epsilon(look: Callable[[float], float], begin: float = USUAL) -> float | None:
    """Epsilon to a few digits; None where no size shows it.

    Args:
        look: Epsilon, as a stream of this root mean square shows it: zero, infinite or nan where it
            does not.
        begin: What epsilon may be.
    """
    size = float(np.sqrt(begin))
    for _ in range(MOST_SIZES):
        epsilon = look(size)
        if np.isnan(epsilon):
            return None
        if size**2 / NEAR < epsilon < size**2 * NEAR:
            return float(epsilon)
        size = float(np.clip(np.sqrt(max(epsilon, 0.0)), size / FARTHEST, size * FARTHEST))
    return None


def epsilon_of_share(share: float, size: float) -> float:
    """Epsilon from the part of its full length that a stream of this size comes out with."""
    return size**2 * (1.0 / share**2 - 1.0) if share > 0.0 else np.inf


def epsilons_behind(
    norm: Norm, read: Float[Array, "n k"], answers: Float[Array, "n d"]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """Epsilon by each of some answers of a norm, and how well it shows there: at best 1/4.

    Args:
        norm: Of which epsilon alone is not known.
        read: What it read, in its plane.
        answers: What it gave.
    """
    given = ((answers - norm.bias) / norm.gain) @ norm.plane
    square, seen = (np.sum(rows**2, axis=1) / norm.width for rows in (read, given))
    return square * (1.0 - seen) / np.maximum(seen, TINY), seen * (1.0 - seen)
