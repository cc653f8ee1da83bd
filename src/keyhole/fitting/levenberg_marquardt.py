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
from keyhole.fitting.preconditioner import IDLE_CURVATURE, Kronecker, approximate_normal
from keyhole.fitting.variable_projection import (
    DENSE_LIMIT,
    Projection,
    compute_gradient,
    form_normal,
    multiply_normal,
    project,
)

AMPLE = 50.0  # times the floor: so many rows know the curvature to a few per cent
COARSE_RESIDUAL = 1e-4  # relative squared residual above which single precision gives the steps


@dataclass(frozen=True)
class DescentOptions:
    """When one descent ends, and how exact its steps are.

    iterations: at most. deadline: time.monotonic() at which to stop. stall_window, stall_share: a
    descent that gained less than this share of its cost in so many iterations is given up.
    finished: squared residual, relative to the labels, that is as good as zero. damping: at the
    start. precise: whether steps are exact from the first, as is right near a solution.
    conjugate_steps: in one iteration far from a solution. dense_unknowns: score entries up to
    which the normal matrix is formed far from a solution (DENSE_LIMIT near one). ample: times the
    floor: so many rows know the curvature to a few per cent, more are not needed for it.
    """

    iterations: int = 200
    deadline: float = float("inf")
    stall_window: int = 15
    stall_share: float = 0.05
    finished: float = 1e-29
    damping: float = 1e-2
    precise: bool = False
    conjugate_steps: int = 150
    dense_unknowns: int = 320
    ample: float = AMPLE


@dataclass(frozen=True, eq=False)
class Descent:
    """Where one start ended."""

    at: Projection
    relative: float  # squared residual relative to the labels
    iterations: int
    products: int = 0  # Gauss-Newton products spent


def descend(
    rows: Rows, theta: Float[Array, "p m d"], options: DescentOptions | None = None
) -> Descent:
    """From one start to a minimum, a stall, or the limits."""
    options = DescentOptions() if options is None else options
    scale = measure_label_power(rows)
    at = project(rows, theta)
    # Attention is hard long before a score of 1e9: a step beyond is an error of its model.
    largest = 1e9 / max(np.abs(rows.anchors).max() * np.abs(rows.tokens).max(), TINY)
    costs, damping, precise = [at.cost], options.damping, options.precise
    system = _System(rows, at, scale, options, precise)
    iteration, ended = 0, False
    smallest_decrease = 1e-10  # share of the cost: a smaller one, near a minimum, ends the descent
    while not ended and iteration < options.iterations:
        if at.cost <= options.finished * scale or time.monotonic() > options.deadline:
            break
        iteration += 1
        step, predicted = system.step(damping)
        theta = at.theta + step
        trial = project(rows, theta) if np.abs(theta).max() <= largest else at  # not taken
        if at.cost <= DescentOptions.finished * scale and trial.cost > 0.5 * at.cost:
            at = min(at, trial, key=attrgetter("cost"))  # rounding ends all progress
            break
        if at.cost <= COARSE_RESIDUAL * scale and trial.cost > 0.25 * at.cost:
            precise = True  # ill-conditioned, or at a minimum: then the last steps count
        if trial.cost < at.cost:
            gain = (at.cost - trial.cost) / max(predicted, TINY)
            small = at.cost - trial.cost <= smallest_decrease * at.cost
            at = trial
            system = _System(rows, at, scale, options, precise, system.products)
            if gain > 0.75:
                damping = max(damping / 5, 1e-12)
            elif gain < 0.25:
                damping *= 2
            ended = small and predicted <= 2 * smallest_decrease * at.cost
        else:
            damping *= 4
            ended = predicted <= smallest_decrease * at.cost or damping > 1e10
        costs.append(at.cost)
        ended = ended or _stalled(costs, options)
    return Descent(at, at.cost / scale, iteration, system.products)


