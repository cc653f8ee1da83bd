"""Known minima, deficient problems, standard errors, interruptions, dense against matrix-free."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from keyhole.fitting.gauss_newton import (
    Blocks,
    FitOptions,
    FunctionModel,
    Linearization,
    Progress,
    estimate_uncertainty,
    fit_least_squares,
    form_jacobian,
    sketch_scaling,
    solve_linear,
)

TRUTH = np.array([0.7, -1.2, 0.4, 2.0, -0.5, 1.1])
MATRIX_FREE = FitOptions(dense_unknowns=0)


def network(noise: float = 0.0, seed: int = 0, numbers: int = 60) -> FunctionModel:
    """Two tanh neurons on a line: amplitudes, slopes and shifts."""
    rng = np.random.default_rng(seed)
    x = np.linspace(-3.0, 3.0, numbers)

    def predict(p: np.ndarray) -> np.ndarray:
        return p[0] * np.tanh(p[1] * x + p[2]) + p[3] * np.tanh(p[4] * x + p[5])

    def jacobian(p: np.ndarray) -> np.ndarray:
        columns = []
        for a, w, b in (p[:3], p[3:]):
            t = np.tanh(w * x + b)
            columns += [t, a * (1 - t**2) * x, a * (1 - t**2)]
        return np.stack(columns, axis=1) / scale

    scale = noise or 1.0
    data = predict(TRUTH) + noise * rng.standard_normal(numbers)
    return FunctionModel(lambda p: (predict(p) - data) / scale, jacobian)


@dataclass(frozen=True)
class Bare:
    """The same model without its matrix."""

    inner: FunctionModel

    def residual(self, point: np.ndarray) -> np.ndarray:
        return self.inner.residual(point)

    def linearize(self, point: np.ndarray) -> Linearization:
        return replace(self.inner.linearize(point), jacobian=None)

    def retract(self, point: np.ndarray, step: np.ndarray) -> np.ndarray:
        return point + step


NEAR = TRUTH * (1 + 0.1 * np.array([1, -1, 1, -1, 1, -1]))


@pytest.mark.parametrize("options", [FitOptions(), MATRIX_FREE, FitOptions(damping=0.0)])
def test_a_known_minimum_is_found_to_rounding(options: FitOptions) -> None:
    fit = fit_least_squares(Bare(network()), NEAR, options)
    assert fit.ending in ("settled", "target")
    np.testing.assert_allclose(fit.point, TRUTH, rtol=1e-11)
    assert len(fit.history) < 30
    costs = [record.cost for record in fit.history]
    assert costs == sorted(costs, reverse=True)
    assert fit.history[-1].evaluations <= fit.evaluations


def test_far_starts_are_damped_and_never_get_worse() -> None:
    model = network()
    for seed in range(10):
        start = np.random.default_rng(seed).standard_normal(6)
        fit = fit_least_squares(model, start)
        assert fit.cost <= float((model.residual(start) ** 2).sum())
        assert np.isfinite(fit.point).all()


def test_dense_and_matrix_free_end_alike_with_noise() -> None:
    model, blocks = network(noise=0.01), Blocks.of({"first": TRUTH[:3], "second": TRUTH[3:]})
    rng = np.random.default_rng(1)
    dense = fit_least_squares(model, NEAR)
    free = fit_least_squares(model, NEAR, replace(MATRIX_FREE, probes=200), rng=rng, blocks=blocks)
    np.testing.assert_allclose(free.point, dense.point, rtol=1e-4)
    assert dense.level == pytest.approx(1.0, rel=0.25)
    assert free.level == pytest.approx(dense.level)
    ratio = free.standard_errors / dense.standard_errors
    assert ratio.min() > 0.85  # pooled over blocks: at least what the entry has
    pooled = [np.sqrt(np.mean(dense.standard_errors[p] ** 2)) for p in blocks.slices.values()]
    for part, level in zip(blocks.slices.values(), pooled, strict=True):
        expected = np.maximum(dense.standard_errors[part], level)
        np.testing.assert_allclose(free.standard_errors[part], expected, rtol=0.15)


def test_standard_errors_are_those_of_repeated_data() -> None:
    points = np.stack(
        [fit_least_squares(network(noise=1e-3, seed=s), TRUTH).point for s in range(300)]
    )
    errors = fit_least_squares(network(noise=1e-3), TRUTH).uncertainty.errors
    np.testing.assert_allclose(points.std(axis=0), errors, rtol=0.15)


def deficient() -> FunctionModel:
    """Only the product of the first two unknowns is seen, and the third not at all."""
    x = np.linspace(0.0, 1.0, 15)
    return FunctionModel(
        lambda p: p[0] * p[1] * x + p[3] - 6.0 * x - 1.0,
        lambda p: np.stack([p[1] * x, p[0] * x, 0 * x, np.ones(15)], axis=1),
    )


@pytest.mark.parametrize("options", [FitOptions(), MATRIX_FREE])
def test_what_leaves_no_trace_stays_where_it_is(options: FitOptions) -> None:
    fit = fit_least_squares(deficient(), np.array([1.0, 2.0, 5.0, 0.0]), options)
    assert fit.cost < 1e-20
    assert fit.point[0] * fit.point[1] == pytest.approx(6.0)
    assert fit.point[2] == 5.0


def test_deficient_directions_have_infinite_errors() -> None:
    fit = fit_least_squares(deficient(), np.array([1.0, 2.0, 5.0, 0.0]))
    assert fit.uncertainty.rank == 2
    assert fit.uncertainty.condition > 1e12
    assert np.isinf(fit.uncertainty.errors).tolist() == [True, True, True, False]


def test_fewer_numbers_than_unknowns() -> None:
    model = network(numbers=4)
    fit = fit_least_squares(Bare(model), NEAR)
    assert fit.cost < 1e-20
    assert fit.uncertainty.rank == 4
    np.testing.assert_allclose(
        form_jacobian(Bare(model).linearize(NEAR)), model.linearize(NEAR).jacobian()
    )


@pytest.mark.parametrize("budget", [{"evaluations": 12}, {"seconds": 0.0}])
@pytest.mark.parametrize("dense", [0, 1500])
def test_a_budget_ends_with_the_best_so_far(budget: dict[str, float], dense: int) -> None:
    model = Bare(network())
    fit = fit_least_squares(model, NEAR, FitOptions(dense_unknowns=dense, **budget))
    assert fit.ending == "budget"
    assert fit.uncertainty is None
    assert fit.standard_errors is None
    assert fit.evaluations <= 12
    assert fit.cost <= float((model.residual(NEAR) ** 2).sum())


def test_an_interruption_ends_with_the_best_so_far() -> None:
    seen: list[Progress] = []

    def stop(record: Progress) -> None:
        seen.append(record)
        if len(seen) == 2:
            raise KeyboardInterrupt

    fit = fit_least_squares(network(), NEAR, progress=stop)
    assert fit.ending == "interrupted"
    assert fit.history == tuple(seen)
    assert fit.cost == seen[-1].cost
    again = fit_least_squares(network(), fit.point)
    np.testing.assert_allclose(again.point, TRUTH, rtol=1e-11)


def test_steps_and_target_end_a_fit() -> None:
    assert fit_least_squares(network(), NEAR, FitOptions(steps=2)).ending == "steps"
    loose = fit_least_squares(network(), NEAR, FitOptions(target=1e-3))
    assert loose.ending == "target"
    assert 1e-8 < np.sqrt(loose.cost / 60) <= 1e-3


def test_an_overflow_is_a_step_not_taken() -> None:
    x = np.linspace(0.0, 1.0, 10)
    with np.errstate(over="ignore", invalid="ignore"):
        model = FunctionModel(
            lambda p: np.exp(p[0] * x) - np.exp(3 * x),
            lambda p: (x * np.exp(p[0] * x))[:, None],
        )
        fit = fit_least_squares(model, np.array([-8.0]), FitOptions(damping=0.0, steps=200))
    np.testing.assert_allclose(fit.point, [3.0])


def ill_conditioned(rng: np.random.Generator) -> Linearization:
    matrix = rng.standard_normal((300, 60)) * np.geomspace(1e-4, 1e4, 60)
    matrix[:, 1:] += 30 * matrix[:, :1] * np.geomspace(1, 1e4, 59)
    right = rng.standard_normal(300)
    return Linearization(right, 60, lambda s: matrix @ s, lambda v: matrix.T @ v, lambda: matrix)


def test_a_sketch_scales_any_problem() -> None:
    rng = np.random.default_rng(3)
    at = ill_conditioned(rng)
    right = at.jacobian() @ rng.standard_normal(60)
    scaled = replace(at, scaling=sketch_scaling(at, Blocks((("all", (60,)),)), rng))
    plain, good = (solve_linear(part, right, 1e-12, 60) for part in (at, scaled))
    left = [np.linalg.norm(at.jacobian() @ found.step - right) for found in (plain, good)]
    assert left[1] < 1e-8 * np.linalg.norm(right)
    assert left[0] > 1e3 * left[1]
    assert good.condition < 50


def test_matrix_free_errors_of_an_ill_conditioned_problem() -> None:
    rng = np.random.default_rng(4)
    at, blocks = ill_conditioned(rng), Blocks((("all", (60,)),))
    dense = estimate_uncertainty(at, rng=rng)
    options = replace(MATRIX_FREE, probes=100)
    free = estimate_uncertainty(at, options, rng=rng, blocks=blocks)
    top = np.argmax(dense.errors)
    assert free.errors[top] == pytest.approx(dense.errors[top], rel=0.3)
    assert free.rank == dense.rank == 60


def test_blocks_join_and_split() -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(7.0), "c": np.ones((0, 4))}
    blocks = Blocks.of(arrays)
    vector = blocks.join(arrays)
    assert blocks.size == len(vector) == 7
    for name, array in blocks.split(vector).items():
        np.testing.assert_array_equal(array, arrays[name])
