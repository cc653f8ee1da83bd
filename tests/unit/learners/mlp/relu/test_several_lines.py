import numpy as np
import pytest

from keyhole.learners.base import Inconclusive
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.hypothesis import FoundNetwork, NetworkBox
from keyhole.learners.mlp.relu.least_squares import keep_neurons, unflatten_output
from keyhole.learners.mlp.relu.several_lines import (
    MultiLineOptions,
    MultiLineSearch,
    relative_gaps,
    search_several_lines,
)
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Domain
from networks import CountingOracle, network

FREE = InputRegion.of(Domain(), 6, None)


def single(net):
    exact = net.astype(np.float32)
    return NetworkBox.of(CountingOracle(lambda x: exact(x[:, 0].astype(np.float32)), net.width))


def searching(net, **options):
    rng = np.random.default_rng(0)
    return MultiLineSearch(single(net), FREE, rng, MultiLineOptions(**options))


def test_gaps_do_not_depend_on_orientation():
    net = unflatten_output(network(0, 6, 4))
    turned = ReluNetwork(-net.weight, -net.bias, net.output)
    gaps = relative_gaps(net, turned)
    assert np.diag(gaps) == pytest.approx(np.zeros(4), abs=1e-12)
    assert (gaps + np.eye(4) > 0.1).all()


def test_neurons_met_again_get_a_vote_and_the_better_measurement_stays():
    net = unflatten_output(network(0, 6, 5))
    search = searching(network(0, 6, 5))
    search.remember(keep_neurons(net, np.arange(3)), np.full(3, 1e-3))
    search.lines = 1
    off = ReluNetwork(net.weight + 1e-3, net.bias, net.output)
    search.remember(keep_neurons(off, np.arange(1, 5)), np.array([1e-5, 1e-1, 1e-4, 1e-4]))
    assert search.votes.tolist() == [1, 2, 2, 1, 1]
    assert search.doubts.tolist() == [1e-3, 1e-5, 1e-3, 1e-4, 1e-4]
    assert search.seen.weight[1] == pytest.approx(off.weight[1])
    assert search.seen.weight[2] == pytest.approx(net.weight[2])


def test_wrong_neurons_among_those_seen_are_left_out():
    net = network(4, 6, 8)
    search = searching(net)
    assert search.scan_line() is None
    search.explain()
    assert search.misfit < 3.0
    search.refine()
    assert search.network.neurons == 8
    assert len(search.error) == 8


def test_single_precision_is_reached():
    net = network(3, 6, 8)
    found = search_several_lines(single(net), FREE, np.random.default_rng(0))
    assert isinstance(found, FoundNetwork)
    points = np.random.default_rng(1).standard_normal((500, 6))
    assert np.abs(found.network(points)[:, 0] - net(points)).max() < 5e-6
    assert "queries per unknown" in found.notes[0]


def test_too_many_unknowns_are_said():
    failed = searching(network(0, 6, 8), most_unknowns=20).run()
    assert isinstance(failed, Inconclusive)
    assert "more than can be fitted" in failed.reason


def test_a_neuron_that_no_line_showed_is_found_by_the_fit():
    net = unflatten_output(network(5, 6, 8))
    search = searching(net)
    assert search.scan_line() is None
    search.seen = keep_neurons(net, np.arange(8) != 3)
    search.votes = np.full(7, 2)
    search.explain()
    assert search.misfit < 3.0
    assert search.network.neurons == 8
