"""Boxes that are not one head of attention and a ReLU network must not come out as that."""

import numpy as np
import pytest

from keyhole.errors import KeyholeError, WrongFamily
from keyhole.learners.transformer.learner import Transformer
from networks import CountingOracle, gelu, layer, network


def two_heads():
    first, second = layer(0, 6, 10), layer(1, 6, 10)
    return lambda x: first.network((first.attended(x) + second.attended(x)) / 2)


def windowed():
    plain = layer(0, 6, 10)
    return lambda x: plain(x[:, -2:])


def other_activation():
    plain = layer(0, 6, 10)
    net = plain.network
    return lambda x: gelu(plain.attended(x) @ net.weight.T + net.bias) @ net.output


def no_attention():
    net = network(0, 6, 10)
    return lambda x: net(x.max(axis=1))


IMPOSTORS = {
    "two heads": two_heads(),
    "window of two": windowed(),
    "gelu": other_activation(),
    "maximum": no_attention(),
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_refused(name):
    box = CountingOracle(IMPOSTORS[name], 6)
    with pytest.raises(KeyholeError) as caught:
        Transformer().learn(box, np.random.default_rng(0))
    if isinstance(caught.value, WrongFamily):
        example = caught.value.counterexample
        answer = IMPOSTORS[name](example.input[None])[0]
        assert example.box_answer == pytest.approx(answer, rel=1e-9, abs=1e-9)
    else:
        assert name == "maximum"
