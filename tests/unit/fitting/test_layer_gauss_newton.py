"""A layer fitted to all answers: derivative, convergence, calibrated standard errors."""

from dataclasses import replace

import numpy as np

from keyhole.fitting.layer_gauss_newton import (
    PATIENT,
    FactoredLayer,
    LayerAnswers,
    LayerModel,
    change_maps,
    fit_layer,
    fit_rough_layer,
    mix_outputs,
    move_layer,
    multiply_out,
)
from keyhole.linalg.low_rank_fit import Factored

WIDTH, OUTPUTS, RANK = 5, 4, 2


def drawn(rng: np.random.Generator, bias: bool = True) -> FactoredLayer:
    rows = WIDTH + 1 if bias else WIDTH

    def part(columns: int) -> Factored:
        left, right = rng.standard_normal((WIDTH, RANK)), rng.standard_normal((RANK, columns))
        return Factored.of(left, right / 2, RANK)

    heads = range(2)
    offset = rng.standard_normal(OUTPUTS) if bias else np.zeros(OUTPUTS)
    return FactoredLayer(
        tuple(part(rows) for _ in heads), tuple(part(OUTPUTS) for _ in heads), offset, bias
    )


def asked(
    layer: FactoredLayer, rng: np.random.Generator, noise: float, count: int
) -> list[LayerAnswers]:
    data = []
    for length in (1, 3):
        tokens = rng.standard_normal((count, length, WIDTH))
        blank = LayerAnswers(tokens, np.zeros((count, OUTPUTS)), np.full(count, max(noise, 1e-12)))
        answers = LayerModel((blank,)).residual(layer).reshape(count, OUTPUTS)
        answers = answers * blank.errors[:, None] + noise * rng.standard_normal((count, OUTPUTS))
        data.append(LayerAnswers(tokens, answers, blank.errors))
    return data


def test_the_derivative_is_that_of_the_answers_and_its_transpose_fits() -> None:
    rng = np.random.default_rng(0)
    layer = drawn(rng)
    data = asked(layer, rng, 1.0, 20)
    model = LayerModel(tuple(data), np.float64)
    at = model.linearize(layer)
    step = at.scaling.apply(1e-6 * rng.standard_normal(at.unknowns))
    change = model.residual(model.retract(layer, step)) - at.residual
    np.testing.assert_allclose(at.jvp(step), change, atol=1e-4 * np.abs(change).max())
    other = rng.standard_normal(len(change))
    np.testing.assert_allclose(other @ at.jvp(step), at.vjp(other) @ step, rtol=1e-9)


def test_single_precision_changes_the_derivative_by_rounding_alone() -> None:
    rng = np.random.default_rng(4)
    layer = drawn(rng)
    data = tuple(asked(layer, rng, 1.0, 20))
    single, double = (LayerModel(data, kind).linearize(layer) for kind in (np.float32, np.float64))
    step = rng.standard_normal(single.unknowns)
    np.testing.assert_allclose(single.jvp(step), double.jvp(step), atol=1e-4)
    other = rng.standard_normal(len(single.residual))
    np.testing.assert_allclose(single.vjp(other), double.vjp(other), atol=1e-4)
    np.testing.assert_array_equal(single.residual, double.residual)


def test_a_step_changes_the_maps_as_it_says_and_keeps_their_ranks() -> None:
    rng = np.random.default_rng(2)
    layer = drawn(rng)
    at = LayerModel(tuple(asked(layer, rng, 1.0, 20))).linearize(layer)
    step = 1e-6 * rng.standard_normal(at.unknowns)
    moved = move_layer(layer, step)
    scores, values, offset = change_maps(layer, step)
    for new, old, change in zip(
        (*moved.scores, *moved.values),
        (*layer.scores, *layer.values),
        (*scores, *values),
        strict=True,
    ):
        assert new.rank == old.rank == RANK
        np.testing.assert_allclose(multiply_out(new) - multiply_out(old), change, atol=1e-9)
    np.testing.assert_allclose(moved.offset - layer.offset, offset, rtol=1e-6)


def test_the_units_make_the_problem_well_conditioned() -> None:
    rng = np.random.default_rng(3)
    layer = drawn(rng)
    at = LayerModel(tuple(asked(layer, rng, 1.0, 300)), np.float64).linearize(layer)
    columns = np.stack([at.jvp(at.scaling.apply(unit)) for unit in np.eye(at.unknowns)], axis=1)
    sizes = np.linalg.svd(columns, compute_uv=False)
    assert at.freedom == layer.unknowns
    assert sizes[at.freedom] < 1e-9 * sizes[0]
    assert sizes[0] < 100 * sizes[at.freedom - 1]


