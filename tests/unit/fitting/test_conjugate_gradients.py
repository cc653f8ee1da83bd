import numpy as np

from keyhole.fitting.conjugate_gradients import (
    Ending,
    ProductSystem,
    Scaled,
    solve_cgls,
    solve_preconditioned,
)


def problem(rng, rows=60, columns=20):
    matrix = rng.standard_normal((rows, columns))
    return matrix, Scaled(lambda z: matrix @ z, lambda v: matrix.T @ v)


def test_the_least_squares_solution():
    rng = np.random.default_rng(0)
    matrix, at = problem(rng)
    right = rng.standard_normal(60)
    found = solve_cgls(at, right, Ending(least=1e-12))
    wanted, *_ = np.linalg.lstsq(matrix, right, rcond=None)
    assert np.allclose(found.z, wanted, atol=1e-8)
    assert np.isclose(found.left, np.sum((right - matrix @ wanted) ** 2))


def test_it_ends_where_the_share_is_reached():
    rng = np.random.default_rng(1)
    matrix, at = problem(rng)
    right = matrix @ rng.standard_normal(20)
    rough, exact = (solve_cgls(at, right, Ending(share=share)) for share in (0.3, 1e-6))
    assert rough.left <= 0.09 * (right @ right)
    assert rough.steps < exact.steps


def test_it_ends_where_only_noise_is_left():
    rng = np.random.default_rng(2)
    _, at = problem(rng)
    assert solve_cgls(at, rng.standard_normal(60), Ending(window=5, most=500)).steps < 60
    growing = solve_cgls(at, rng.standard_normal(60), Ending(window=5, growth=0.02, most=500))
    assert growing.steps < 60


def test_damping_is_that_of_the_damped_normal_equations():
    rng = np.random.default_rng(3)
    matrix, at = problem(rng)
    right = rng.standard_normal(60)
    found = solve_cgls(at, right, Ending(least=1e-14), damping=5.0)
    wanted = np.linalg.solve(matrix.T @ matrix + 5.0 * np.eye(20), matrix.T @ right)
    assert np.allclose(found.z, wanted, atol=1e-8)


def test_a_step_in_single_precision_of_a_residual_of_any_size():
    rng = np.random.default_rng(4)
    matrix = rng.standard_normal((60, 20)).astype(np.float32)
    at = Scaled(lambda z: matrix @ z, lambda v: matrix.T @ v)
    wanted = rng.standard_normal(20)
    for size in (1e-30, 1e30):
        residual = -size * (matrix.astype(float) @ wanted)
        step = ProductSystem(at, residual, lambda z: z.astype(float), Ending(1e-4)).step(0.0)
        assert np.allclose(step.step, size * wanted, rtol=1e-2, atol=1e-3 * size)
        assert np.isclose(step.predicted, residual @ residual)


def test_products_end_where_the_gradient_is_a_share_of_what_it_was() -> None:
    rng = np.random.default_rng(3)
    matrix, right = rng.standard_normal((60, 12)), rng.standard_normal(60)
    at = Scaled(lambda z: matrix @ z, lambda r: matrix.T @ r)
    found = solve_cgls(at, right, Ending(gradient=1e-8, window=100, most=99))
    gradient = matrix.T @ (right - matrix @ found.z)
    assert np.linalg.norm(gradient) < 1.01e-8 * np.linalg.norm(matrix.T @ right)


def test_a_preconditioned_system_is_solved() -> None:
    rng = np.random.default_rng(4)
    tall = rng.standard_normal((60, 12)) * np.geomspace(1.0, 1e3, 12)
    system, right = tall.T @ tall, rng.standard_normal(12)
    diagonal = np.diag(system)
    z, image = solve_preconditioned(lambda v: system @ v, lambda v: v / diagonal, right, 1e-10, 100)
    np.testing.assert_allclose(system @ z, right, rtol=1e-8)
    np.testing.assert_allclose(image, right, rtol=1e-8)
