"""Boxes that are no network with one hidden layer of a known activation: never RECOVERED."""

import numpy as np
import pytest

import keyhole
from keyhole import MlpLearner, Outcome
from keyhole.models.mlp import Mlp

WIDTH, NEURONS = 3, 4


def network(seed, activation="gelu"):
    rng = np.random.default_rng([15, seed])
    return Mlp(
        rng.standard_normal((NEURONS, WIDTH)) / 2,
        rng.standard_normal(NEURONS) / 2,
        rng.standard_normal((WIDTH, NEURONS)),
        activation=activation,
    )


def softplus(a):
    return np.logaddexp(0, a)


def normed(x):
    x = x[:, -1] - x[:, -1].mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)


def layer(phi):
    one = network(0)
    return lambda x: phi(x[:, -1] @ one.inner.T + one.inner_bias) @ one.outer.T


def with_odd_neuron(phi):
    one, (row, outer) = network(1), np.random.default_rng(2).standard_normal((2, WIDTH))
    return lambda x: one(x) + phi(x[:, -1] @ row)[:, None] * outer


IMPOSTORS = {
    "sine": layer(np.sin),
    "mish": layer(lambda a: a * np.tanh(softplus(a))),
    "elu": layer(lambda a: np.where(a > 0, a, np.expm1(np.minimum(a, 0)))),
    "two layers": lambda x: network(3)(network(0)(x) / 4),
    "a norm inside": lambda x: network(0)(normed(x)),
    "one tanh among GELUs": with_odd_neuron(np.tanh),
    "one ReLU among GELUs": with_odd_neuron(lambda a: np.maximum(a, 0)),
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_never_recovered(name):
    box = keyhole.open_oracle(IMPOSTORS[name], width=WIDTH)
    promised = NEURONS if name == "sine" else None  # bounds the redundant neurons that are tried
    found = keyhole.recover(box, MlpLearner(neurons=promised), throw=False)
    assert found.outcome in (Outcome.REJECTED, Outcome.ILL_CONDITIONED)
    assert found.reason
