"""Attention scores by damped Gauss-Newton steps on the projected residual.

Statement.  From a start near enough, the scores of all heads reach a minimum of the residual that
            the best values leave.
Algebra.    `fitting.solver` moves them. Few unknowns: the normal matrix is formed (of a sample of
            the rows, where these are very many). Many: conjugate gradients with a Kronecker
            product as preconditioner, in single precision far from a solution: a step needs few
            digits, and the gradient, the residual and the cost that decide about it are double.
When it fails. From most starts: it stalls at a cost that is too large, and another start is due.
Source.     Golub, Pereyra (1973), Kaufman (1975) for the projection.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.conjugate_gradients import solve_preconditioned
from keyhole.fitting.preconditioner import IDLE_CURVATURE, approximate_normal
from keyhole.fitting.solver import (
    NormalSystem,
    Problem,
    Step,
    Stopping,
    System,
    factor_damped,
)
from keyhole.fitting.solver import descend as solve_problem
from keyhole.fitting.variable_projection import (
    DENSE_LIMIT,
    ProjectedFit,
    compute_gradient,
    form_normal,
    multiply_normal,
    project,
)

AMPLE = 50.0  # times the floor: so many rows know the curvature to a few per cent
COARSE_RESIDUAL = 1e-4  # relative squared residual above which single precision gives the steps
LARGEST_SCORE = 1e9  # attention is hard long before: a step beyond is an error of its model


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
class DescentEnd:
    """Where one start ended."""

    at: ProjectedFit
    relative: float  # squared residual relative to the labels
    iterations: int
    products: int = 0  # Gauss-Newton products spent


@dataclass
class Work:
    """Gauss-Newton products spent by one descent; its systems alone write into it."""

    products: int = 0


@dataclass(frozen=True, eq=False)
class FitState:
    """A fit on the way. precise: whether steps from here on are exact."""

    at: ProjectedFit
    cost: float
    precise: bool


def descend(
    rows: Rows, theta: Float[Array, "p m d"], options: DescentOptions | None = None
) -> DescentEnd:
    """From one start to a minimum, a stall, or the limits."""
    options = DescentOptions() if options is None else options
    scale, work = measure_label_power(rows), Work()
    largest = LARGEST_SCORE / max(np.abs(rows.anchors).max() * np.abs(rows.tokens).max(), TINY)

    def linearize(place: FitState) -> System:
        return make_system(rows, place, scale, options, work)

    def move(place: FitState, step: Array) -> FitState:
        moved = place.at.theta + step
        if not np.abs(moved).max() <= largest:
            return replace(place, cost=np.inf)
        trial = project(rows, moved)
        # slow progress near a solution: ill-conditioned, or at a minimum; the last steps count
        slow = place.cost <= COARSE_RESIDUAL * scale and trial.cost > 0.25 * place.cost
        return FitState(trial, trial.cost, place.precise or slow)

    start = project(rows, theta)
    stopping = Stopping(
        steps=options.iterations,
        target=options.finished * scale,
        window=options.stall_window,
        share=options.stall_share,
        damping=options.damping,
        hasty=True,
        deadline=options.deadline,
    )
    problem = Problem[FitState](lambda place: place.cost, linearize, move)
    end = solve_problem(problem, FitState(start, start.cost, options.precise), stopping)
    return DescentEnd(end.state.at, end.cost / scale, end.steps, work.products)


def measure_label_power(rows: Rows) -> float:
    """Sum of squares of the labels that count."""
    weighted = rows.targets * rows.weights[:, :, None]
    return max(float(np.einsum("nad,nad->", weighted, weighted)), TINY)


# -- The linear problem at one place ---------------------------------------------------------------


def make_system(
    rows: Rows, place: FitState, scale: float, options: DescentOptions, work: Work
) -> System:
    """Few unknowns: normal equations; with very many rows, or many unknowns, conjugate gradients
    on all rows, preconditioned by those of a sample or by a Kronecker product."""
    slope = compute_gradient(rows, place.at)
    near = place.cost <= COARSE_RESIDUAL * scale
    formed = slope.size <= (DENSE_LIMIT if place.precise else options.dense_unknowns)
    double = place.precise or (formed and near)
    dtype = np.float64 if double else np.float32
    normal = None
    if formed:
        always_the_same = np.random.default_rng(0)
        some = rows.sample(place.at.theta.shape[1], options.ample, always_the_same)
        of_some = place.at if some is rows else project(some, place.at.theta)
        normal = form_normal(some.astype(dtype), of_some.astype(dtype)).astype(np.float64)
        if some is rows:
            return _Direct(normal, slope, UNIT_ROUNDOFF if double else SINGLE_ROUNDOFF)
        normal *= rows.counted / some.counted
    steps = options.conjugate_steps
    if near:  # where a solution is near, as many as it takes
        steps = DescentOptions.conjugate_steps * (3 if place.precise else 1)
    # A step far from the solution needs half a digit, one near it five.
    tolerance = max(min(0.3, 0.3 * (place.cost / scale) ** 0.25), 1e-5)
    return _Iterative(rows, place.at, slope, normal, dtype, steps, tolerance, work)


class _Direct:
    """Normal equations of the scores; unknowns of next to no curvature (those of a dead head) are
    held as if they had a trace of it."""

    def __init__(self, normal: Array, slope: Array, roundoff: float) -> None:
        self.shape = slope.shape
        self.system = NormalSystem(normal, slope.ravel(), max(roundoff, IDLE_CURVATURE))

    def step(self, damping: float) -> Step:
        way = self.system.step(damping)
        return Step(way.step.reshape(self.shape), way.predicted)


class _Iterative:
    """Conjugate gradients on all rows."""

    def __init__(
        self,
        rows: Rows,
        at: ProjectedFit,
        slope: Array,
        normal: Array | None,
        dtype: type,
        steps: int,
        tolerance: float,
        work: Work,
    ) -> None:
        self.rows, self.at = rows.astype(dtype), at.astype(dtype)
        self.kronecker = approximate_normal(rows, at).astype(dtype)
        self.slope, self.normal, self.dtype = slope, normal, dtype
        self.steps, self.tolerance, self.work = steps, tolerance, work

    def step(self, damping: float) -> Step:
        unit = self.kronecker.scale[None, :, None]

        def apply(v: Array) -> Array:
            self.work.products += 1
            curved = multiply_normal(self.rows, self.at, v)
            return np.asarray(curved + self.dtype(damping) * unit * v)

        size = float(np.linalg.norm(self.slope)) or 1.0
        b: Array = (self.slope / size).astype(self.dtype)
        precondition = self._preconditioner(damping)
        s, curved = solve_preconditioned(apply, precondition, b, self.tolerance, self.steps)
        square = float((unit * s * s).sum()) * damping
        predicted = float(2 * (b * s).sum()) - (float((s * curved).sum()) - square)
        return Step(s.astype(np.float64) * size, predicted * size**2)

    def _preconditioner(self, damping: float) -> Callable[[Array], Array]:
        if self.normal is None:
            return lambda v: self.kronecker.solve(damping, v).astype(self.dtype)
        unit = self.kronecker.scale[None, :, None]
        weight = damping * np.broadcast_to(unit, self.slope.shape).ravel()
        ridge = SINGLE_ROUNDOFF * float(self.normal.diagonal().mean()) + TINY
        solve, _ = factor_damped(self.normal + np.diag(weight), ridge)
        return lambda v: solve(v.ravel()).reshape(v.shape).astype(self.dtype)
