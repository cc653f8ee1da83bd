import numpy as np
import pytest

from keyhole.errors import NotIdentifiable
from keyhole.learners.mlp import InputRegion
from keyhole.learners.transformer.score_from_segments import (
    Lifted,
    design_probes,
    learn_score,
    read_weights,
    steepness,
)
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from keyhole.oracles.base import Domain
from networks import CountingOracle, layer, network


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


def test_probes_are_orthonormal_and_none_runs_along_a_level_set():
    net = network(0, 6, 10)
    region = InputRegion.of(Domain(), 6, None)
    anchors, probes = design_probes(net, region, np.random.default_rng(0))
    assert anchors @ anchors.T == pytest.approx(np.eye(6), abs=1e-12)
    assert probes.shape == (7, 6, 6)
    for basis in probes:
        assert basis @ basis.T == pytest.approx(np.eye(6), abs=1e-12)


@pytest.mark.parametrize("key_bias", [False, True])
def test_a_known_network_tells_the_score(key_bias):
    secret = layer(3, 6, 10, key_bias=key_bias)
    box = CountingOracle(secret, 6)
    region = InputRegion.of(Domain(), 6, None)
    found = learn_score(box, secret.network, region, 1e-15, np.random.default_rng(0))
    assert found.score == pytest.approx(secret.score, abs=1e-10)
    assert found.key_bias == pytest.approx(secret.key_bias, abs=1e-10)
    assert bool(found.key_bias_error.any()) == key_bias
    assert (found.score_error > 0).all()
    assert box.queries <= 36 + 1 + 6 * key_bias + 4


def test_an_error_of_the_network_shows_in_the_errors_of_the_score():
    secret = layer(3, 6, 10)
    net = secret.network
    off = ReluNetwork(net.weight, net.bias, net.output, offset=1e-7)
    box, region = CountingOracle(secret, 6), InputRegion.of(Domain(), 6, None)
    found = learn_score(box, off, region, 1e-7, np.random.default_rng(0))
    gap = np.abs(found.score - secret.score)
    assert gap.max() > 1e-9
    assert np.linalg.norm(gap) < 5 * np.linalg.norm(found.score_error)


def test_a_constant_network_hides_the_score():
    constant = ReluNetwork(np.zeros((0, 4)), [], [], None, 1.0)
    box = CountingOracle(TransformerModel(np.eye(4), None, constant), 4)
    region = InputRegion.of(Domain(), 4, None)
    with pytest.raises(NotIdentifiable, match="does not change"):
        learn_score(box, constant, region, 1e-15, np.random.default_rng(0))
    assert box.queries == 0
