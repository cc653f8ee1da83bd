"""Linear unknowns eliminated: derivative, convergence from far, agreement with the joint fit."""

import numpy as np
import pytest

from keyhole.fitting.gauss_newton import Blocks, FitOptions, FunctionModel, fit_least_squares
from keyhole.fitting.separable import SeparableModel
from keyhole.fitting.torch_model import Batch, TorchModel

X = np.linspace(-2.0, 2.0, 40)
RATES, AMPLITUDES = np.array([-1.0, 0.5]), np.array([[1.0, 2.0, -1.0], [0.5, -1.0, 3.0]])


def features(p: np.ndarray) -> np.ndarray:
    return np.exp(np.outer(X, p)).ravel()


def derivative(p: np.ndarray) -> np.ndarray:
    table = np.zeros((len(X), 2, 2))
    for k in range(2):
        table[:, k, k] = X * np.exp(p[k] * X)
    return table.reshape(-1, 2)


def model(noise: float = 0.0, seed: int = 0) -> SeparableModel:
    rng = np.random.default_rng(seed)
    answers = np.exp(np.outer(X, RATES)) @ AMPLITUDES
    errors = np.linspace(0.5, 2.0, len(X)) * (noise or 1.0)
    answers = answers + (noise > 0) * errors[:, None] * rng.standard_normal(answers.shape)
    return SeparableModel(FunctionModel(features, derivative), answers, errors)


def test_the_adjoint_fits_and_the_gradient_is_that_of_the_cost() -> None:
    problem, rng = model(), np.random.default_rng(1)
    point = np.array([-0.7, 0.9])
    at = problem.linearize(point)
    step, other = rng.standard_normal(2), rng.standard_normal(len(at.residual))
    assert other @ at.jvp(step) == pytest.approx(at.vjp(other) @ step)
    costs = [float((problem.residual(point + s * 1e-6 * step) ** 2).sum()) for s in (1, -1)]
    slope = (costs[0] - costs[1]) / 2e-6
    assert slope == pytest.approx(2 * float(at.vjp(at.residual) @ step), rel=1e-6)


@pytest.mark.parametrize("dense", [0, 1500])
def test_both_parts_are_found_from_far(dense: int) -> None:
    problem = model()
    fit = fit_least_squares(problem, np.array([-0.1, 0.1]), FitOptions(dense_unknowns=dense))
    np.testing.assert_allclose(fit.point, RATES, rtol=1e-10)
    np.testing.assert_allclose(problem.solve_linear_part(fit.point), AMPLITUDES, rtol=1e-9)


def test_errors_of_the_nonlinear_part_count_the_linear_one() -> None:
    points = [fit_least_squares(model(0.01, seed), RATES).point for seed in range(200)]
    fit = fit_least_squares(model(0.01), RATES)
    np.testing.assert_allclose(np.std(points, axis=0), fit.uncertainty.errors, rtol=0.2)
    assert fit.uncertainty.rank == 2 + AMPLITUDES.size


def test_equal_features_share_their_amplitude() -> None:
    linear = model().solve_linear_part(np.array([0.5, 0.5]))
    assert (linear == 0).all(axis=1).sum() == 1


def test_features_in_torch() -> None:
    pytest.importorskip("torch")
    blocks = Blocks.of({"rates": RATES})
    zero = Batch(X[:, None], np.zeros((len(X), 2)), np.ones(len(X)))
    in_torch = TorchModel(lambda p, x: (p["rates"] * x).exp(), blocks, [zero])
    numpy = model()
    problem = SeparableModel(in_torch, numpy.answers, numpy.errors)
    point = np.array([-0.6, 0.2])
    np.testing.assert_allclose(problem.residual(point), numpy.residual(point), atol=1e-12)
    fit = fit_least_squares(problem, point)
    np.testing.assert_allclose(fit.point, RATES, rtol=1e-10)
