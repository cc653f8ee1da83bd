"""Second-order least squares for templates: one step of it, driven by `fitting.solver`.

Statement.  From a start, the weights move to a minimum of |r|^2, r the residuals in standard
            errors; in slow, curved valleys faster than plain Gauss-Newton.
Queries.    None.
Algebra.    (J^t J + damping m I) v = -J^t r with m the mean diagonal entry of J^t J: symmetries of
            the weights leave J^t J singular, and the identity keeps them where they are. Geodesic
            acceleration follows the curvature of the valley: r'' along v from one more evaluation,
            (J^t J + damping m I) a = -J^t r'', and the step is v + a / 2, taken only where a is no
            more than a few times v. Where the residuals have become small beside those at the
            start, J^t J has lost the digits that matter, and the singular values of J are used.
When it fails. It settles in a wrong place: another start is the way out (`search.py`).
Source.     Transtrum and Sethna (2012), "Improvements to the Levenberg-Marquardt algorithm".
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr, svd

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.solver import Problem, Step, Stopping, Trial, descend, factor_damped
from keyhole.learners.template.forward import Residuals

SMALL = 1e-13  # cost over the answers' own, below which J^t J has too few digits
LONGEST = 4.0  # of the acceleration beside the step: beyond it the step is too long to be trusted
AHEAD = 0.1  # share of the step at which the curvature is looked up


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

    def __init__(self, residuals: Residuals, point: Point, free: Array, exact: bool) -> None:
        self.residuals, self.point, self.free = residuals, point, free
        self.tall = residuals.jacobian(point.weights)[:, free]
        if not np.isfinite(self.tall).all():
            raise ArithmeticError("the derivative of the template is not finite")
        self.unit = max(float(np.mean(np.einsum("ij,ij->j", self.tall, self.tall))), TINY)
        self.exact = exact
        if exact:
            basis, triangle = qr(self.tall, mode="economic", check_finite=False)
            left, self.values, self.right = svd(triangle, full_matrices=False, check_finite=False)
            self.left = basis @ left
        else:
            self.normal = self.tall.T @ self.tall

    def solve(self, damping: float) -> Callable[[Array], Array]:
        """Maps a residual to the damped step against it."""
        if self.exact:
            gains = self.values / (self.values**2 + damping * self.unit + TINY)
            return lambda residual: -(self.right.T @ (gains * (self.left.T @ residual)))
        solve, _ = factor_damped(self.normal, (damping + UNIT_ROUNDOFF) * self.unit)
        return lambda residual: -solve(self.tall.T @ residual)

    def step(self, damping: float) -> Step:
        solve, residual = self.solve(damping), self.point.residual
        velocity = solve(residual)
        along = self.tall @ velocity
        after = residual + along
        predicted = float(residual @ residual - after @ after)
        blur = 2.0 / AHEAD**2  # rounding of the curvature, the residuals' own being one
        if self.point.cost <= blur**2 * len(residual):
            return Step(self._spread(velocity), predicted)
        ahead = self.residuals(self.point.weights + AHEAD * self._spread(velocity))
        curvature = 2.0 / AHEAD * ((ahead - residual) / AHEAD - along)
        if np.isfinite(curvature).all():
            acceleration = solve(curvature)
            if np.linalg.norm(acceleration) <= LONGEST * np.linalg.norm(velocity):
                return Step(self._spread(velocity + 0.5 * acceleration), predicted)
        return Step(np.full(len(self.free), np.nan), max(predicted, TINY))

    def _spread(self, step: Array) -> Array:
        whole = np.zeros(len(self.free))
        whole[self.free] = step
        return whole


@dataclass(frozen=True, eq=False)
class Fitted:
    """Weights at the end of a descent, the mean square of their residuals in standard errors."""

    weights: Float[Array, " unknowns"]
    loss: float
    steps: int
    settled: bool


def fit(
    residuals: Residuals,
    start: Float[Array, " unknowns"],
    *,
    steps: int,
    target: float,
    free: Array | None = None,
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
        until: CPU time of the process (`time.process_time`) at which it ends.
        watch: called with the mean square residual after each step.
    """
    free = np.ones(len(start), dtype=bool) if free is None else free
    numbers = max(residuals.numbers, 1)
    size = sum(float(np.sum((one.answers / one.errors) ** 2)) for one in residuals.data)
    damping = 1e-2

    def make(weights: Array) -> Point:
        return Point(weights, residuals(weights))

    def move(point: Point, step: Array) -> Point:
        if not np.isfinite(step).all():
            return Point(point.weights, np.full(numbers, np.inf))
        return make(point.weights + step)

    problem = Problem[Point](
        cost=lambda point: point.cost,
        linearize=lambda point: AcceleratedSystem(
            residuals, point, free, exact=point.cost < SMALL * size
        ),
        move=move,
    )

    class OutOfTime(Exception):
        pass

    best = make(start)

    def look(trial: Trial[Point]) -> None:
        nonlocal damping, best
        damping, best = trial.damping, trial.state
        if watch is not None:
            watch(trial.cost / numbers)
        if time.process_time() > until:
            raise OutOfTime

    taken, settled = 0, False
    while taken < steps and best.cost > target * numbers:
        before = best.cost
        stopping = Stopping(
            steps=steps - taken, target=target * numbers, damping=damping, tolerance=1e-9
        )
        try:
            ended = descend(problem, best, stopping, look)
        except OutOfTime:
            break
        taken += ended.steps
        # the loop takes a small cost for rounding: from where it is now it may go on
        if ended.ending != "settled" or not best.cost < 0.5 * before:
            settled = ended.ending == "settled"
            break
    return Fitted(best.weights, best.cost / numbers, taken, settled)