def test_noise_is_averaged_out_as_the_standard_errors_say() -> None:
    rng = np.random.default_rng(1)
    for bias in (True, False):
        truth = drawn(rng, bias)
        start = FactoredLayer(
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
            gap = np.linalg.norm(multiply_out(found) - multiply_out(true))
            assert gap < 1e-3 * np.linalg.norm(multiply_out(true))
            ratios.append(gap / np.linalg.norm(bar))
        assert max(ratios) < 3
        assert np.median(ratios) > 0.15  # wider than needed by a factor of about two, no more
        if not bias:
            assert not fit.layer.offset.any()


def test_the_derivative_is_formed_as_its_products_have_it() -> None:
    rng = np.random.default_rng(8)
    layer = drawn(rng)
    at = LayerModel(tuple(asked(layer, rng, 1.0, 20)), np.float64).linearize(layer)
    columns = np.stack([at.jvp(unit) for unit in np.eye(at.unknowns)], axis=1)
    np.testing.assert_allclose(at.jacobian(), columns, atol=1e-12 * np.abs(columns).max())


def test_the_numbers_of_an_answer_are_one_observation() -> None:
    """An error that all numbers of an answer share is no less an error for being seen in each of
    them: nine in ten entries lie within two standard errors."""
    rng = np.random.default_rng(9)
    within = []
    for _ in range(5):
        truth = drawn(rng, bias=False)
        data = [
            replace(part, answers=part.answers + 1e-5 * rng.standard_normal((len(part.answers), 1)))
            for part in asked(truth, rng, 1e-6, 60)
        ]
        fit = fit_layer(truth, data, rng, PATIENT, working=np.float64)
        for found, true, bar in zip(
            (*fit.layer.scores, *fit.layer.values),
            (*truth.scores, *truth.values),
            (*fit.score_errors, *fit.value_errors),
            strict=True,
        ):
            within.append(np.abs(multiply_out(found) - multiply_out(true)) <= 2.0 * bar)
    assert 0.9 < np.mean(np.concatenate([part.ravel() for part in within])) < 0.995


def test_mixed_outputs_are_those_of_the_layer_multiplied() -> None:
    rng = np.random.default_rng(5)
    layer, matrix = drawn(rng), rng.standard_normal((OUTPUTS, OUTPUTS))
    (_, data) = asked(layer, rng, 1.0, 6)
    plain = LayerModel((data,)).residual(layer).reshape(6, OUTPUTS) + data.answers
    mixed = LayerModel((data,)).residual(mix_outputs(layer, matrix)).reshape(6, OUTPUTS)
    np.testing.assert_allclose(mixed + data.answers, plain @ matrix, atol=1e-9)


def test_a_layer_off_by_a_few_per_cent_is_fitted() -> None:
    """Outputs of very different sizes; scores off by three per cent, values by one in a thousand."""
    rng = np.random.default_rng(6)
    truth = mix_outputs(drawn(rng), np.diag(np.logspace(0, -3, OUTPUTS)))
    data = asked(truth, rng, 1e-7, 100)
    start = FactoredLayer(
        tuple(Factored(s.left, 1.03 * s.singular, s.right) for s in truth.scores),
        tuple(Factored(v.left, 1.001 * v.singular, v.right) for v in truth.values),
        truth.offset,
    )
    fit = fit_rough_layer(start, data, rng)
    for maps, bars, true_maps in (
        (fit.layer.scores, fit.score_errors, truth.scores),
        (fit.layer.values, fit.value_errors, truth.values),
    ):
        for found, bar, true in zip(maps, bars, true_maps, strict=True):
            gap = np.linalg.norm(multiply_out(found) - multiply_out(true))
            assert gap < 1e-4 * np.linalg.norm(multiply_out(true))
            assert gap < 2.0 * np.linalg.norm(bar)


def test_queries_in_pieces_are_all_there() -> None:
    rng = np.random.default_rng(7)
    tokens, answers = rng.standard_normal((40, 500, 500)), rng.standard_normal((40, 2))
    pieces = LayerAnswers(tokens, answers, np.arange(1.0, 41.0)).split()
    assert len(pieces) == 3
    np.testing.assert_array_equal(np.concatenate([p.answers for p in pieces]), answers)
    np.testing.assert_array_equal(np.concatenate([p.errors for p in pieces]), np.arange(1.0, 41.0))
    assert [len(p.tokens) for p in pieces] == [16, 16, 8]
