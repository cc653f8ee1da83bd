import numpy as np
import pytest

from keyhole.learners.mlp.hessians import (
    NotEnough,
    Span,
    Steps,
    find_span,
    gated_pairs,
    likely_activations,
    rank_ones,
    read_sphere,
    weights_of,
)
from keyhole.linalg.symmetric import flat, unflat
from keyhole.models.mlp import Mlp

UNIT = 2.0**-53


def span_of(matrices, gap=1e6):
    """The span of exact matrices and the identity."""
    s = matrices.shape[-1]
    table = np.vstack([flat(matrices), flat(np.eye(s)[None])])
    _, _, right = np.linalg.svd(table, full_matrices=True)
    return Span(right[: len(table)], unflat(right[len(table) :], s), gap)


def directions(rng, count, s):
    rows = rng.standard_normal((count, s))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def network(rng, width, neurons, outputs, activation="gelu", gated=False):
    return Mlp(
        rng.standard_normal((neurons, width)),
        rng.standard_normal(neurons) / 2,
        rng.standard_normal((outputs, neurons)),
        activation=activation,
        gate=rng.standard_normal((neurons, width)) if gated else None,
        gate_bias=rng.standard_normal(neurons) / 2 if gated else None,
    )


def test_symmetric_matrices_as_vectors():
    rng = np.random.default_rng(0)
    a = rng.standard_normal((2, 5, 5))
    a = a + a.transpose(0, 2, 1)
    assert np.allclose(unflat(flat(a), 5), a)
    assert np.isclose(flat(a)[0] @ flat(a)[1], (a[0] * a[1]).sum())


def test_the_rank_of_a_span_is_found():
    rng = np.random.default_rng(1)
    rows = directions(rng, 20, 8)
    squares = rows[:, :, None] * rows[:, None, :]
    hessians = np.einsum("kdj,jab->kdab", rng.standard_normal((5, 6, 20)), squares)
    hessians += rng.standard_normal((5, 6, 1, 1)) * np.eye(8)
    hessians += 1e-6 * rng.standard_normal(hessians.shape)
    span = find_span(hessians, 26, 6.0)
    assert span is not None
    assert span.rank == 20
    assert find_span(rng.standard_normal((5, 6, 8, 8)), 26, 6.0) is None


def test_rank_one_elements_are_found():
    rng = np.random.default_rng(2)
    rows = directions(rng, 40, 12)
    found = rank_ones(span_of(rows[:, :, None] * rows[:, None, :]), 40, rng)
    cosines = np.abs(found @ rows.T)
    assert sorted(cosines.argmax(axis=1)) == list(range(40))
    assert (1 - cosines.max(axis=1)).max() < 1e-12


def test_gated_pairs_are_found():
    rng = np.random.default_rng(3)
    g, u = directions(rng, 12, 10), directions(rng, 12, 10)
    mixed = g[:, :, None] * u[:, None, :]
    atoms = np.concatenate([g[:, :, None] * g[:, None, :], mixed + mixed.transpose(0, 2, 1)])
    found = gated_pairs(span_of(atoms), 12, rng)
    cosines = np.abs(found[0] @ g.T)
    assert sorted(cosines.argmax(axis=1)) == list(range(12))
    assert (1 - cosines.max(axis=1)).max() < 1e-10


@pytest.mark.parametrize(
    ("activation", "gated", "inside"),
    [("gelu", False, False), ("tanh", False, True), ("silu", True, False), ("silu", True, True)],
)
def test_a_sphere_tells_all_neurons_to_a_few_digits(activation, gated, inside):
    rng = np.random.default_rng(4)
    truth = network(rng, 12, 9 if gated else 18, 8, activation, gated)
    sketch = read_sphere(lambda x, _: truth(x), 12, UNIT, rng, inside=inside)
    assert sketch.rows.shape == ((2, 9, 12) if gated else (1, 18, 12))
    (name,) = likely_activations(sketch, ["gelu", "silu", "gelu_tanh", "tanh"])
    weights, which = weights_of(sketch, name)
    assert weights.activation == activation
    assert set(which) == set(range(truth.neurons))
    rows = truth.inner if truth.gate is None else truth.gate
    mine = (weights.inner if weights.gate is None else weights.gate)[:, :-1]
    gaps = np.minimum(
        np.linalg.norm(mine[:, None] - rows, axis=2), np.linalg.norm(mine[:, None] + rows, axis=2)
    )
    assert (gaps.min(axis=0) / np.linalg.norm(rows, axis=1)).max() < 0.02


def test_too_many_neurons_are_said():
    rng = np.random.default_rng(5)
    truth = network(rng, 6, 24, 6)
    with pytest.raises(NotEnough):
        read_sphere(lambda x, _: truth(x), 6, UNIT, rng)


def test_steps_follow_the_digits():
    assert Steps.of(UNIT, 16).second < Steps.of(2.0**-24, 16).second
    assert not Steps.of(UNIT, 16).two_sided
    assert Steps.of(2.0**-24, 16).two_sided
    assert Steps.of(UNIT, 400).two_sided


@pytest.mark.parametrize("inside", [False, True])
def test_where_digits_are_few_steps_follow_the_weights(inside):
    rng = np.random.default_rng(6)
    truth, frame = network(rng, 16, 24, 8), np.eye(16)
    unit = 2.0**-24

    def step(scale):
        ask = lambda x, _: truth(scale * x)  # noqa: E731
        return Steps.of(unit, 16).balanced(ask, frame, unit, inside).second * scale

    lengths = [step(scale) for scale in (1.0, 2.0, 4.0)]
    assert max(lengths) < 2.0 * min(lengths)  # in the network's own scale


def test_few_digits_of_a_network_with_large_weights():
    rng = np.random.default_rng(7)
    truth = network(rng, 16, 40, 16).astype(np.float32)
    ask = lambda x, _: np.asarray(truth((4.0 * x).astype(np.float32)), dtype=float)  # noqa: E731
    sketch = read_sphere(ask, 16, 2.0**-24, rng, inside=True)
    assert sketch.rows.shape == (1, 40, 16)
    rows = truth.inner.astype(float)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    mine = sketch.rows[0] / np.linalg.norm(sketch.rows[0], axis=1, keepdims=True)
    assert np.abs(rows @ mine.T).max(axis=1).min() > 0.99