def measure_label_power(rows: Rows) -> float:
    """Sum of squares of the labels that count."""
    weighted = rows.targets * rows.weights[:, :, None]
    return max(float(np.einsum("nad,nad->", weighted, weighted)), TINY)


def _stalled(costs: list[float], options: DescentOptions) -> bool:
    window = options.stall_window
    return len(costs) > window and costs[-1] > (1 - options.stall_share) * costs[-1 - window]


class _System:
    """The damped normal equations at one point, reused for each damping tried. Few unknowns: formed
    and factored; with very many rows, those of a sample, as preconditioner of conjugate gradients
    on all rows. Many unknowns: a Kronecker product is the preconditioner."""

    def __init__(
        self,
        rows: Rows,
        at: Projection,
        scale: float,
        options: DescentOptions,
        precise: bool,
        products: int = 0,
    ) -> None:
        self.products = products
        self.relative = at.cost / scale
        self.near = self.relative <= COARSE_RESIDUAL
        self.slope = compute_gradient(rows, at)
        self.conjugate_steps = options.conjugate_steps
        if self.near:  # where a solution is near, as many as it takes
            self.conjugate_steps = DescentOptions.conjugate_steps * (3 if precise else 1)
        formed = self.slope.size <= (DENSE_LIMIT if precise else options.dense_unknowns)
        self.dtype = np.float64 if precise or (formed and self.near) else np.float32
        self.normal: Array | None = None
        some = rows
        if formed:
            always_the_same = np.random.default_rng(0)
            some = rows.sample(at.theta.shape[1], options.ample, always_the_same)
            of_some = at if some is rows else project(some, at.theta)
            normal = form_normal(some.astype(self.dtype), of_some.astype(self.dtype))
            self.normal = normal.astype(np.float64) * (rows.counted / some.counted)
        self.direct = formed and some is rows
        self.rows, self.at = rows.astype(self.dtype), at.astype(self.dtype)
        self.kronecker: Kronecker | None = None
        if not self.direct:
            self.kronecker = approximate_normal(rows, at).astype(self.dtype)

    def step(self, damping: float) -> tuple[Array, float]:
        """The step and the decrease of the cost that the quadratic model predicts."""
        return self._direct_step(damping) if self.direct else self._iterative_step(damping)

    def _direct_step(self, damping: float) -> tuple[Array, float]:
        assert self.normal is not None
        b = self.slope.ravel()
        diagonal = np.diagonal(self.normal)
        weight = damping * (diagonal + IDLE_CURVATURE * max(float(diagonal.max()), TINY))
        s = _solver(self.normal + np.diag(weight))(b)
        predicted = float(2 * b @ s - s @ (self.normal @ s))
        return s.reshape(self.slope.shape), predicted

    def _iterative_step(self, damping: float) -> tuple[Array, float]:
        assert self.kronecker is not None
        unit = self.kronecker.scale[None, :, None]

        def apply(v: Array) -> Array:
            self.products += 1
            curved = multiply_normal(self.rows, self.at, v)
            return np.asarray(curved + self.dtype(damping) * unit * v)

        size = float(np.linalg.norm(self.slope)) or 1.0
        b = (self.slope / size).astype(self.dtype)
        # A step far from the solution needs half a digit, one near it five.
        tolerance = max(min(0.3, 0.3 * self.relative**0.25), 1e-5)
        s, curved = conjugate_gradients(
            apply,
            self._preconditioner(self.kronecker, damping),
            b,
            tolerance,
            self.conjugate_steps,
        )
        square = float((unit * s * s).sum()) * damping
        predicted = float(2 * (b * s).sum()) - (float((s * curved).sum()) - square)
        return s.astype(np.float64) * size, predicted * size**2

    def _preconditioner(self, near: Kronecker, damping: float) -> Callable[[Array], Array]:
        if self.normal is None:
            return lambda v: near.solve(damping, v).astype(self.dtype)
        unit = near.scale[None, :, None]
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
