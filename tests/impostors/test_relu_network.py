"""Boxes that are not one hidden layer of ReLUs must not come out as one."""

import numpy as np
import pytest

from keyhole.errors import IllConditioned, WrongFamily
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
from keyhole.oracles.base import Domain
from networks import CountingOracle, gelu, hidden, network, two_hidden_layers


def hidden_ball(seed=0):
    """A network with a step at a sphere: a discontinuity most lines meet."""
    net = network(seed, 8, 12)
    return lambda x: net(x) + 0.3 * ((x[:, 0] ** 2).sum(axis=1) < 6)


def largest(seed=0):
    rows = np.random.default_rng(seed).standard_normal((12, 8))
    return lambda x: (x[:, 0] @ rows.T).max(axis=1)


IMPOSTORS = {
    "two hidden layers": two_hidden_layers(),
    "gelu": hidden(gelu),
    "tanh": hidden(np.tanh),
    "softplus": hidden(lambda h: np.logaddexp(0, 20 * h) / 20),
    "squared relu": hidden(lambda h: np.maximum(h, 0) ** 2),
    "hard step": hidden(lambda h: np.maximum(h, 0) + 0.1 * (h > 0)),
    "step at a sphere": hidden_ball(),
    "maximum": largest(),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", IMPOSTORS)
def test_refused_with_a_counterexample(name, seed):
    box = CountingOracle(IMPOSTORS[name], 8)
    with pytest.raises(WrongFamily) as caught:
        ReluNetworkLearner().learn(box, np.random.default_rng(seed))
    example = caught.value.counterexample
    assert example.input.shape == (1, 8)
    answer = IMPOSTORS[name](example.input[None])[0]
    assert example.box_answer == pytest.approx(answer, rel=1e-9, abs=1e-9)
    assert abs(example.box_answer - example.model_answer) > 1e-8 * abs(example.box_answer)


@pytest.mark.parametrize("domain", [Domain(max_norm=4.0), Domain(low=-1.0, high=1.0)])
@pytest.mark.parametrize("name", IMPOSTORS)
def test_refused_in_bounded_domains(name, domain):
    box = CountingOracle(IMPOSTORS[name], 8, domain=domain)
    with pytest.raises((WrongFamily, IllConditioned)) as caught:
        ReluNetworkLearner().learn(box, np.random.default_rng(0))
    assert box.queries < 60000
    if isinstance(caught.value, WrongFamily):
        example = caught.value.counterexample
        answer = IMPOSTORS[name](example.input[None])[0]
        assert example.box_answer == pytest.approx(answer, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", IMPOSTORS)
def test_refused_in_single_precision(name):
    """So few digits tell what is far from any network. What is near one has hidden breakpoints, or
    not, by the last bits of its answers, but never comes out clean; what refutes it is an answer
    that it gave."""
    box = CountingOracle(lambda x: IMPOSTORS[name](x).astype(np.float32), 8)
    far = name in ("two hidden layers", "step at a sphere", "maximum")
    with pytest.raises(WrongFamily if far else (WrongFamily, IllConditioned)) as caught:
        ReluNetworkLearner().learn(box, np.random.default_rng(0))
    assert box.queries < 6000
    if isinstance(caught.value, WrongFamily) and caught.value.counterexample is not None:
        example = caught.value.counterexample
        answer = IMPOSTORS[name](example.input[None]).astype(np.float32)[0]
        assert example.box_answer == pytest.approx(answer, rel=1e-6, abs=1e-6)


def test_more_hyperplanes_than_promised():
    box = CountingOracle(network(0, 8, 12), 8)
    with pytest.raises(WrongFamily, match="12 hyperplanes"):
        ReluNetworkLearner(neurons=11).learn(box, np.random.default_rng(0))
