import numpy as np
from tests.templates import AttentionHeads, randomise

from keyhole.learners.template.descent import AcceleratedSystem, Point, fit
from keyhole.learners.template.forward import Answered, Forward, Residuals


def make_residuals() -> tuple[Forward, Residuals]:
    rng = np.random.default_rng(0)
    forward = Forward.of(randomise(AttentionHeads(3, 1), 0))
    tokens = 0.5 * rng.standard_normal((80, 3, 3))
    answers = forward.predict(forward.weights, tokens)
    return forward, Residuals(forward, [Answered(tokens, answers, np.full((80, 1), 1e-15))])


def test_from_near_the_truth_to_rounding() -> None:
    forward, residuals = make_residuals()
    start = forward.weights + 0.01 * np.random.default_rng(1).standard_normal(forward.unknowns)
    ended = fit(residuals, start, steps=40, target=100.0)
    assert ended.loss <= 100.0


def test_both_ways_to_solve_give_one_step() -> None:
    forward, residuals = make_residuals()
    weights = forward.draw(np.random.default_rng(1))
    point, free = Point(weights, residuals(weights)), np.ones(len(weights), dtype=bool)
    steps = [AcceleratedSystem(residuals, point, free, exact).step(1.0) for exact in (True, False)]
    assert np.allclose(steps[0].step, steps[1].step, atol=1e-8)


def test_what_is_held_does_not_move() -> None:
    forward, residuals = make_residuals()
    weights = forward.draw(np.random.default_rng(1))
    free = np.arange(len(weights)) > 5
    ended = fit(residuals, weights, steps=5, target=1.0, free=free)
    assert np.array_equal(ended.weights[:6], weights[:6])


def test_time_that_is_up_ends_it() -> None:
    forward, residuals = make_residuals()
    ended = fit(residuals, forward.draw(np.random.default_rng(1)), steps=99, target=1.0, until=0.0)
    assert ended.steps <= 1
