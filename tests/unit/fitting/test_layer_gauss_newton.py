"""A layer fitted to all answers: derivative, convergence, calibrated standard errors."""

import numpy as np

from keyhole.fitting.layer_gauss_newton import Answered, Layer, _Linear, dense, fit_layer
from keyhole.linalg.low_rank_fit import Factored

WIDTH, OUTPUTS, RANK = 5, 4, 2


def drawn(rng: np.random.Generator, bias: bool = True) -> Layer:
    rows = WIDTH + 1 if bias else WIDTH

    def part(columns: int) -> Factored:
        left, right = rng.standard_normal((WIDTH, RANK)), rng.standard_normal((RANK, columns))
        return Factored.of(left, right / 2, RANK)

    heads = range(2)
    offset = rng.standard_normal(OUTPUTS) if bias else np.zeros(OUTPUTS)
    return Layer(
        tuple(part(rows) for _ in heads), tuple(part(OUTPUTS) for _ in heads), offset, bias
    )


def asked(layer: Layer, rng: np.random.Generator, noise: float, count: int) -> list[Answered]:
    data = []
    for length in (1, 3):
        tokens = rng.standard_normal((count, length, WIDTH))
        blank = Answered(tokens, np.zeros((count, OUTPUTS)), np.full(count, max(noise, 1e-12)))
        answers = -_Linear(layer, [blank]).residuals().reshape(count, OUTPUTS)
        answers = answers * blank.errors[:, None] + noise * rng.standard_normal((count, OUTPUTS))
        data.append(Answered(tokens, answers, blank.errors))
    return data


def test_the_derivative_is_that_of_the_answers_and_its_transpose_fits() -> None:
    rng = np.random.default_rng(0)
    layer = drawn(rng)
    data = asked(layer, rng, 1.0, 20)
    point = _Linear(layer, data)
    point.whiten(rng)
    step = 1e-6 * rng.standard_normal(point.unknowns)
    moved = _Linear(point.moved(step), data)
    change = point.residuals() - moved.residuals()
    np.testing.assert_allclose(point.forward(step), change, atol=1e-4 * np.abs(change).max())
    other = rng.standard_normal(len(change))
    np.testing.assert_allclose(other @ point.forward(step), point.backward(other) @ step, rtol=1e-9)


def test_noise_is_averaged_out_as_the_standard_errors_say() -> None:
    rng = np.random.default_rng(1)
    for bias in (True, False):
        truth = drawn(rng, bias)
        start = Layer(
            tuple(Factored(s.left, 1.001 * s.singular, s.right) for s in truth.scores),
            truth.values,
            truth.offset,
            bias,
        )
        fit = fit_layer(start, asked(truth, rng, 1e-5, 100), rng)
        assert 0.8 < fit.misfit < 1.2
        assert fit.layer.unknowns == truth.unknowns
        ratios = []
        for found, true, bar in zip(
            (*fit.layer.scores, *fit.layer.values),
            (*truth.scores, *truth.values),
            (*fit.score_errors, *fit.value_errors),
            strict=True,
        ):
            gap = np.linalg.norm(dense(found) - dense(true))
            assert gap < 1e-3 * np.linalg.norm(dense(true))
            ratios.append(gap / np.linalg.norm(bar))
        assert max(ratios) < 3
        assert np.median(ratios) > 0.15  # wider than needed by a factor of about two, no more
        if not bias:
            assert not fit.layer.offset.any()
