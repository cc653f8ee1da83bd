import numpy as np
import pytest

import keyhole
from keyhole import Outcome
from keyhole.learners.mlp.learner import MlpLearner
from keyhole.models.mlp import Mlp
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
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


@pytest.mark.parametrize("relative", [1e-15, 1e-13, 1e-11, 1e-9])
def test_errors_follow_the_noise_over_decades(relative):
    truth, rng = network(5, width=12, neurons=24, outputs=12), np.random.default_rng(0)

    def box(tokens):
        answers = truth(tokens)
        return answers * (1.0 + relative * rng.standard_normal(answers.shape))

    spec = Spec(12, precision=NoiseModel(relative))
    found = keyhole.recover(FunctionOracle(box, spec), MlpLearner())
    assert found.outcome is Outcome.RECOVERED
    assert keyhole.distance(found.model, truth) < 1e3 * relative
    assert found.ledger.learning <= 40 * found.ledger.floor


def test_a_search_in_answers_less_exact_than_they_look_ends():
    truth, rng = network(6, width=8, neurons=16, outputs=8), np.random.default_rng(0)

    def box(tokens):
        answers = truth(tokens)
        return answers * (1.0 + 1e-9 * rng.standard_normal(answers.shape))

    found = keyhole.recover(keyhole.open_oracle(box, width=8), MlpLearner(), throw=False)
    assert found.outcome is Outcome.ILL_CONDITIONED
    floor = (36 * (2 * 9 + 8) + 8 * 9) / 8  # of as many gated neurons as are expected
    assert found.ledger.learning <= 41 * floor


def test_few_digits_take_no_more_answers_than_many():
    truth = smooth(12, 8, 6, 8, "silu")
    box = keyhole.open_oracle(truth.astype(np.float32), width=8, sphere=8**0.5)
    found = keyhole.recover(box, MlpLearner())
    assert found.outcome is Outcome.RECOVERED
    assert keyhole.distance(found.model, truth) < 1e-5
    assert found.ledger.learning <= 8 * found.ledger.floor
