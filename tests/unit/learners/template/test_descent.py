import numpy as np
from tests.templates import AttentionHeads, randomise

from keyhole.learners.template.descent import AcceleratedSystem, Point, TriangularSystem, fit
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
    plain = TriangularSystem(residuals, point, free).step(1e3)  # so short that nothing accelerates
    accelerated = AcceleratedSystem(residuals, point, free).step(1e3)
    assert np.allclose(plain.step, accelerated.step, atol=1e-3 * np.abs(plain.step).max())


class Bent(Residuals):
    """A curved valley: r1 = (y - x^2) answers the wall, r2 = 1e-5 (x - 1) its bottom."""

    def __init__(self) -> None:
        self.numbers, self.size, self.data = 2, 1.0, ()

    def __call__(self, vector):  # type: ignore[no-untyped-def]
        return np.array([vector[1] - vector[0] ** 2, 1e-5 * (vector[0] - 1.0)])

    def jacobian(self, vector):  # type: ignore[no-untyped-def]
        return np.array([[-2.0 * vector[0], 1.0], [1e-5, 0.0]])


def test_the_bottom_of_a_curved_valley_is_followed() -> None:
    ended = fit(Bent(), np.array([-3.0, 9.0]), steps=300, target=1e-28)
    assert np.allclose(ended.weights, 1.0, atol=1e-6)


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


def test_a_fit_that_no_longer_halves_its_cost_is_given_up() -> None:
    forward, residuals = make_residuals()
    start = forward.draw(np.random.default_rng(1))
    # answers to other sequences: no weights explain them
    wrong = Residuals(
        forward,
        [Answered(one.tokens[::-1], one.answers, one.errors) for one in residuals.data],
    )
    patient = fit(wrong, start, steps=60, target=1.0)
    ended = fit(wrong, start, steps=60, target=1.0, patience=5)
    assert ended.steps < patient.steps
    assert ended.loss > 1e20
