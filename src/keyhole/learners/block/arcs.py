"""Are there kinks? Short arcs of a great circle, at two lengths.

Statement.  A network of ReLUs behind a norm is told from a smooth one.
Queries.    Seven points on each of some arcs.
Algebra.    Values of an affine function at points of a circle, and so the directions of vectors
            that are affine in them, lie in three dimensions. A smooth network leaves these by the
            cube of the distance of five near points: an eighth at half the distance; one with kinks
            on the arc by the distance itself, and not at all where an arc holds none. The arc is so
            long that an eighth of its cube is seen in the roundings.
When it fails. Neurons that hardly bend leave less than the rounding, and look like none.
"""

from collections.abc import Callable

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.linalg.decisions import margin_of, note_decision
from keyhole.measurement.evidence import Evidence
from keyhole.oracles.noise import DETECTION, NoiseModel

LONGEST = 0.1  # of an arc, in radians: with more, the fifth power of its length is seen too
BY_CHANCE = 0.2  # that kinks on an arc look like a curve
WIDE, NARROW = [0, 1, 3, 5, 6], [1, 2, 3, 4, 5]  # points of an arc, and of its inner half


def bends_smoothly(
    ask: Callable[[Float[Array, "n k"]], Float[Array, "n p"]],
    width: int,
    error: float,
    rng: np.random.Generator,
) -> bool:
    """Whether answers curve as those of a smooth network on most arcs.

    Args:
        ask: Answers to points of the unit sphere.
        width: Numbers in a point.
        error: Of the answers, relative to their size.
        rng: Draws the arcs.
    """
    arcs = Evidence(NoiseModel(error)).enough(BY_CHANCE)
    step = min(10.0 * error ** (1.0 / 3.0), LONGEST)
    turns = step * np.array([-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
    left = []
    for _ in range(arcs):
        first, second = np.linalg.qr(rng.standard_normal((width, 2)))[0].T
        seen = ask(np.outer(np.cos(turns), first) + np.outer(np.sin(turns), second))
        sizes = [np.linalg.svd(seen[part], compute_uv=False) for part in (WIDE, NARROW)]
        left.append([one[3] / one[0] for one in sizes])
    wide, narrow = np.array(left).T
    shown = wide > DETECTION**2 * error
    eighth = np.abs(np.log2(8.0 * np.maximum(narrow, TINY) / np.maximum(wide, TINY))) < 0.5
    share = float(np.mean(shown & eighth))
    note_decision("the network is smooth", share > 0.5, margin_of(share, 0.5))
    return share > 0.5
