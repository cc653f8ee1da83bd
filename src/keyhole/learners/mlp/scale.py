"""At which size of inputs does a network show what it is?

Statement.  The size r of the entries at which the arguments of φ are of order one is found to a
            factor of about four, over many decades, from 7 to about 50 answers.
Queries.    x + t r u for t = 0, ±1, ±2, ±4 at one random place (x of size r / 2), r on a ladder.
Algebra.    Where r is too small F is its Taylor polynomial: second differences grow like r², third
            ones like r³. The largest such r on the ladder, times the ladder's step, is the answer.
            Second differences over r / 4096 then tell a smooth network from a piecewise linear
            one, where they vanish at most places.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array

Ask = Callable[[Array, str], Array]

LADDER = 4.0
RUNGS = 14  # up or down: eight decades
SECOND, THIRD = 1.85, 2.75  # exponents from which on F counts as its Taylor polynomial
BENDING = 1.25, 1.8  # exponent of second differences in the middle of a bend
TIMES = np.array([0.0, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0])
FINE = 2.0**-12  # step that tells smooth from piecewise linear, relative
LOOKS = 3  # places where that is looked at
ROUNDINGS = 1e3  # of an answer, below which a difference is none


@dataclass(frozen=True)
class Scale:
    size: float  # of an entry
    smooth: bool
    affine: bool = False  # no bend was found at any size


def find_scale(ask: Ask, width: int, unit: float, rng: np.random.Generator) -> Scale:
    """The scale of a network whose inputs may have any size."""
    place, way = rng.standard_normal((2, width))

    def exponents(r: float) -> tuple[float, float]:
        values = ask(r * (0.5 * place + TIMES[:, None] * way), "scale")
        f0, p1, m1, p2, m2, p4, m4 = values
        rounding = ROUNDINGS * unit * float(np.linalg.norm(values, axis=1).max())
        second = [float(np.linalg.norm(p + m - 2 * f0)) for p, m in ((p1, m1), (p2, m2))]
        third = [
            float(np.linalg.norm(far - 2 * p + 2 * m - back))
            for far, p, m, back in ((p2, p1, m1, m2), (p4, p2, m2, m4))
        ]
        return tuple(  # type: ignore[return-value]
            np.inf if b <= rounding else float(np.log2(b / max(a, TINY)))
            for a, b in (second, third)
        )

    def taylor(r: float) -> bool:
        second, third = exponents(r)
        return second > SECOND and third > THIRD

    second, third = exponents(1.0)
    if BENDING[0] < second < BENDING[1] and _smooth(ask, width, 1.0, unit, rng):
        return Scale(1.0, smooth=True)
    size, small = 1.0, second > SECOND and third > THIRD
    for _ in range(RUNGS):
        size *= LADDER if small else 1.0 / LADDER
        if taylor(size) != small:
            break
    else:
        if small:
            return Scale(1.0, smooth=False, affine=True)
    size = size if small else size * LADDER
    return Scale(size, _smooth(ask, width, size, unit, rng))


def _smooth(ask: Ask, width: int, size: float, unit: float, rng: np.random.Generator) -> bool:
    places = size * rng.standard_normal((LOOKS, 1, width))
    ways = size * FINE * rng.standard_normal((LOOKS, 1, width))
    points = places + np.array([0.0, 1.0, -1.0])[:, None] * ways
    answers = ask(points.reshape(-1, width), "scale").reshape(LOOKS, 3, -1)
    bends = np.linalg.norm(answers[:, 1] + answers[:, 2] - 2 * answers[:, 0], axis=1)
    rounding = 16.0 * unit * np.linalg.norm(answers, axis=2).max(axis=1)
    return bool(np.median(bends / np.maximum(rounding, TINY)) > 1.0)
