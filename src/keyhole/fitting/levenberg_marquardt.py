"""Levenberg-Marquardt on the projected residual: dense for few unknowns, conjugate gradients else.

Step: (J^t J + damping D) s = J^t r, accepted when the cost falls. The damping shrinks when the
quadratic model predicted the decrease well and grows when it did not. In the matrix-free form the
linear systems are solved in single precision far from a solution: a step needs few digits, and the
gradient, the residual and the cost that decide about it are double.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.preconditioner import IDLE, kronecker
from keyhole.fitting.variable_projection import (
    Projection,
    dense_normal,
    gauss_newton,
    gradient,
    project,
)

AMPLE = 50.0  # times the floor: so many rows know the curvature to a few per cent
DENSE_UNKNOWNS = 320  # up to here a dense factorisation beats conjugate gradients
DENSE_PRECISE = 1100  # the same where rough steps near a solution were too rough
PRECISE_STEPS = 3  # times the conjugate gradient steps then allowed
ROUGH = 0.25  # share of the cost that a good step near a solution leaves at most
FINISHED = 1e-29  # relative squared residual at which rounding ends all progress
RESTING = 0.5  # share of such a residual that the last step worth taking leaves at most
STALL_WINDOW = 15  # iterations over which progress is judged
STALL_SHARE = 0.05  # a start that gained less than this share in the window is given up
COARSE = 1e-4  # relative squared residual above which single precision gives the same steps
LARGEST_SCORE = 1e9  # attention is hard long before; a step beyond is an error of its model
DAMPING = 1e-2  # at a random start
TRUSTED, DOUBTED = 0.75, 0.25  # share of the predicted decrease, from which the damping is lowered
LESS, MORE, MUCH_MORE = 5, 2, 4  # and raised; the last after a step that was not taken
SMALLEST_DAMPING = 1e-12
LARGEST_DAMPING = 1e10
FORCING = 0.3  # relative accuracy of a step far from the solution
FINEST = 1e-5  # and near it
MOST_CONJUGATE_STEPS = 150
REFINED = 1e-10  # a relative decrease below this, near a minimum, is the end


@dataclass(frozen=True)
class Limits:
    """When one start ends."""

    iterations: int = 200
    deadline: float = float("inf")  # time.monotonic() at which to stop
    stall_window: int = STALL_WINDOW
    stall_share: float = STALL_SHARE
    conjugate_steps: int = MOST_CONJUGATE_STEPS
    finished: float = FINISHED  # relative squared residual that is as good as zero
    precise: bool = False  # whether steps are exact from the first: near a solution


PATIENT = Limits()


@dataclass(frozen=True, eq=False)
class Descent:
    """Where one start ended."""

    at: Projection
    relative: float  # squared residual relative to the labels
    iterations: int
    products: int = 0  # Gauss-Newton products spent


def descend(
    rows: Rows, theta: Float[Array, "p m d"], limits: Limits = PATIENT, damping: float = DAMPING
) -> Descent:
    """From one start to a minimum, a stall, or the limits."""
    scale = label_power(rows)
    at = project(rows, theta)
    largest = LARGEST_SCORE / max(np.abs(rows.anchors).max() * np.abs(rows.tokens).max(), TINY)
    costs, precise = [at.cost], limits.precise
    system = _System(rows, at, scale, precise=precise)
    for iteration in range(limits.iterations):
        if at.cost <= limits.finished * scale:
            return Descent(at, at.cost / scale, iteration, system.products)
        if time.monotonic() > limits.deadline:
            return Descent(at, at.cost / scale, iteration, system.products)
        step, predicted = system.step(damping, limits.conjugate_steps)
        theta = at.theta + step
        trial = project(rows, theta) if np.abs(theta).max() <= largest else at  # not taken
        if at.cost <= FINISHED * scale and trial.cost > RESTING * at.cost:
            at = min(at, trial, key=attrgetter("cost"))
            return Descent(at, at.cost / scale, iteration + 1, system.products)
        gain = (at.cost - trial.cost) / max(predicted, TINY)
        if at.cost <= COARSE * scale and trial.cost > ROUGH * at.cost:
            precise = True  # ill-conditioned, or at a minimum: then the last steps count
        if trial.cost < at.cost:
            small = at.cost - trial.cost <= REFINED * at.cost
            at = trial
            system = _System(rows, at, scale, system.products, precise)
            if gain > TRUSTED:
                damping = max(damping / LESS, SMALLEST_DAMPING)
            elif gain < DOUBTED:
                damping *= MORE
            if small and predicted <= 2 * REFINED * at.cost:
                return Descent(at, at.cost / scale, iteration + 1, system.products)
        else:
            if predicted <= REFINED * at.cost:
                return Descent(at, at.cost / scale, iteration + 1, system.products)
            damping *= MUCH_MORE
            if damping > LARGEST_DAMPING:
                return Descent(at, at.cost / scale, iteration + 1, system.products)
        costs.append(at.cost)
        if _stalled(costs, limits):
            return Descent(at, at.cost / scale, iteration + 1, system.products)
    return Descent(at, at.cost / scale, limits.iterations, system.products)


def label_power(rows: Rows) -> float:
    """Sum of squares of the labels that count."""
    weighted = rows.targets * rows.weights[:, :, None]
    return max(float(np.einsum("nad,nad->", weighted, weighted)), TINY)


def _stalled(costs: list[float], limits: Limits) -> bool:
    window = limits.stall_window
    return len(costs) > window and costs[-1] > (1 - limits.stall_share) * costs[-1 - window]


class _System:
    """The damped normal equations at one point, reused for each damping tried. Few unknowns: formed
    and factored; with very many rows, those of a sample, as preconditioner of conjugate gradients
    on all rows. Many unknowns: a Kronecker product is the preconditioner."""

    def __init__(
        self, rows: Rows, at: Projection, scale: float, products: int = 0, precise: bool = False
    ) -> None:
        self.products = products
        self.relative = at.cost / scale
        self.slope = gradient(rows, at)
        size = self.slope.size
        formed = size <= (DENSE_PRECISE if precise else DENSE_UNKNOWNS)
        near = formed and self.relative <= COARSE
        self.dtype = np.float64 if precise or near else np.float32
        self.stretch = PRECISE_STEPS if precise else 1
        self.normal = None
        some = rows
        if formed:
            always_the_same = np.random.default_rng(0)
            some = rows.sample(at.theta.shape[1], AMPLE, always_the_same)
            of_some = at if some is rows else project(some, at.theta)
            normal = dense_normal(some.astype(self.dtype), of_some.astype(self.dtype))
            self.normal = normal.astype(np.float64) * (rows.counted / some.counted)
        self.direct = formed and some is rows
        if not self.direct:
            self.kronecker = kronecker(rows, at).astype(self.dtype)
            self.rows, self.at = rows.astype(self.dtype), at.astype(self.dtype)

    def step(self, damping: float, most: int) -> tuple[Array, float]:
        """The step and the decrease of the cost that the quadratic model predicts."""
        if self.direct:
            return self._direct_step(damping)
        return self._iterative_step(damping, most)

    def _direct_step(self, damping: float) -> tuple[Array, float]:
        assert self.normal is not None
        b = self.slope.ravel()
        diagonal = np.diagonal(self.normal)
        weight = damping * (diagonal + IDLE * max(float(diagonal.max()), TINY))
        s = _solver(self.normal + np.diag(weight))(b)
        predicted = float(2 * b @ s - s @ (self.normal @ s))
        return s.reshape(self.slope.shape), predicted

    def _iterative_step(self, damping: float, most: int) -> tuple[Array, float]:
        unit = self.kronecker.scale[None, :, None]

        def apply(v: Array) -> Array:
            self.products += 1
            return gauss_newton(self.rows, self.at, v)

        tolerance = min(FORCING, FORCING * self.relative**0.25)
        size = float(np.linalg.norm(self.slope)) or 1.0
        b = (self.slope / size).astype(self.dtype)
        s, curved = conjugate_gradients(
            lambda v: apply(v) + self.dtype(damping) * unit * v,
            self._preconditioner(damping, unit),
            b,
            max(tolerance, FINEST),
            most if self.relative > COARSE else MOST_CONJUGATE_STEPS * self.stretch,
        )
        square = float((unit * s * s).sum()) * damping
        predicted = float(2 * (b * s).sum()) - (float((s * curved).sum()) - square)
        return s.astype(np.float64) * size, predicted * size**2

    def _preconditioner(self, damping: float, unit: Array) -> Callable[[Array], Array]:
        if self.normal is None:
            return lambda v: self.kronecker.solve(damping, v).astype(self.dtype)
        weight = damping * np.broadcast_to(unit, self.slope.shape).ravel()
        solve = _solver(self.normal + np.diag(weight))
        return lambda v: solve(v.ravel()).reshape(v.shape).astype(self.dtype)


def _solver(system: Float[Array, "s s"]) -> Callable[[Array], Array]:
    """Solves a positive definite system, or the nearest thing to it."""
    try:
        factor = cho_factor(system, check_finite=False)
    except LinAlgError:
        return lambda b: np.asarray(np.linalg.lstsq(system, b, rcond=None)[0])
    return lambda b: np.asarray(cho_solve(factor, b, check_finite=False))


def conjugate_gradients(
    apply: Callable[[Array], Array],
    precondition: Callable[[Array], Array],
    b: Array,
    tolerance: float,
    most: int,
) -> tuple[Array, Array]:
    """The solution of apply(s) = b to a relative tolerance, and apply(s)."""
    s = np.zeros_like(b)
    r = b.copy()
    z = precondition(r)
    direction = z
    rho = float((r * z).sum())
    target = tolerance * float(np.linalg.norm(b))
    for _ in range(most):
        image = apply(direction)
        curvature = float((direction * image).sum())
        if not curvature > 0:
            break
        alpha = rho / curvature
        s = s + alpha * direction
        r = r - alpha * image
        if float(np.linalg.norm(r)) <= target:
            break
        z = precondition(r)
        fresh = float((r * z).sum())
        direction = z + (fresh / rho) * direction
        rho = fresh
    return s, b - r
