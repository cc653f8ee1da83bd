"""The one damped Gauss-Newton loop: all nonlinear least squares of the package go through it.

Statement.  From a start near enough, min |r(state)|^2 is reached, quadratically where r vanishes
            there; the cost never rises.
Queries.    None: the problem holds the data.
Algebra.    At a state, with residual r and derivative J, the step s = S z minimises
            |J S z + r|^2 + damping |z|^2, S the scaling in which all unknowns act about alike.
            The state moves if the cost falls. The damping follows the ratio of the decrease to
            what the linear model promised (Nielsen): times 1 - (2 ratio - 1)^3, no less than a
            tenth, where it fell; times 2, 4, 8, ... where it did not.
            How the step is found is the problem's choice: from its Jacobian (`JacobianSystem`),
            from normal equations (`NormalSystem`), by products alone (`fitting.gauss_newton`), or
            its own way. Many small problems of one shape move side by side (`descend_many`).
Stopping.   A fit has settled where a step promises, or brings, next to nothing: less than
            `tolerance` of the cost. It has stalled where a window of steps brought less than a
            share. It has reached its target where the cost is no more than that of the noise.
When it fails. From a start in another valley it settles at a cost too large to be noise.
Source.     Levenberg (1944), Marquardt (1963); Nielsen (1999) for the damping.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float

GREED = 4.0  # factor by which an eager descent changes its damping

S = TypeVar("S")  # a state: the unknowns and what was computed there
Ending = Literal["target", "settled", "stalled", "steps", "budget", "interrupted"]


@dataclass(frozen=True)
class Step:
    """A step, and the decrease of the cost that the linear model promises for it."""

    step: Array
    predicted: float


@runtime_checkable
class System(Protocol):
    """The linear problem at one state, solved for each damping tried."""

    def step(self, damping: float) -> Step: ...


@dataclass(frozen=True, eq=False)
class Problem(Generic[S]):
    """What is minimised.

    cost: of a state, the sum of the squares of its residuals, in units of the noise where that is
    known. linearize: the linear problem at a state. move: the state after a step; a state that
    must not be taken has an infinite cost.
    """

    cost: Callable[[S], float]
    linearize: Callable[[S], System]
    move: Callable[[S, Array], S]


@dataclass(frozen=True)
class Stopping:
    """When a descent ends.

    steps: tried at most. target: cost that is as good as zero: that of the noise. tolerance:
    decrease of the cost, relative, promised or reached in one step, below which it has settled.
    window, share: given up where so many steps took less than this share off the cost; a window of
    0 for never. hasty: steps that did not help count in the window, too. damping: at the start, in
    units in which every unknown acts alike; 0 for plain Gauss-Newton while that works. eager: the
    damping is quartered after every step that helped and quadrupled after every other, whatever was
    promised: for long curved valleys, along which the linear model promises too much at any
    damping. deadline: time.monotonic() at which it ends.
    """

    steps: int = 50
    target: float = 0.0
    tolerance: float = 1e-10
    window: int = 0
    share: float = 0.0
    damping: float = 1e-3
    eager: bool = False
    hasty: bool = False
    deadline: float = float("inf")


@dataclass(frozen=True)
class Trial(Generic[S]):
    """What a step came to: the best state so far, its cost, the damping that follows."""

    number: int
    state: S
    cost: float
    accepted: bool
    damping: float


@dataclass(frozen=True, eq=False)
class Descent(Generic[S]):
    """Where a descent ended, after so many steps tried."""

    state: S
    cost: float
    ending: Ending
    steps: int


def descend(
    problem: Problem[S],
    start: S,
    stopping: Stopping | None = None,
    watch: Callable[[Trial[S]], None] | None = None,
) -> Descent[S]:
    """From a start to a minimum, a stall or the limits; never worse than the start.

    Args:
        problem: cost, linear problems and moves.
        start: a state.
        stopping: when to end.
        watch: called after every step tried.

    Raises:
        ArithmeticError: a derivative is not finite.

    >>> problem = Problem(
    ...     lambda x: float((x @ x - 2.0) ** 2),
    ...     lambda x: JacobianSystem(np.array([x @ x - 2.0]), 2.0 * x[None]),
    ...     lambda x, step: x + step,
    ... )
    >>> descend(problem, np.array([1.0])).state.round(6).tolist()
    [1.414214]
    """
    stopping = Stopping() if stopping is None else stopping
    state, cost = start, problem.cost(start)
    costs, damping, growth = [cost], stopping.damping, 2.0
    system: System | None = None
    ending: Ending = "steps"
    tried = 0
    while tried < stopping.steps and ending == "steps":
        limit = _find_limit(costs, stopping)
        if limit is not None:
            ending = limit
            break
        system = problem.linearize(state) if system is None else system
        way = system.step(damping)
        trial = problem.move(state, way.step)
        found = problem.cost(trial)
        tried += 1
        accepted = found < cost  # not so if NaN: the model overflowed
        if _has_settled(costs, found, way.predicted, stopping.tolerance):
            ending = "settled"
        if accepted:
            ratio = 1.0 if stopping.eager else (cost - found) / max(way.predicted, TINY)
            damping *= 1.0 / GREED if stopping.eager else shrink(min(ratio, 1.0))
            state, cost, system, growth = trial, found, None, 2.0
        else:
            damping = max(damping, stopping.tolerance) * (GREED if stopping.eager else growth)
            growth *= 2.0
        if accepted or stopping.hasty:
            costs.append(cost)
        if watch is not None:
            watch(Trial(tried, state, cost, accepted, damping))
    return Descent(state, cost, ending, tried)


def shrink(ratio: float) -> float:
    """Factor of the damping after a step that brought this much of what was promised."""
    return float(max(0.1, 1.0 - (2.0 * ratio - 1.0) ** 3))


def _find_limit(costs: list[float], stopping: Stopping) -> Ending | None:
    """Why no further step is tried, if there is a reason."""
    if costs[-1] <= stopping.target:
        return "target"
    window = stopping.window
    if 0 < window < len(costs) and costs[-1] > (1.0 - stopping.share) * costs[-1 - window]:
        return "stalled"
    return "budget" if time.monotonic() > stopping.deadline else None


def _has_settled(costs: list[float], found: float, predicted: float, tolerance: float) -> bool:
    """Whether a step that came to the cost `found` promised, or brought, next to nothing."""
    decrease, little = costs[-1] - found, tolerance * costs[-1]
    # Near a residual of zero rounding makes the model promise what no step keeps.
    rounding = costs[-1] <= UNIT_ROUNDOFF * costs[0] and not decrease > 0.5 * predicted
    return bool(rounding or predicted <= little or 0.0 < decrease <= little)


# -- Linear problems ---------------------------------------------------------------------------


class NormalSystem:
    """Normal equations J^t J s = -J^t r, scaled to a diagonal of one.

    right: -J^t r, one column per set of unknowns with the same matrix. roundoff: relative error of
    the entries of the matrix.
    """

    def __init__(self, normal: Array, right: Array, roundoff: float = UNIT_ROUNDOFF) -> None:
        diagonal = normal.diagonal()
        self.sizes = np.sqrt(np.maximum(diagonal, roundoff * diagonal.max() + TINY))
        self.scaled = normal / self.sizes[:, None]
        self.scaled /= self.sizes
        self.right = (right.T / self.sizes).T
        self.least = roundoff * len(normal)

    def step(self, damping: float) -> Step:
        solve, ridge = factor_damped(self.scaled, damping + self.least)
        z = solve(self.right)
        predicted = float((self.right * z).sum() + ridge * (z * z).sum())
        return Step(np.asarray((z.T / self.sizes).T), predicted)


class JacobianSystem:
    """The residual and its Jacobian with columns of norm one; the solution of the normal equations
    is refined once."""

    def __init__(
        self, residual: Float[Array, " numbers"], jacobian: Float[Array, "numbers unknowns"]
    ) -> None:
        self.residual = residual
        self.norms = column_norms(jacobian)
        self.scaled = jacobian / self.norms
        self.normal = self.scaled.T @ self.scaled

    def step(self, damping: float) -> Step:
        least = damping + UNIT_ROUNDOFF * len(self.normal)
        solve, _ = factor_damped(self.normal, least)
        z = solve(-self.scaled.T @ self.residual)
        left = self.scaled.T @ (self.residual + self.scaled @ z) + least * z
        z = z - solve(left)
        after = self.residual + self.scaled @ z
        predicted = float(self.residual @ self.residual - after @ after)
        return Step(np.asarray(z / self.norms), predicted)


def factor_damped(normal: Array, ridge: float) -> tuple[Callable[[Array], Array], float]:
    """Solves normal equations with a ridge; one too small for rounding is raised until it does.
    The solver, and the ridge that was taken."""
    if not np.isfinite(normal).all():
        raise ArithmeticError("the derivative of the forward model is not finite")
    system = normal.copy()
    place = np.diag_indices(len(system))
    factor = None
    while factor is None:
        system[place] = normal[place] + ridge
        try:
            factor = cho_factor(system, check_finite=False)
        except LinAlgError:
            ridge *= 16.0
    return partial(cho_solve, factor, check_finite=False), ridge


def column_norms(jacobian: Array) -> Array:
    """Norms of the columns; one for a column of zeros, which then stays zero."""
    norms = np.linalg.norm(jacobian, axis=0)
    return np.where(norms > 0, norms, 1.0)


# -- Many small problems at once ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ManyProblems:
    """Problems of one shape side by side; the leading axes number them.

    linearize: residuals and Jacobians at the unknowns. limit: of a step in each unknown.
    """

    linearize: Callable[[Array], tuple[Float[Array, "*p n"], Float[Array, "*p n u"]]]
    residual: Callable[[Array], Float[Array, "*p n"]]
    limit: Float[Array, " u"]


def descend_many(
    problems: ManyProblems, start: Float[Array, "*p u"], stopping: Stopping | None = None
) -> tuple[Float[Array, "*p u"], Float[Array, "*p"]]:
    """All problems from their starts by damped steps, each with its own damping, until all of them
    have settled; the unknowns and the costs."""
    stopping = Stopping() if stopping is None else stopping
    at, cost = start, np.sum(problems.residual(start) ** 2, axis=-1)
    damping, growth = np.full(cost.shape, stopping.damping), np.full(cost.shape, 2.0)
    going = cost > stopping.target
    tried = 0
    while tried < stopping.steps and going.any():
        tried += 1
        residual, tall = problems.linearize(at)
        norms = np.maximum(np.linalg.norm(tall, axis=-2, keepdims=True), TINY)
        tall = tall / norms
        normal = np.swapaxes(tall, -1, -2) @ tall
        ridge = damping + UNIT_ROUNDOFF * normal.shape[-1]
        normal = normal + ridge[..., None, None] * np.eye(normal.shape[-1])
        right = -np.swapaxes(tall, -1, -2) @ residual[..., None]
        z = np.linalg.solve(normal, right)
        predicted = (right * z).sum(axis=(-1, -2)) + ridge * (z * z).sum(axis=(-1, -2))
        step = z[..., 0] / norms[..., 0, :]
        trial = at + np.clip(step, -problems.limit, problems.limit)
        found = np.sum(problems.residual(trial) ** 2, axis=-1)
        accepted = going & (found < cost)
        ratio = np.clip((cost - found) / np.maximum(predicted, TINY), 0.0, 1.0)
        settled = (predicted <= stopping.tolerance * cost) | (
            accepted & (cost - found <= stopping.tolerance * cost)
        )
        damping = np.where(
            accepted,
            damping * np.maximum(0.1, 1.0 - (2.0 * ratio - 1.0) ** 3),
            np.maximum(damping, stopping.tolerance) * growth,
        )
        growth = np.where(accepted, 2.0, 2.0 * growth)
        at = np.where(accepted[..., None], trial, at)
        cost = np.where(accepted, found, cost)
        going = going & ~settled & (cost > stopping.target)
    return at, cost
