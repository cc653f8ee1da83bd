import numpy as np
import pytest

from keyhole.learners.output_layer.ellipsoid import DENSE, count_unknowns, fit_ellipsoid


def points_on(dimension: int, count: int, seed: int) -> tuple:
    rng = np.random.default_rng(seed)
    states = rng.standard_normal((count, dimension))
    states /= np.linalg.norm(states, axis=1, keepdims=True)
    shape = np.eye(dimension) + 0.5 * rng.standard_normal((dimension, dimension)) / dimension**0.5
    middle = 0.2 * rng.standard_normal(dimension)
    return states @ shape.T + middle, shape, middle


def gap(found: np.ndarray, shape: np.ndarray) -> float:
    left, _, right = np.linalg.svd(found.T @ shape)
    return float(np.linalg.norm(found @ left @ right - shape))


@pytest.mark.parametrize("dimension", [3, 12, DENSE + 1])
def test_shape_and_centre_are_exact(dimension):
    points, shape, middle = points_on(dimension, int(1.4 * count_unknowns(dimension)), 0)
    found = fit_ellipsoid(points, np.random.default_rng(0))
    assert found is not None
    assert gap(found.shape, shape) < 1e-9
    assert np.linalg.norm(found.centre - middle) < 1e-9


@pytest.mark.parametrize("dimension", [12, DENSE + 1])
def test_error_bars_are_those_seen(dimension):
    points, shape, _ = points_on(dimension, int(1.5 * count_unknowns(dimension)), 1)
    noisy = points + 1e-5 * np.random.default_rng(2).standard_normal(points.shape)
    found = fit_ellipsoid(noisy, np.random.default_rng(0))
    bar = np.sqrt(np.mean(np.sum(found.shape_draws**2, axis=(1, 2))))
    assert 0.7 < bar / gap(found.shape, shape) < 1.5


def test_as_many_points_as_unknowns_do_not_tell():
    points, *_ = points_on(6, count_unknowns(6), 3)
    assert fit_ellipsoid(points, np.random.default_rng(0)) is None


def test_points_of_no_ellipsoid_are_refused():
    rng = np.random.default_rng(4)
    hyperbola = np.column_stack([rng.standard_normal(60), np.zeros(60)])
    hyperbola[:, 1] = np.sign(rng.standard_normal(60)) * np.sqrt(1.0 + hyperbola[:, 0] ** 2)
    assert fit_ellipsoid(hyperbola, rng) is None
