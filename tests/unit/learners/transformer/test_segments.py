import numpy as np
import pytest

from keyhole.learners.transformer.segments import Lifted, read_weights, steepness
from networks import network


@pytest.mark.parametrize("outputs", [None, 3])
def test_weights_are_read_off_the_network(outputs):
    net = network(0, 5, 12, outputs)
    rng = np.random.default_rng(0)
    start, step = rng.standard_normal((2, 200, 5))
    steep = steepness(net, Lifted.of(net, start), 1.0, Lifted.of(net, step), 1.0) > 0
    start, step = start[steep], step[steep]
    assert len(start) > 20
    weight = rng.uniform(0.2, 0.8, len(start))
    answers = net(start + weight[:, None] * step).reshape(len(start), -1)
    reading = read_weights(net, start, step, answers)
    assert reading.weight == pytest.approx(weight, abs=1e-12)
    assert reading.off.max() < 1e-12


def test_segments_that_turn_back_are_not_steep():
    net = network(0, 5, 12)
    rng = np.random.default_rng(1)
    start, step = rng.standard_normal((2, 300, 5)) * 2
    steep = steepness(net, Lifted.of(net, start), 1.0, Lifted.of(net, step), 1.0)
    for begin, move, least in zip(start, step, steep, strict=True):
        path = net(begin + np.linspace(0, 1, 400)[:, None] * move)
        if least > 0:
            rises = np.diff(path) * np.sign(path[-1] - path[0])
            assert rises.min() > -1e-9
    assert (steep == 0).any()
