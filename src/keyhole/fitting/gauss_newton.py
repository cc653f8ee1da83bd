"""Nonlinear least squares over any forward model: damped Gauss-Newton, dense or matrix-free.

Statement.  From a start near enough, min |residual(p)|^2 is reached quadratically where the
            residual at the minimum is zero, fast where it is small.
Queries.    None: the forward model holds the data.
Algebra.    At p, with residual r and derivative J, the step s = S z minimises
            |J S z + r|^2 + damping |z|^2, S the scaling in which all unknowns act about alike, and
            p becomes retract(p, s) if the cost falls: `fitting.solver`. Few unknowns: J is formed
            and S are its columns' norms. Many: LSMR on J S,
            solved as accurately as the residual deserves. Standard errors: (J^t J)^-1 from the
            singular values of J, or from solutions for random residuals; unit noise is scaled by
            the root mean square residual, degrees of freedom taken off.
            Budget, Ctrl-C and the number of steps end a fit with the best point so far.
When it fails. At a start in another valley the fit settles at a residual too large to be noise:
            `Fit.level` tells. Directions without trace in the residual stay where they are and
            have infinite standard errors.
Source.     Levenberg (1944), Marquardt (1963); Fong, Saunders (2011) for LSMR; Rokhlin,
            Tygert (2008) for scalings from a sketch.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from scipy.linalg import qr, solve_triangular
from scipy.sparse.linalg import LinearOperator, lsmr

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.bootstrap import smooth_errors
from keyhole.fitting.solver import (
    Ending,
    JacobianSystem,
    Problem,
    Step,
    Stopping,
    System,
    Trial,
    column_norms,
    descend,
)

P = TypeVar("P")  # a point: a flat vector, or whatever a model moves by `retract`


# -- What is fitted ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Named arrays side by side in one flat vector.

    >>> blocks = Blocks.of({"score": np.zeros((2, 2)), "value": np.ones(2)})
    >>> blocks.size, blocks.split(np.arange(6.0))["value"]
    (6, array([4., 5.]))
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> "Blocks":
        return cls(tuple((name, np.shape(array)) for name, array in arrays.items()))

    @property
    def slices(self) -> dict[str, slice]:
        ends = np.cumsum([0, *(int(np.prod(shape)) for _, shape in self.shapes)])
        places = zip(self.shapes, ends[:-1], ends[1:], strict=True)
        return {name: slice(int(low), int(high)) for (name, _), low, high in places}

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) for _, shape in self.shapes)

    def join(self, arrays: Mapping[str, Array]) -> Float[Array, " unknowns"]:
        return np.concatenate([np.ravel(arrays[name]) for name, _ in self.shapes])

    def split(self, vector: Any) -> dict[str, Any]:
        """The arrays in a vector of NumPy or torch."""
        slices = self.slices
        return {name: vector[slices[name]].reshape(shape) for name, shape in self.shapes}


@runtime_checkable
class Scaling(Protocol):
    """Units of the unknowns: step = S z, chosen so that J S has columns of about one size."""

    def apply(self, z: Array) -> Array: ...

    def adjoint(self, step: Array) -> Array: ...


@dataclass(frozen=True, eq=False)
class Linearization:
    """The residual at a point and its derivative by a step from there, both scaled by the standard
    errors of the data. `freedom`: independent unknowns, where steps have more entries.
    `eliminated`: unknowns that were solved for already, and are no part of a step."""

    residual: Float[Array, " numbers"]
    unknowns: int
    jvp: Callable[[Array], Array]
    vjp: Callable[[Array], Array]
    jacobian: Callable[[], Array] | None = None  # all of it, where that is cheap
    scaling: Scaling | None = None
    freedom: int | None = None
    eliminated: int = 0

    @property
    def cost(self) -> float:
        return float(self.residual @ self.residual)


@runtime_checkable
class ForwardModel(Protocol[P]):
    """What predicts the data from unknowns. A plain one has flat vectors as points, and retract is
    a sum; a model with points on a manifold brings its own."""

    def residual(self, point: P) -> Float[Array, " numbers"]:
        """Prediction minus data, in standard errors of the data."""
        ...

    def linearize(self, point: P) -> Linearization: ...

    def retract(self, point: P, step: Float[Array, " unknowns"]) -> P: ...


# -- How it is fitted --------------------------------------------------------------------------


@dataclass(frozen=True)
class FitOptions:
    """What a person might tune.

    steps: tried at most. damping: at the start; 0 for plain Gauss-Newton while that works.
    dense_unknowns: up to which the Jacobian is formed. accuracy: relative, of a matrix-free step
    far from the minimum (standard errors are solved for to its cube: weak directions come last).
    inner_steps: of LSMR in one step. tolerance: decrease of the cost,
    relative, below which the fit has settled. target: root mean square residual that is as good as
    zero. evaluations, seconds: the budget (a product with J or its transpose is one evaluation).
    probes: random residuals for matrix-free standard errors; 0 for no standard errors at all.
    finest: accuracy that no matrix-free step has to exceed, where many rough steps are cheaper.
    """

    steps: int = 50
    damping: float = 1e-3
    dense_unknowns: int = 1500
    accuracy: float = 0.01
    inner_steps: int = 500
    tolerance: float = 1e-10
    target: float = 0.0
    evaluations: float = np.inf
    seconds: float = np.inf
    probes: int = 8
    finest: float = 0.0


@dataclass(frozen=True)
class Progress:
    """What a progress callback is told after every step tried."""

    step: int
    cost: float  # best so far
    accepted: bool
    damping: float
    evaluations: int
    seconds: float


@dataclass(frozen=True, eq=False)
class Uncertainty:
    """Standard errors for unit noise on every number, and how well the unknowns are determined."""

    errors: Float[Array, " unknowns"]  # infinite where the data say nothing
    condition: float  # largest over smallest singular value, unknowns scaled; matrix-free: of J S
    rank: int  # independent unknowns that the data determine, eliminated ones included


@dataclass(frozen=True, eq=False)
class RowsFit(Generic[P]):
    """Where a fit ended."""

    point: P
    residual: Float[Array, " numbers"]
    ending: Ending
    evaluations: int
    history: tuple[Progress, ...]
    uncertainty: Uncertainty | None  # None where the fit was stopped, or probes = 0

    @property
    def cost(self) -> float:
        return float(self.residual @ self.residual)

    @property
    def level(self) -> float:
        """Root mean square residual per degree of freedom: about one where the model is right and
        the data's standard errors are."""
        rank = 0 if self.uncertainty is None else self.uncertainty.rank
        return float(np.sqrt(self.cost / max(len(self.residual) - rank, 1)))

    @property
    def standard_errors(self) -> Float[Array, " unknowns"] | None:
        """Of the unknowns, for noise of the size of the misfit."""
        return None if self.uncertainty is None else self.level * self.uncertainty.errors


