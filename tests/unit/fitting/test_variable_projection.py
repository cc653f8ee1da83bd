"""Derivatives against differences, normal matrix against product, errors against inverses."""

from dataclasses import replace

import numpy as np
import pytest

from keyhole.fitting import fisher
from keyhole.fitting.attention_rows import (
    MASKED,
    Rows,
    average_tokens,
    compute_patterns,
    pull,
    push,
)
from keyhole.fitting.fisher import estimate_information
from keyhole.fitting.levenberg_marquardt import AMPLE, DescentOptions, descend
from keyhole.fitting.preconditioner import approximate_normal
from keyhole.fitting.variable_projection import (
    compute_gradient,
    form_normal,
    multiply_normal,
    project,
)


def drawn(seed: int = 0, *, bias: bool = False, padded: bool = False) -> tuple[Rows, np.ndarray]:
    rng = np.random.default_rng(seed)
    n, length, d, outputs, heads = 40, 3, 4, 3, 2
    tokens = rng.standard_normal((n, length, d))
    padding = None
    if padded:
        padding = np.zeros((n, 1, length))
        padding[: n // 2, 0, -1] = MASKED
        tokens[: n // 2, -1] = 0.0
    anchors = np.concatenate([tokens, np.ones((n, length, 1))], axis=2) if bias else tokens
    weights = (rng.random((n, length)) < 0.9).astype(float)
    targets = rng.standard_normal((n, length, outputs))
    rows = Rows(anchors, tokens, padding, weights, targets, offset=bias)
    return rows, 0.4 * rng.standard_normal((anchors.shape[2], heads, d))


def test_many_rows_are_fitted_with_the_curvature_of_a_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(4)
    tokens = rng.standard_normal((1500, 3, 4))
    rows = Rows(tokens, tokens, None, np.ones((1500, 3)), np.zeros((1500, 3, 3)))
    theta = 0.5 * rng.standard_normal((4, 2, 4))
    clean = average_tokens(rows, compute_patterns(rows, theta)) @ rng.standard_normal((8, 3))
    noisy = clean.reshape(1500, 3, 3) + 0.1 * rng.standard_normal((1500, 3, 3))
    rows = Rows(tokens, tokens, None, np.ones((1500, 3)), noisy)
    assert len(rows.sample(2, AMPLE, rng).tokens) < 400
    options = DescentOptions(precise=True, damping=1e-8)
    sampled = descend(rows, theta, options)
    errors = estimate_information(rows, sampled.at, rng)
    monkeypatch.setattr(fisher, "AMPLE", np.inf)
    whole = descend(rows, theta, replace(options, ample=np.inf))
    assert sampled.products > 0 == whole.products
    assert sampled.at.cost == pytest.approx(whole.at.cost, rel=1e-8)
    np.testing.assert_allclose(sampled.at.theta, whole.at.theta, atol=1e-4)
    exact = estimate_information(rows, whole.at, rng)
    np.testing.assert_allclose(errors.theta, exact.theta, rtol=0.3)
    assert np.linalg.norm(errors.values) == pytest.approx(np.linalg.norm(exact.values), rel=0.1)


KINDS = [{}, {"bias": True}, {"padded": True}]


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_the_derivative_of_the_cost(kind: dict[str, bool]) -> None:
    rows, theta = drawn(**kind)
    direction = np.random.default_rng(1).standard_normal(theta.shape)
    step = 1e-5
    up, down = (project(rows, theta + s * step * direction).cost for s in (1, -1))
    slope = -2 * float((compute_gradient(rows, project(rows, theta)) * direction).sum())
    assert (up - down) / (2 * step) == pytest.approx(slope, rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_pull_is_the_adjoint_of_push(kind: dict[str, bool]) -> None:
    rows, theta = drawn(**kind)
    at = project(rows, theta)
    rng = np.random.default_rng(2)
    direction, residual = rng.standard_normal(theta.shape), rng.standard_normal(at.residual.shape)
    left = float((push(rows, at.pattern, at.values, direction) * residual).sum())
    right = float((direction * pull(rows, at.pattern, at.values, residual)).sum())
    assert left == pytest.approx(right, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_normal_matrix_matches_its_product(kind: dict[str, bool]) -> None:
    rows, theta = drawn(**kind)
    at = project(rows, theta)
    direction = np.random.default_rng(3).standard_normal(theta.shape)
    product = multiply_normal(rows, at, direction).ravel()
    np.testing.assert_allclose(form_normal(rows, at) @ direction.ravel(), product, atol=1e-10)


def test_values_solve_the_linear_problem() -> None:
    rows, theta = drawn(bias=True)
    at = project(rows, theta)
    design = np.hstack(
        [average_tokens(rows, compute_patterns(rows, theta)), rows.weights.reshape(-1, 1)]
    )
    targets = (rows.targets * rows.weights[:, :, None]).reshape(len(design), -1)
    expected = np.linalg.lstsq(design, targets, rcond=None)[0]
    np.testing.assert_allclose(np.vstack([at.values, at.offset]), expected, atol=1e-10)


def test_twin_heads_leave_a_rank_deficient_design() -> None:
    rows, theta = drawn()
    theta[:, 1] = theta[:, 0]
    at = project(rows, theta)
    assert at.basis.shape[1] == rows.width
    assert estimate_information(rows, at, np.random.default_rng(0)).deficient


def test_saturated_attention_leaves_scores_without_errors() -> None:
    rows, theta = drawn()
    theta[:, 1] *= 1e3  # the least visible entry is seen as 1e-160 and less
    found = estimate_information(rows, project(rows, theta), np.random.default_rng(0))
    assert found.deficient
    assert np.isinf(found.theta).all()


def joint_errors(rows: Rows, theta: np.ndarray) -> np.ndarray:
    """Standard errors by brute force: all parameters at once, Jacobian by differences."""
    at = project(rows, theta)
    point = np.concatenate([theta.ravel(), at.values.ravel()])

    def outputs(x: np.ndarray) -> np.ndarray:
        mixed = average_tokens(rows, compute_patterns(rows, x[: theta.size].reshape(theta.shape)))
        return (mixed @ x[theta.size :].reshape(at.values.shape)).ravel()

    step = 1e-6
    columns = [
        (outputs(point + step * e) - outputs(point - step * e)) / (2 * step)
        for e in np.eye(len(point))
    ]
    jacobian = np.array(columns).T
    return np.sqrt(np.diagonal(np.linalg.inv(jacobian.T @ jacobian)))


def test_errors_are_those_of_the_joint_jacobian() -> None:
    rows, theta = drawn()
    found = estimate_information(rows, project(rows, theta), np.random.default_rng(0))
    expected = joint_errors(rows, theta)
    np.testing.assert_allclose(
        np.concatenate([found.theta.ravel(), found.values.ravel()]), expected, rtol=1e-5
    )


def test_probed_errors_are_close_to_the_dense_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, theta = drawn()
    dense = estimate_information(rows, project(rows, theta), np.random.default_rng(0))
    monkeypatch.setattr(fisher, "DENSE_LIMIT", 1)
    probed = estimate_information(rows, project(rows, theta), np.random.default_rng(0))
    assert 0.8 < np.median(probed.theta / dense.theta) < 1.25
    assert 0.8 < np.median(probed.values / dense.values) < 1.25


def test_preconditioner_inverts_its_own_approximation() -> None:
    rows, theta = drawn()
    at = project(rows, theta)
    near = approximate_normal(rows, at)
    size = theta.size
    inverse = np.stack([near.solve(0.0, e.reshape(theta.shape)).ravel() for e in np.eye(size)])
    np.testing.assert_allclose(np.diagonal(inverse), near.inverse_diagonal().ravel(), rtol=1e-9)
    np.testing.assert_allclose(inverse, inverse.T, atol=1e-12)
