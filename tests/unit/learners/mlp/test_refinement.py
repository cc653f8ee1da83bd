import numpy as np
import pytest

from keyhole.learners.mlp.refinement import RefinementOptions, Weights, refine


def teacher(rng, width=6, neurons=12, outputs=6, activation="gelu", gated=False):
    def rows():
        return np.column_stack(
            [rng.standard_normal((neurons, width)) / width**0.5, rng.standard_normal(neurons) / 2]
        )

    return Weights(
        rows(),
        rng.standard_normal((outputs, neurons)) / neurons**0.5,
        rng.standard_normal((outputs, width + 1)),
        activation,
        rows() if gated else None,
    )


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "silu", "tanh"])
def test_a_start_that_is_off_by_percents_converges(activation, gated, dense):
    options = RefinementOptions(dense=10**6 if dense else 0)
    rng = np.random.default_rng(0)
    truth = teacher(rng, activation=activation, gated=gated)
    points = rng.standard_normal((90, 6))
    start = Weights(
        truth.inner * (1 + 0.03 * rng.standard_normal(truth.inner.shape)),
        truth.outer,
        truth.affine,
        activation,
        None if truth.gate is None else truth.gate + 0.01 * rng.standard_normal(truth.gate.shape),
    )
    found = refine(start, points, truth(points), 2.0**-53, options=options)
    fresh = rng.standard_normal((50, 6))
    assert found.residual < 1e-13
    assert np.abs(found.weights(fresh) - truth(fresh)).max() < 1e-10
    assert np.isfinite(found.errors.inner).all()
    assert found.errors.inner.max() < 1e-9


def test_standard_errors_follow_the_noise():
    rng = np.random.default_rng(1)
    truth = teacher(rng)
    points = rng.standard_normal((200, 6))
    off = []
    for _ in range(8):
        answers = truth(points) + 1e-6 * rng.standard_normal((200, 6))
        found = refine(truth, points, answers, 2.0**-53, rng=rng)
        assert found.residual == pytest.approx(1e-6, rel=0.15)
        off.append((found.weights.inner - truth.inner) / found.errors.inner)
    assert 0.6 < np.sqrt(np.mean(np.square(off))) < 1.6


@pytest.mark.parametrize("gated", [False, True])
def test_large_problems_take_steps_in_single_precision(gated):
    """Neurons that seldom fire see the points from few sides: their Gram matrices are far from
    round, and conjugate gradients must not mind."""
    rng = np.random.default_rng(0)
    truth = teacher(rng, width=12, neurons=20, gated=gated)
    (truth.inner if truth.gate is None else truth.gate)[:4, -1] = -1.5
    points = 1.5 * rng.standard_normal((300, 12))
    start = Weights(
        truth.inner + 1e-3 * rng.standard_normal(truth.inner.shape),
        truth.outer,
        truth.affine,
        "gelu",
        None if truth.gate is None else truth.gate + 1e-3 * rng.standard_normal(truth.gate.shape),
    )
    options = RefinementOptions(dense=0, grams=0)
    found = refine(start, points, truth(points), 2.0**-53, options=options, errors=False)
    assert found.residual < 1e-12


def test_a_neuron_that_is_silent_at_all_points_gets_no_weight():
    rng = np.random.default_rng(0)
    points = rng.uniform(-1.0, 1.0, (60, 3))
    inner = np.array([[1.0, -2.0, 0.5, 0.3], [0.0, 0.0, 0.0, -1e3]])
    answers = np.maximum(points @ inner[:1, :3].T + 0.3, 0.0) @ np.array([[1.0, 2.0]])
    start = Weights(inner, np.zeros((2, 2)), np.zeros((2, 4)), "relu")
    found = refine(start, points, answers, 1e-16, errors=False)
    assert np.allclose(found.weights.outer[:, 0], [1.0, 2.0])
    assert not found.weights.outer[:, 1].any()


def test_standard_errors_of_rounded_answers_are_what_the_errors_are() -> None:
    """Answers in single precision, two numbers per unknown: nine in ten entries within two bars."""
    within = []
    for seed in range(6):
        rng = np.random.default_rng([seed, 5])
        truth = Weights(
            rng.standard_normal((5, 5)),
            rng.standard_normal((4, 5)),
            rng.standard_normal((4, 5)),
            "gelu",
        )
        points = rng.standard_normal((36, 4))
        answers = truth(points).astype(np.float32).astype(np.float64)
        refined = refine(truth, points, answers, 2.0**-24)
        assert refined.errors is not None
        for name in ("inner", "outer", "affine"):
            gap = np.abs(getattr(refined.weights, name) - getattr(truth, name))
            within.append((gap <= 2.0 * getattr(refined.errors, name)).ravel())
    assert 0.9 < np.mean(np.concatenate(within)) < 0.995
