"""At which size of inputs does a network show what it is?

Statement.  The size r of the entries at which the arguments of φ are of order one is found to a
            factor of about two, over many decades, from 12 to about 60 answers.
Queries.    Second differences along one direction, at four places of a sphere.
Algebra.    Where r is small they are nearly the same at all places, and what they differ by grows
            like r: one look in that range tells where they would differ by as much as they are.
            Differences over r / 4096 then tell a smooth network from a piecewise linear one, where
            they vanish at most places; where answers have few digits, whether twice the step makes
            them four times as large, at the smallest size at which they do not drown.
            Second differences of an odd φ nearly cancel around zero, and differ by as much as they
            are at sizes that are far too small. What they differ by stops growing like r only where
            φ has bent: that finds the size for networks that are looked at there (`widened`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.oracles.noise import ROUNDINGS

Ask = Callable[[Array, str], Array]

SMALL_PART = 1e-3  # of the bends that a box of order one has, over its own size


@dataclass(frozen=True)
class ScaleOptions:
    """start: first size that is looked at. looks: up or down, at most; `up` or `down` is the factor
    to the next one, where nothing bends or all places differ. places, step: of a look, the step
    relative to the size. varied: relative difference between places below which it grows like the
    size; target: the difference that a size is extrapolated to. roundings: of an answer, below
    which a difference is none. patient: whether, where no smooth bend was found, smaller and
    smaller sizes are looked at: a network of steep neurons is flat at most places. doublings: of a
    size at which the differences still grow like it, at most."""

    start: float = 0.25
    looks: int = 8
    up: float = 300.0
    down: float = 8.0
    places: int = 4
    step: float = 2.0**-4
    varied: float = 0.5
    target: float = 1.3
    roundings: float = 300.0
    patient: bool = False
    doublings: int = 5


@dataclass(frozen=True)
class Scale:
    size: float  # of an entry
    smooth: bool
    affine: bool = False  # no bend was found at any size


def find_scale(
    ask: Ask,
    width: int,
    unit: float,
    rng: np.random.Generator,
    largest: float = np.inf,
    options: ScaleOptions | None = None,
) -> Scale:
    """The scale of a network whose inputs may have any norm up to `largest`."""
    options = ScaleOptions() if options is None else options
    if options.patient:
        found = find_scale(ask, width, unit, rng, largest, replace(options, patient=False))
        if found.smooth:
            return found
        options = replace(options, up=1.0 / options.down)
    limit = largest / np.sqrt(width)
    size, varied = min(options.start, limit / 2), 0.0
    bending = None  # the last size at which something bent
    for _ in range(options.looks):
        variation = _variation(ask, width, size, unit, rng, options)
        if variation is None and not options.patient and (bending is not None or size >= limit / 2):
            break
        if variation is None:
            size = min(size * options.up, limit / 2)
            continue
        bending, varied = size, variation
        if varied < options.varied:
            size = min(size * options.target / max(varied, 1e-3), limit)
            if varied < 0.02 and size < limit:  # too far to extrapolate: look again
                size /= 4.0
                continue
            return Scale(size, is_smooth(ask, width, size, unit, rng))
        size /= options.down
    if bending is None:
        return Scale(size, smooth=False, affine=True)
    # smaller ones drown: where answers have few digits, those of smooth networks, too
    return Scale(bending, is_smooth(ask, width, bending, unit, rng))


def _variation(
    ask: Ask,
    width: int,
    size: float,
    unit: float,
    rng: np.random.Generator,
    options: ScaleOptions,
) -> float | None:
    """How much second differences at some places differ, relative to them; None where there are
    none."""
    values, bends = _bend(ask, size * _look(width, rng, options))
    total = float(np.linalg.norm(bends))
    if total <= options.roundings * unit * float(np.linalg.norm(values)):
        return None
    spread = float(np.linalg.norm(bends - bends.mean(axis=0)))
    return spread / total * np.sqrt(options.places / (options.places - 1.0))


def _look(width: int, rng: np.random.Generator, options: ScaleOptions) -> Float[Array, "n d"]:
    """Places of a sphere, then one step further and one back, the same way at all of them; no point
    is outside."""
    places = rng.standard_normal((options.places, width))
    places *= np.sqrt(width) / np.linalg.norm(places, axis=1, keepdims=True)
    way = rng.standard_normal(width)
    way *= options.step * np.sqrt(width) / np.linalg.norm(way)
    return np.concatenate([places, places + way, places - way]) / (1.0 + options.step)


def _bend(
    ask: Ask, points: Float[Array, "n d"]
) -> tuple[Float[Array, "places k"], Float[Array, "places k"]]:
    """The answers at the places of a look, and their second differences."""
    middle, after, before = ask(points, "scale").reshape(3, len(points) // 3, -1)
    return middle, after + before - 2 * middle


def widened(
    ask: Ask,
    width: int,
    size: float,
    rng: np.random.Generator,
    largest: float = np.inf,
    options: ScaleOptions | None = None,
) -> float:
    """The size, doubled while what second differences differ by still grows like it."""
    options = ScaleOptions() if options is None else options
    look = _look(width, rng, options)

    def spread(size: float) -> float:
        _, bends = _bend(ask, size * look)
        return float(np.linalg.norm(bends - bends.mean(axis=0))) / size**3

    small = spread(size / 8.0)
    for _ in range(options.doublings):
        if 2.0 * size * np.sqrt(width) > largest or spread(size) < 0.5 * small:
            break
        size *= 2.0
    return size


def is_smooth(
    ask: Ask, width: int, size: float, unit: float, rng: np.random.Generator, sphere: bool = False
) -> bool:
    """Whether second differences over small steps are those of a smooth function: not zero; or,
    where answers have too few digits for small steps, four times as large over twice the step."""
    small = 2.0**-12  # relative step, over which rounding must be a small part of a bend
    fine = ROUNDINGS * unit < SMALL_PART * small**2
    looks, step = (3, small) if fine else (6, 0.08)
    places = rng.standard_normal((looks, 1, width))
    places *= size * np.sqrt(width) / (1 + step) / np.linalg.norm(places, axis=2, keepdims=True)
    ways = 0.5 * size * step * rng.standard_normal((looks, 1, width))
    points = places + np.array([0.0, 1.0, -1.0, 2.0, -2.0])[: 3 if fine else 5, None] * ways
    if sphere:
        points *= size * np.sqrt(width) / np.linalg.norm(points, axis=2, keepdims=True)
    answers = ask(points.reshape(-1, width), "scale").reshape(looks, points.shape[1], -1)
    bends = np.linalg.norm(answers[:, 1] + answers[:, 2] - 2 * answers[:, 0], axis=1)
    rounding = ROUNDINGS * unit * np.linalg.norm(answers, axis=2).max(axis=1)
    if fine:
        return bool(np.median(bends / np.maximum(rounding, TINY)) > 1.0)
    wide = np.linalg.norm(answers[:, 3] + answers[:, 4] - 2 * answers[:, 0], axis=1)
    alike = np.abs(np.log2(np.maximum(wide, TINY) / np.maximum(bends, TINY)) - 2.0) < 0.5
    return bool(np.mean(alike & (wide > rounding)) > 0.5)


def far_exponent(ask: Ask, width: int, radius: float, rng: np.random.Generator) -> float:
    """How second differences grow far from zero: 1 for a network that bends, 0 for one that goes
    flat, 2 for one with gates."""
    way = rng.standard_normal(width)
    way *= radius / np.linalg.norm(way)
    values = ask(np.array([0.0, 1.0, -1.0, 2.0, -2.0])[:, None] * way, "scale")
    first = float(np.linalg.norm(values[1] + values[2] - 2 * values[0]))
    second = float(np.linalg.norm(values[3] + values[4] - 2 * values[0]))
    return float(np.log2(max(second, TINY) / max(first, TINY)))