def fit_least_squares(
    model: ForwardModel[P],
    start: P,
    options: FitOptions | None = None,
    *,
    rng: np.random.Generator | None = None,
    blocks: Blocks | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> RowsFit[P]:
    """From a start to a minimum, or as far as the budget reaches; never worse than the start.

    Matrix-free, `blocks` are the unknowns that standard errors are pooled over, and that a scaling
    is sketched for where the model brings none. `rng` draws the sketches and probes.

    >>> x = np.linspace(0.0, 1.0, 20)
    >>> model = FunctionModel(
    ...     lambda p: p[0] * np.exp(p[1] * x) - 2.0 * np.exp(-x),
    ...     lambda p: np.stack([np.exp(p[1] * x), p[0] * x * np.exp(p[1] * x)], axis=1),
    ... )
    >>> fit_least_squares(model, np.array([1.0, 0.0])).point.round(8).tolist()
    [2.0, -1.0]
    """
    options = FitOptions() if options is None else options
    rng = np.random.default_rng(0) if rng is None else rng
    meter = _Meter(options)
    best = start, np.asarray(model.residual(start))
    first = float(best[1] @ best[1])
    history = list[Progress]()
    uncertainty = None

    def linearize(state: tuple[P, Array]) -> System:
        return _build_system(meter.linearize(model, state[0]), options, blocks, rng, first)

    def move(state: tuple[P, Array], step: Array) -> tuple[P, Array]:
        point = model.retract(state[0], step)
        return point, meter.residual(model, point)

    def watch(trial: Trial[tuple[P, Array]]) -> None:
        nonlocal best
        best = trial.state
        history.append(meter.record(trial.number, trial.cost, trial.accepted, trial.damping))
        if progress is not None:
            progress(history[-1])

    problem = Problem(lambda state: float(state[1] @ state[1]), linearize, move)
    stopping = Stopping(
        steps=options.steps,
        target=options.target**2 * len(best[1]),
        tolerance=options.tolerance,
        damping=options.damping,
    )
    try:
        ending: Ending = descend(problem, best, stopping, watch).ending
        if ending in ("target", "settled") and options.probes > 0:
            at = meter.linearize(model, best[0])
            uncertainty = estimate_uncertainty(at, options, rng=rng, blocks=blocks)
    except _Spent:
        ending = "budget"
    except KeyboardInterrupt:
        ending = "interrupted"
    return RowsFit(*best, ending, meter.evaluations, tuple(history), uncertainty)


class _Spent(Exception):
    """The budget is spent."""


class _Meter:
    """Counts evaluations of the model, and ends them when the budget is spent."""

    def __init__(self, options: FitOptions) -> None:
        self.options, self.evaluations, self.begin = options, 0, time.monotonic()

    def pay(self, evaluations: int) -> None:
        seconds = time.monotonic() - self.begin
        if self.evaluations + evaluations > self.options.evaluations:
            raise _Spent
        if seconds > self.options.seconds:
            raise _Spent
        self.evaluations += evaluations

    def residual(self, model: ForwardModel[P], point: P) -> Array:
        self.pay(1)
        return np.asarray(model.residual(point))

    def linearize(self, model: ForwardModel[P], point: P) -> Linearization:
        self.pay(1)
        at = model.linearize(point)

        def jvp(step: Array) -> Array:
            self.pay(1)
            return at.jvp(step)

        def vjp(vector: Array) -> Array:
            self.pay(1)
            return at.vjp(vector)

        def jacobian() -> Array:
            self.pay(min(at.unknowns, len(at.residual)))
            assert at.jacobian is not None
            return at.jacobian()

        return replace(at, jvp=jvp, vjp=vjp, jacobian=None if at.jacobian is None else jacobian)

    def record(self, step: int, cost: float, accepted: bool, damping: float) -> Progress:
        seconds = time.monotonic() - self.begin
        return Progress(step, cost, accepted, damping, self.evaluations, seconds)


# -- One linear problem ------------------------------------------------------------------------


def _build_system(
    at: Linearization,
    options: FitOptions,
    blocks: Blocks | None,
    rng: np.random.Generator,
    first: float,
) -> System:
    if at.unknowns <= options.dense_unknowns:
        return JacobianSystem(at.residual, form_jacobian(at))
    if at.scaling is None and blocks is not None:
        at = replace(at, scaling=sketch_scaling(at, blocks, rng))
    # Steps get more accurate as the residual falls, so that convergence stays superlinear.
    accuracy = options.accuracy * float(np.sqrt(at.cost / first))
    return _MatrixFree(at, max(accuracy, options.finest), options.inner_steps)


class _MatrixFree:
    """LSMR on J S."""

    def __init__(self, at: Linearization, accuracy: float, inner_steps: int) -> None:
        self.at, self.accuracy, self.inner_steps = at, accuracy, inner_steps

    def step(self, damping: float) -> Step:
        right = -self.at.residual
        step = solve_linear(self.at, right, self.accuracy, self.inner_steps, damping).step
        after = self.at.residual + self.at.jvp(step)
        return Step(step, self.at.cost - float(after @ after))


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """The step of least squares, and the condition number of J S as far as LSMR saw it."""

    step: Float[Array, " unknowns"]
    condition: float


def solve_linear(
    at: Linearization, right: Array, accuracy: float, inner_steps: int, damping: float = 0.0
) -> LinearSolution:
    """The step s = S z that minimises |J s - right|^2 + damping |z|^2, by LSMR: until the gradient
    (or, where it can vanish, the residual) is `accuracy` times what it was."""

    def apply(z: Array) -> Array:
        return at.jvp(z if at.scaling is None else at.scaling.apply(z))

    def adjoint(vector: Array) -> Array:
        pulled = at.vjp(vector)
        return pulled if at.scaling is None else at.scaling.adjoint(pulled)

    size = float(np.linalg.norm(right))
    if size == 0.0:
        return LinearSolution(np.zeros(at.unknowns), 1.0)
    # LSMR measures the gradient relative to |A| |residual|; |A| is about sqrt(unknowns).
    slope = float(np.linalg.norm(adjoint(right))) / (size * np.sqrt(at.unknowns))
    operator: Any = LinearOperator(
        (len(right), at.unknowns), matvec=apply, rmatvec=adjoint, dtype=np.float64
    )
    found = lsmr(
        operator,
        right,
        damp=float(np.sqrt(damping)),
        atol=max(accuracy * min(slope, 1.0), UNIT_ROUNDOFF),
        btol=max(accuracy, UNIT_ROUNDOFF),
        conlim=0,
        maxiter=inner_steps,
    )
    z = np.asarray(found[0])
    return LinearSolution(z if at.scaling is None else at.scaling.apply(z), float(found[6]))


def form_jacobian(at: Linearization) -> Float[Array, "numbers unknowns"]:
    """The derivative as a matrix: the model's own, else by products with unit vectors."""
    if at.jacobian is not None:
        return at.jacobian()
    if at.unknowns <= len(at.residual):
        return np.stack([at.jvp(unit) for unit in np.eye(at.unknowns)], axis=1)
    return np.stack([at.vjp(unit) for unit in np.eye(len(at.residual))])


# -- Scalings ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BlockScaling:
    """One matrix for each block of unknowns, in their order."""

    matrices: tuple[Array, ...]

    def apply(self, z: Array) -> Array:
        return self._multiply(z, list(self.matrices))

    def adjoint(self, step: Array) -> Array:
        return self._multiply(step, [matrix.T for matrix in self.matrices])

    def _multiply(self, vector: Array, matrices: list[Array]) -> Array:
        parts = np.split(vector, np.cumsum([len(matrix) for matrix in matrices])[:-1])
        return np.concatenate([m @ part for m, part in zip(matrices, parts, strict=True)])


def sketch_scaling(
    at: Linearization, blocks: Blocks, rng: np.random.Generator, rows: int | None = None
) -> BlockScaling:
    """Scalings that make the columns of each block about orthonormal: the inverse triangle of the
    block's columns after `rows` random combinations of the numbers (by default twice as many as
    the largest block has unknowns, where there are so many numbers). One block of all unknowns is
    a scaling with which LSMR takes a few dozen steps, whatever J is."""
    sizes = [part.stop - part.start for part in blocks.slices.values()]
    rows = min(2 * max(sizes), len(at.residual)) if rows is None else rows
    draws = rng.standard_normal((rows, len(at.residual))) / np.sqrt(rows)
    sketch = np.stack([at.vjp(draw) for draw in draws])
    matrices = []
    for part in blocks.slices.values():
        columns = sketch[:, part]
        norms = column_norms(columns)
        # A ridge holds directions that the sketch does not see.
        padded = np.vstack([columns / norms, np.sqrt(UNIT_ROUNDOFF) * np.eye(len(norms))])
        triangle = qr(padded, mode="r", check_finite=False)[0][: len(norms)]
        inverse = solve_triangular(triangle, np.eye(len(norms)), check_finite=False)
        matrices.append(np.asarray(inverse / norms[:, None]))
    return BlockScaling(tuple(matrices))


# -- Standard errors ---------------------------------------------------------------------------


def estimate_uncertainty(
    at: Linearization,
    options: FitOptions | None = None,
    *,
    rng: np.random.Generator,
    blocks: Blocks | None = None,
) -> Uncertainty:
    """Standard errors of the unknowns for unit noise on every number (the Fisher information)."""
    options = FitOptions() if options is None else options
    if at.unknowns <= options.dense_unknowns:
        return _dense_uncertainty(form_jacobian(at), at.eliminated)
    if at.scaling is None and blocks is not None:
        at = replace(at, scaling=sketch_scaling(at, blocks, rng))
    squares, condition = np.zeros(at.unknowns), 1.0
    for _ in range(options.probes):
        noise = rng.standard_normal(len(at.residual))
        found = solve_linear(at, noise, options.accuracy**3, options.inner_steps)
        squares += found.step**2 / options.probes
        condition = max(condition, found.condition)
    errors = np.sqrt(squares)
    parts = [slice(None)] if blocks is None else list(blocks.slices.values())
    for part in parts:
        errors[part] = smooth_errors(errors[part][None])[0]
    rank = at.unknowns if at.freedom is None else at.freedom
    return Uncertainty(errors, condition, rank + at.eliminated)


def _dense_uncertainty(jacobian: Float[Array, "numbers unknowns"], eliminated: int) -> Uncertainty:
    norms = column_norms(jacobian)
    triangle = qr(jacobian / norms, mode="r", check_finite=False)[0][: jacobian.shape[1]]
    _, sizes, right = np.linalg.svd(triangle)
    sizes = np.pad(sizes, (0, len(right) - len(sizes)))  # fewer numbers than unknowns
    seen = sizes > max(jacobian.shape) * UNIT_ROUNDOFF * sizes[0]
    variances = np.einsum("ki,k->i", right[seen] ** 2, 1.0 / sizes[seen] ** 2)
    unseen = (right[~seen] ** 2).sum(axis=0) > np.sqrt(UNIT_ROUNDOFF)
    errors = np.where(unseen, np.inf, np.sqrt(variances) / norms)
    condition = float(sizes[0] / sizes[-1]) if sizes[-1] > 0 else np.inf
    return Uncertainty(errors, condition, int(seen.sum()) + eliminated)


# -- Models written as functions ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FunctionModel:
    """A forward model of flat vectors from a residual and its Jacobian, both functions."""

    function: Callable[[Array], Array]
    jacobian: Callable[[Array], Array]

    def residual(self, point: Array) -> Array:
        return self.function(point)

    def linearize(self, point: Array) -> Linearization:
        matrix = self.jacobian(point)
        return Linearization(
            self.function(point),
            len(point),
            lambda step: matrix @ step,
            lambda vector: matrix.T @ vector,
            lambda: matrix,
        )

    def retract(self, point: Array, step: Array) -> Array:
        return point + step
