"""The one damped loop: each way to a step, each ending, many problems at once."""

import time
from dataclasses import replace

import numpy as np
import pytest

from keyhole.arrays import Array
from keyhole.fitting.solver import (
    JacobianSystem,
    ManyProblems,
    NormalSystem,
    Problem,
    Stopping,
    System,
    descend,
    descend_many,
)

X = np.linspace(0.0, 1.0, 20)
TRUE = np.array([2.0, -1.0])


def residual(p: Array) -> Array:
    return np.asarray(p[..., :1] * np.exp(p[..., 1:] * X) - TRUE[0] * np.exp(TRUE[1] * X))


def jacobian(p: Array) -> Array:
    wave = np.exp(p[..., 1:] * X)
    return np.stack([wave, p[..., :1] * X * wave], axis=-1)


def normal(p: Array) -> System:
    tall = jacobian(p)
    return NormalSystem(tall.T @ tall, -tall.T @ residual(p))


def dense(p: Array) -> System:
    return JacobianSystem(residual(p), jacobian(p))


def problem(linearize=dense) -> Problem[Array]:  # type: ignore[no-untyped-def]
    return Problem(lambda p: float(residual(p) @ residual(p)), linearize, lambda p, step: p + step)


@pytest.mark.parametrize("linearize", [normal, dense])
def test_each_way_to_a_step_reaches_the_minimum(linearize) -> None:  # type: ignore[no-untyped-def]
    end = descend(problem(linearize), np.array([1.0, 0.0]))
    assert np.abs(end.state - TRUE).max() < 1e-7


@pytest.mark.parametrize("linearize", [normal, dense])
def test_both_systems_promise_what_the_linear_model_gains(linearize) -> None:  # type: ignore[no-untyped-def]
    p = np.array([1.0, 0.5])
    step = linearize(p).step(0.1)
    after = residual(p) + jacobian(p) @ step.step
    gained = residual(p) @ residual(p) - after @ after
    assert step.predicted == pytest.approx(gained, rel=1e-9)


def test_an_eager_descent_reaches_the_minimum_too() -> None:
    end = descend(problem(), np.array([1.0, 0.0]), Stopping(eager=True))
    assert np.abs(end.state - TRUE).max() < 1e-7


def test_steps_that_do_not_help_count_for_a_hasty_descent_alone() -> None:
    uphill = Problem[Array](
        lambda p: float(residual(p) @ residual(p)), dense, lambda p, step: p - 1e-3 * step
    )
    limits = Stopping(steps=9, window=2, share=0.5)
    start = np.array([1.0, 0.0])
    assert descend(uphill, start, limits).ending == "steps"
    assert descend(uphill, start, replace(limits, hasty=True)).ending == "stalled"


def test_a_deadline_is_kept() -> None:
    end = descend(problem(), np.array([1.0, 0.0]), Stopping(deadline=time.monotonic() - 1.0))
    assert (end.ending, end.steps) == ("budget", 0)


def test_endings() -> None:
    start = np.array([1.0, 0.0])
    assert descend(problem(), start, Stopping(steps=1)).ending == "steps"
    assert descend(problem(), start, Stopping(target=1e-3)).ending == "target"
    assert descend(problem(), start, Stopping(tolerance=1.0)).steps == 1
    stalled = descend(problem(), start, Stopping(window=1, share=1.0))
    assert (stalled.ending, stalled.steps) == ("stalled", 1)


def test_a_start_is_kept_where_no_step_helps() -> None:
    worse = Problem(
        lambda p: float(residual(p) @ residual(p)) if p[0] == 1.0 else np.nan,
        dense,
        lambda p, step: p + step,
    )
    end = descend(worse, np.array([1.0, 0.0]))
    assert end.state.tolist() == [1.0, 0.0]


def test_many_problems_reach_what_one_reaches() -> None:
    starts = np.array([[1.0, 0.0], [3.0, -2.0], [2.5, 0.5]])
    many = ManyProblems(lambda p: (residual(p), jacobian(p)), residual, np.array([np.inf, 1.0]))
    found, costs = descend_many(many, starts)
    assert np.abs(found - TRUE).max() < 1e-6
    assert costs.shape == (3,)
