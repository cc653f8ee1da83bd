import numpy as np
import pytest

import keyhole
from keyhole import Outcome
from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF
from keyhole.learners.mlp.learner import MlpLearner, without_unseen
from keyhole.learners.mlp.refinement import Refined, Weights, refine
from keyhole.measurement.asker import Asker
from keyhole.models.mlp import Mlp
from keyhole.oracles.noise import NoiseModel


def network(seed, width=6, neurons=18, outputs=6, activation="gelu", *, linear=True, scale=1.0):
    rng = np.random.default_rng(seed)
    answer = () if outputs is None else (outputs,)
    rows = rng.standard_normal((neurons, width)) / width**0.5
    return Mlp(
        scale * rows * np.exp(0.3 * rng.standard_normal((neurons, 1))),
        rng.standard_normal(neurons) / 2,
        rng.standard_normal((*answer, neurons)),
        activation=activation,
        linear=scale * rng.standard_normal((*answer, width)) if linear else None,
        offset=rng.standard_normal(answer),
    )


@pytest.mark.parametrize("activation", ["gelu", "silu", "gelu_tanh", "quick_gelu"])
def test_free_inputs(activation):
    truth = network(1, activation=activation)
    found = keyhole.recover(keyhole.open_oracle(truth, width=6), MlpLearner())
    assert found.outcome is Outcome.RECOVERED
    assert keyhole.distance(found.model, truth) < 1e-10
    assert found.ledger.learning <= 4.5 * found.ledger.floor
    assert np.abs(found.errors.inner).max() < 1e-9


@pytest.mark.parametrize("scale", [1e-5, 1e4])
def test_decades_of_scale(scale):
    truth = network(2, scale=scale)
    found = keyhole.recover(keyhole.open_oracle(truth, width=6), MlpLearner())
    assert keyhole.distance(found.model, truth) < 1e-10


def test_a_known_linear_part_tells_the_sides():
    truth = network(3, linear=False)
    found = keyhole.recover(keyhole.open_oracle(truth, width=6), MlpLearner()).model
    assert not found.linear.any()
    gaps = np.linalg.norm(found.inner[:, None] - truth.inner, axis=2)
    assert gaps.min(axis=1).max() < 1e-10
    assert np.allclose(found.offset, truth.offset, atol=1e-10)


def test_scalar_answers():
    truth = network(4, width=4, neurons=6, outputs=None)
    found = keyhole.recover(keyhole.open_oracle(truth, width=4), MlpLearner())
    assert found.model.outputs is None
    assert keyhole.distance(found.model, truth) < 1e-9


def softplus(x):
    return np.logaddexp(0, x)


@pytest.mark.parametrize("kind", ["softplus", "two layers", "one odd neuron", "one relu"])
def test_impostors_are_not_recovered(kind):
    rng = np.random.default_rng(5)
    inner, outer = rng.standard_normal((18, 6)) / 2, rng.standard_normal((6, 18))
    truth = network(6)
    boxes = {
        "softplus": lambda x: softplus(x[:, -1] @ inner.T + 0.3) @ outer.T,
        "two layers": lambda x: truth(truth(x) / 4),
        "one odd neuron": lambda x: truth(x) + softplus(x[:, -1] @ inner[0])[:, None] * outer[:, 0],
    }
    boxes["one relu"] = lambda x: (
        truth(x) + np.maximum(x[:, -1] @ inner[0], 0)[:, None] * outer[:, 0]
    )
    found = keyhole.recover(keyhole.open_oracle(boxes[kind], width=6), MlpLearner(), throw=False)
    assert found.outcome is not Outcome.RECOVERED


def test_promises_that_are_not_kept():
    box = keyhole.open_oracle(network(7), width=6)
    with pytest.raises(keyhole.WrongFamily, match="promised"):
        keyhole.recover(box, MlpLearner(neurons=5))
    with pytest.raises(keyhole.WrongFamily, match="none of the activations SiLU"):
        keyhole.recover(box, MlpLearner(activation="silu"))
    with pytest.raises(keyhole.InvalidArgument, match="activation"):
        MlpLearner(activation="swish")


def smooth(seed, width, neurons, outputs, activation, gated=False):
    rng = np.random.default_rng(seed)
    return Mlp(
        rng.standard_normal((neurons, width)) / width**0.5,
        rng.standard_normal(neurons) / 2,
        rng.standard_normal((outputs, neurons)),
        activation=activation,
        linear=None if gated else rng.standard_normal((outputs, width)),
        gate=rng.standard_normal((neurons, width)) / width**0.5 if gated else None,
        gate_bias=rng.standard_normal(neurons) / 2 if gated else None,
    )


