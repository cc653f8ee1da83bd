import numpy as np
import pytest

from keyhole.fitting.gauss_newton import Blocks, solve_linear
from keyhole.learners.block.forward import (
    Batch,
    BlockModel,
    TriangleScaling,
    run_block,
)
from keyhole.learners.block.refinement import form_of, hold_gauge, split_block
from keyhole.models.canonical import canonical_block
from keyhole.models.random import block


def secret(norm, heads=2, neurons=5, **options):
    return canonical_block(
        block(np.random.default_rng(0), 6, heads=heads, neurons=neurons, norm=norm, **options)
    )


def model_of(one, lengths=(1, 3), held=False):
    rng = np.random.default_rng(1)
    parts = split_block(one)
    blocks = Blocks.of(parts)
    data = []
    for length in lengths:
        tokens = rng.standard_normal((8, length, 6))
        data.append(Batch(tokens, one(tokens), rng.uniform(0.5, 2.0, 8)))
    still = blocks.join(hold_gauge(parts, form_of(one).activation == "relu")) > 0
    held = still if held else np.zeros(blocks.size, bool)
    return BlockModel(form_of(one), blocks, data, held), blocks.join(parts)


@pytest.mark.parametrize(
    ("norm", "heads", "options"),
    [
        ("pre", 2, {}),
        ("pre", 2, {"activation": "relu"}),
        ("pre", 2, {"parallel": True}),
        ("post", 2, {}),
        ("post", 2, {"activation": "relu"}),
        ("post", 0, {"activation": "relu"}),
        ("pre", 2, {"neurons": 0}),
        ("pre", 2, {"neurons": 0, "kind": "rms"}),
        ("post", 2, {"neurons": 0}),
        ("post", 2, {"neurons": 0, "kind": "rms"}),
    ],
)
def test_answers_and_derivatives_are_those_of_the_block(norm, heads, options):
    one = secret(norm, heads, **options)
    model, point = model_of(one, (1,) if not heads else (1, 3))
    for batch in model.data:
        answers = run_block(model.form, model.blocks.split(point), batch.tokens)
        assert np.allclose(answers, one(batch.tokens), atol=1e-13)
    at = model.linearize(point)
    rng = np.random.default_rng(2)
    step, vector = rng.standard_normal(len(point)), rng.standard_normal(len(at.residual))
    h = 1e-6
    slope = (model.residual(point + h * step) - model.residual(point - h * step)) / (2 * h)
    assert np.linalg.norm(at.jvp(step) - slope) < 1e-7 * np.linalg.norm(slope)
    assert np.isclose(vector @ at.jvp(step), at.vjp(vector) @ step)
    assert np.allclose(at.jacobian() @ step, at.jvp(step))
    assert np.allclose(model.gram(point), at.jacobian().T @ at.jacobian(), atol=1e-10)


def test_held_unknowns_take_the_gauge_out():
    model, point = model_of(secret("post", activation="relu"), (1, 2, 3, 4, 5, 6, 7, 8, 9), True)
    jacobian = model.linearize(point).jacobian()
    assert not jacobian[:, model.held].any()
    assert not model.gram(point)[:, model.held].any()
    free = jacobian[:, ~model.held]
    sizes = np.linalg.svd(free / np.linalg.norm(free, axis=0), compute_uv=False)
    assert sizes[-1] > 1e-8


def test_a_few_products_solve_for_a_step_in_scaled_unknowns():
    model, point = model_of(secret("pre"), (1, 2, 3, 4, 5, 6, 7, 8), True)
    near = BlockModel(
        model.form, model.blocks, model.data, model.held, TriangleScaling.of(model.gram(point))
    )
    rng = np.random.default_rng(3)
    moved = point * (1.0 + 1e-6 * rng.standard_normal(len(point)))
    wanted = np.where(model.held, 0.0, rng.standard_normal(len(point)))
    found = solve_linear(near.linearize(moved), near.linearize(moved).jvp(wanted), 1e-12, 40)
    assert np.linalg.norm(found.step - wanted) < 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_derivatives_by_epsilons_far_below_a_rounding_of_differences(norm):
    one = secret(norm)
    model, point = model_of(one)
    place = model.blocks.slices["epsilons"]
    point[place] = np.log(1e-12)
    columns = model.linearize(point).jacobian()[:, place]
    for number, column in enumerate(columns.T):
        step = np.zeros(len(point))
        step[place.start + number] = 0.5
        slope = model.residual(point + step) - model.residual(point - step)
        assert np.linalg.norm(column - slope) < 0.1 * np.linalg.norm(slope)


def test_no_step_loses_an_epsilon():
    model, point = model_of(secret("post"))
    moved = model.retract(point, np.full(len(point), -300.0))
    change = model.blocks.split(moved - point)
    assert (change["epsilons"] == -1.0).all()
    assert (change["offset"] == -300.0).all()


@pytest.mark.parametrize(
    ("norm", "heads", "neurons"), [("pre", 2, 5), ("post", 2, 5), ("post", 0, 5), ("post", 2, 0)]
)
def test_units_of_groups_make_their_own_columns_orthonormal(norm, heads, neurons):
    one = secret(norm, heads, neurons, activation="relu")
    model, point = model_of(one, (1,) * 12 if not heads else (1, 2, 3, 4, 5, 6, 7, 8, 9), True)
    units = model.group_units(point, ridge=0.0)
    assert np.array_equal(np.sort(np.concatenate(units.groups)), np.arange(len(point)))
    jacobian = model.linearize(point).jacobian()
    for group, unit in zip(units.groups, units.units, strict=True):
        free = group[~model.held[group]]
        own = jacobian[:, group].T @ jacobian[:, group]
        triangle = unit.triangle * unit.sizes
        assert np.allclose((triangle.T @ triangle)[:, ~model.held[group]],
                           own[:, ~model.held[group]], atol=1e-8 * np.abs(own).max())  # fmt: skip
        assert len(free)
    z = np.random.default_rng(4).standard_normal(len(point))
    step = np.random.default_rng(5).standard_normal(len(point))
    assert np.isclose(units.apply(z) @ step, z @ units.adjoint(step))
    assert np.allclose(units.times(2.0).apply(z), 2.0 * units.apply(z))
