"""Second-order least squares for templates: one step of it, driven by `fitting.solver`.

Statement.  From a start, the weights move to a minimum of |r|^2, r the residuals in standard
            errors; in slow, curved valleys faster than plain Gauss-Newton.
Queries.    None.
Algebra.    (J^t J + damping m I) v = -J^t r with m the mean diagonal entry of J^t J: symmetries of
            the weights leave J^t J singular, and the identity keeps them where they are. Geodesic
            acceleration follows the curvature of the valley: r'' along v from one more evaluation,
            (J^t J + damping m I) a = -J^t r'', and the step is v + a / 2, taken only where a is no
            more than a few times v.
            Where the residuals have become small beside the answers, what is left lies along a few
            directions that hardly show (how large the stream before a norm is shows through its
            epsilon alone), at the bottom of a curved valley: any step that helps is tiny, since one
            along the tangent climbs the walls. There a step may climb first: further ones with more
            damping, which move across the valley and not along it, lead back to its bottom, and
            what counts is the cost there. J^t J has lost the digits that matter by then; steps come
            from the triangle of J.
When it fails. It settles in a wrong place: another start is the way out (`search.py`).
Source.     Transtrum and Sethna (2012), "Improvements to the Levenberg-Marquardt algorithm"; steps
            that may climb: Chamberlain, Powell, Lemarechal and Pedersen (1982), "The watchdog
            technique".
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr, solve_triangular
from scipy.linalg.lapack import dtpqrt

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.solver import Problem, Step, Stopping, descend, factor_damped
from keyhole.learners.template.forward import Residuals

SMALL = 1e-9  # cost over the answers' own, from which the fit follows the bottom of its valley
LONGEST = 4.0  # of the acceleration beside the step: beyond it the step is too long to be trusted
AHEAD = 0.1  # share of the step at which the curvature is looked up
START = 1e-2  # damping that a fit begins with, in mean squares of a column
ALONG = 1e-10  # the same for a fit along a valley
ACROSS = 1e4  # damping of the steps back to the bottom of a valley over that of the step along it
PACE = 5.0  # factor by which the damping along a valley changes
BLOCK = 64  # columns that a triangle is updated with at once
SETTLED = 1e-9  # share of the cost: a step that promises less is none


@dataclass(frozen=True, eq=False)
class Point:
    """Weights with their residuals."""

    weights: Float[Array, " unknowns"]
    residual: Float[Array, " numbers"]

    @property
    def cost(self) -> float:
        return float(self.residual @ self.residual)


class AcceleratedSystem:
    """The step at one point for each damping. `free`: unknowns that move."""

    def __init__(self, residuals: Residuals, point: Point, free: Array) -> None:
        self.residuals, self.point, self.free = residuals, point, free
        self.tall = find_slopes(residuals, point, free)
        self.unit = find_unit(self.tall)
        self.normal = self.tall.T @ self.tall

    def step(self, damping: float) -> Step:
        factor, _ = factor_damped(self.normal, (damping + UNIT_ROUNDOFF) * self.unit)
        residual = self.point.residual
        velocity = -factor(self.tall.T @ residual)
        along = self.tall @ velocity
        after = residual + along
        predicted = float(residual @ residual - after @ after)
        blur = 2.0 / AHEAD**2  # rounding of the curvature, the residuals' own being one
        if self.point.cost <= blur**2 * len(residual):
            return Step(spread(velocity, self.free), predicted)
        ahead = self.residuals(self.point.weights + AHEAD * spread(velocity, self.free))
        curvature = 2.0 / AHEAD * ((ahead - residual) / AHEAD - along)
        if np.isfinite(curvature).all():
            acceleration = -factor(self.tall.T @ curvature)
            if np.linalg.norm(acceleration) <= LONGEST * np.linalg.norm(velocity):
                return Step(spread(velocity + 0.5 * acceleration, self.free), predicted)
        return Step(np.full(len(self.free), np.nan), max(predicted, TINY))


class TriangularSystem:
    """The same without acceleration, from the triangle of the Jacobian beside the residual: small
    slopes keep their digits."""

    def __init__(self, residuals: Residuals, point: Point, free: Array) -> None:
        tall = find_slopes(residuals, point, free)
        self.point, self.free, self.unit = point, free, find_unit(tall)
        whole = np.column_stack([tall, point.residual])
        triangle = qr(whole, mode="r", overwrite_a=True, check_finite=False)[0]
        self.triangle = np.zeros((whole.shape[1], whole.shape[1]))
        self.triangle[: len(triangle)] = triangle[: whole.shape[1]]

    def step(self, damping: float) -> Step:
        count = self.triangle.shape[1] - 1
        ridge = np.sqrt(damping * self.unit) * np.eye(count + 1)
        ridge[count, count] = 0.0
        damped = dtpqrt(count + 1, min(BLOCK, count + 1), self.triangle, ridge)[0]
        step = -solve_triangular(damped[:count, :count], damped[:count, count], check_finite=False)
        return Step(spread(step, self.free), self.point.cost - float(damped[count, count] ** 2))


def find_slopes(residuals: Residuals, point: Point, free: Array) -> Float[Array, "numbers free"]:
    """The derivative by the unknowns that move."""
    tall = residuals.jacobian(point.weights)[:, free]
    if not np.isfinite(tall).all():
        raise ArithmeticError("the derivative of the template is not finite")
    return np.asarray(tall)


def find_unit(tall: Float[Array, "numbers free"]) -> float:
    """What damping is measured in: the mean square norm of a column."""
    return max(float(np.mean(np.einsum("ij,ij->j", tall, tall))), TINY)


def spread(step: Float[Array, " free"], free: Array) -> Float[Array, " unknowns"]:
    """A step of the unknowns that move as one of all."""
    whole = np.zeros(len(free))
    whole[free] = step
    return whole


@dataclass(frozen=True, eq=False)
class Fitted:
    """Weights at the end of a descent, the mean square of their residuals in standard errors."""

    weights: Float[Array, " unknowns"]
    loss: float
    steps: int
    settled: bool


class OutOfTime(Exception):
    """Raised within a fit, ends it."""


def fit(
    residuals: Residuals,
    start: Float[Array, " unknowns"],
    *,
    steps: int,
    target: float,
    free: Array | None = None,
    patience: int = 0,
    until: float = np.inf,
    watch: Callable[[float], None] | None = None,
) -> Fitted:
    """From a start to a minimum, to a mean square residual of `target`, or to the limits.

    Args:
        residuals: of the template, in standard errors.
        start: weights.
        steps: tried at most.
        target: mean square of the residuals that is as good as exact.
        free: which unknowns move; None for all.
        patience: given up where so many steps do not halve the cost; 0 for never. Steps along the
            bottom of a valley are not counted.
        until: CPU time of the process (`time.process_time`) at which it ends.
        watch: called with the mean square residual after each step.
    """
    free = np.ones(len(start), dtype=bool) if free is None else free
    numbers, best = max(residuals.numbers, 1), Point(start, residuals(start))
    goal, taken = target * numbers, 0

    def move(point: Point, step: Array) -> Point:
        if not np.isfinite(step).all():
            return Point(point.weights, np.full(numbers, np.inf))
        return Point(point.weights + step, residuals(point.weights + step))

    def look(point: Point) -> None:
        nonlocal best, taken
        best, taken = point, taken + 1
        if watch is not None:
            watch(point.cost / numbers)
        if time.process_time() > until:
            raise OutOfTime

    problem = Problem[Point](
        cost=lambda point: point.cost,
        linearize=lambda point: AcceleratedSystem(residuals, point, free),
        move=move,
    )
    small = max(goal, SMALL * residuals.size * numbers)
    stopping = Stopping(
        steps=steps, target=small, damping=START, tolerance=SETTLED,
        window=patience, share=0.5, hasty=True,
    )  # fmt: skip
    settled = False
    try:
        ended = descend(problem, best, stopping, lambda trial: look(trial.state))
        settled = ended.ending == "settled"
        if ended.ending == "target":
            more, settled = follow(residuals, best, move, free, steps - taken, goal, look)
            taken = ended.steps + more
    except OutOfTime:
        pass
    return Fitted(best.weights, best.cost / numbers, taken, settled)


def follow(
    residuals: Residuals,
    best: Point,
    move: Callable[[Point, Array], Point],
    free: Array,
    steps: int,
    goal: float,
    look: Callable[[Point], None],
) -> tuple[int, bool]:
    """Along the bottom of a valley; the number of steps, and whether nothing more is to be gained.

    Args:
        residuals: of the template.
        best: a point of small cost.
        move: the point after a step.
        free: which unknowns move.
        steps: at most, those back to the bottom included.
        goal: cost that is as good as zero.
        look: called with the best point after each attempt.
    """
    taken, damping = 0, ALONG
    system: TriangularSystem | None = None
    while taken < steps and best.cost > goal and damping < 1.0:
        system = TriangularSystem(residuals, best, free) if system is None else system
        step = system.step(damping)
        if step.predicted <= SETTLED * best.cost:
            return taken, True
        trial, before = move(best, step.step), np.inf
        taken += 1
        while 0.5 * best.cost < trial.cost < 0.5 * before and taken < steps:
            before = trial.cost
            back = TriangularSystem(residuals, trial, free).step(ACROSS * damping)
            trial = move(trial, back.step)
            taken += 1
        if trial.cost < best.cost:
            best, system, damping = trial, None, damping / PACE
        else:
            damping *= PACE
        look(best)
    return taken, damping >= 1.0