@pytest.mark.parametrize(
    ("activation", "gated", "domain"),
    [
        ("gelu", False, {"sphere": 12**0.5}),
        ("silu", True, {"sphere": 12**0.5}),
        ("sigmoid", False, {}),
        ("gelu", True, {}),
        ("silu", False, {"max_norm": 5.0}),
        ("tanh", False, {"low": -1.0, "high": 3.0}),
    ],
)
def test_spheres_balls_and_boxes(activation, gated, domain):
    truth = smooth(8, 12, 9 if gated else 18, 8, activation, gated)
    found = keyhole.recover(keyhole.open_oracle(truth, width=12, **domain), MlpLearner())
    assert found.outcome is Outcome.RECOVERED
    assert found.model.gated == gated
    assert keyhole.distance(found.model, truth) < 1e-9


def test_a_sphere_too_small_for_hessians():
    truth = network(11, width=4, neurons=14, outputs=5)
    box = keyhole.open_oracle(truth, width=4, sphere=2.0)
    found = keyhole.recover(box, MlpLearner(activation="gelu", neurons=14), seed=1)
    assert found.outcome is Outcome.RECOVERED
    assert keyhole.distance(found.model, truth) < 1e-9


def test_relus_are_left_to_their_learner():
    truth = network(9, activation="relu")
    found = keyhole.recover(keyhole.open_oracle(truth, width=6), MlpLearner())
    assert found.model.activation == "relu"
    assert keyhole.distance(found.model, truth) < 1e-6


def test_an_affine_box_has_no_neurons():
    matrix = np.random.default_rng(10).standard_normal((6, 6))
    with pytest.raises(keyhole.Unsupported, match="affine"):
        keyhole.recover(keyhole.open_oracle(lambda x: x[:, -1] @ matrix, width=6), MlpLearner())


def weights_and_points(seed, width=6, neurons=8, outputs=5):
    rng = np.random.default_rng(seed)
    inner = rng.standard_normal((neurons, width + 1))
    outer = rng.standard_normal((outputs, neurons))
    weights = Weights(inner, outer, np.zeros((outputs, width + 1)), "gelu")
    return weights, rng.standard_normal((200, width)), rng


@pytest.mark.parametrize("unit", [UNIT_ROUNDOFF, SINGLE_ROUNDOFF])
def test_terms_that_cancel_excuse_no_residual_of_few_digits(unit):
    weights, points, _ = weights_and_points(0)
    # two neurons that are nearly one, with large opposite outer weights: a wrong fit looks so
    inner = np.vstack([weights.inner[:1], weights.inner[:1] + 1e-4])
    outer = 1e4 * weights.outer[:, :1] * [1.0, -1.0]
    odd = Weights(inner, outer, weights.affine, "gelu")
    answers = odd(points)
    box = Asker(keyhole.open_oracle(lambda x: x, width=6, precision=NoiseModel(unit)))
    allowed = MlpLearner()._allowed(box, Refined(odd, 0.0, 0.0, 0), points, answers)
    size = np.sqrt(np.mean(answers**2))
    if unit == SINGLE_ROUNDOFF:
        assert allowed < 40.0 * unit * size
    else:
        assert allowed > 1000.0 * unit * size


def test_neurons_that_explain_rounding_alone_leave():
    weights, points, rng = weights_and_points(1)
    answers = weights(points).astype(np.float32).astype(float)
    one_more = Weights(
        np.vstack([weights.inner, rng.standard_normal((1, 7))]),
        np.column_stack([weights.outer, 1e-9 * rng.standard_normal(5)]),
        weights.affine,
        "gelu",
    )
    refined = refine(one_more, points, answers, SINGLE_ROUNDOFF, rng=rng)
    assert refined.weights.neurons == 9
    found = without_unseen(refined, points, answers, SINGLE_ROUNDOFF, rng)
    assert found.weights.neurons == 8
    assert np.abs(found.weights.inner - weights.inner).max() < 1e-4
    assert found.residual < 2e-7 * np.abs(answers).max()


def test_a_weak_neuron_stays():
    weights, points, rng = weights_and_points(2)
    outer = weights.outer * np.append(np.ones(7), 1e-3)
    weak = Weights(weights.inner, outer, weights.affine, "gelu")
    answers = weak(points).astype(np.float32).astype(float)
    refined = refine(weak, points, answers, SINGLE_ROUNDOFF, rng=rng)
    found = without_unseen(refined, points, answers, SINGLE_ROUNDOFF, rng)
    assert found.weights.neurons == 8
