import numpy as np
import pytest

from keyhole.learners.base import Hypothesis, Refuted
from keyhole.learners.mlp.relu.bounded import (
    POINTS,
    RaySearch,
    draw_points,
    measure_affine_part,
    search_by_rays,
)
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.hypothesis import FoundNetwork, NetworkBox
from keyhole.learners.mlp.relu.least_squares import keep_neurons
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Domain
from networks import CountingOracle, network, two_hidden_layers

BALL = Domain(max_norm=3.0)


def box_of(function, width=5, domain=BALL):
    return NetworkBox.of(CountingOracle(function, width, domain=domain)), InputRegion.of(
        domain, width, None
    )


def test_validation_points_lie_in_the_domain_and_mostly_at_its_edge():
    region = InputRegion.of(BALL, 5, None)
    points = draw_points(region, np.random.default_rng(0), 0.75)
    norms = np.linalg.norm(points, axis=1)
    assert len(points) == POINTS
    assert norms.max() <= 3.0
    assert (norms > 0.97 * 3.0).mean() >= 0.75


def test_the_affine_part_is_measured_where_no_hyperplane_is_near():
    net = ReluNetwork([[1.0, 0.0]], [-0.3], [2.0], [1.0, -1.0], 0.5)
    region = InputRegion.of(BALL, 2, None)
    ask = lambda points: net(points)[:, None]  # noqa: E731
    slopes, value, step = measure_affine_part(
        region, np.random.default_rng(0), np.array([0.295, 0.0]), 1e-16, ask
    )
    assert slopes[:, 0] == pytest.approx([1.0, -1.0], abs=1e-10)
    assert value[0] == pytest.approx(0.795)
    assert 0 < step < 0.005


def test_a_ray_adds_the_neurons_it_meets():
    net = network(0, 5, 6)
    box, region = box_of(net)
    search = RaySearch.begin(box, region, np.random.default_rng(0))
    assert search.network.neurons == 0
    left = search.differences()
    assert search.follow_ray(search.points[int(np.argmax(left))])
    assert search.network.neurons > 0
    assert search.differences().max() < left.max() + 1e-9
    # a neuron on a known hyperplane is no new one
    known = search.network.neurons
    again = ReluNetwork(search.network.weight, search.network.bias, 1e-9 * search.network.output)
    assert not search.add_neurons(again, np.zeros(known))
    assert search.network.neurons == known
    assert not search.bent


def test_few_digits_tell_wrong_neurons_in_the_end():
    """The right neurons, a little off, and one that is none: the fit to all answers sorts it out."""
    net = network(0, 5, 6)
    single = net.astype(np.float32)
    box, region = box_of(lambda x: single(x[:, 0].astype(np.float32)))
    search = RaySearch.begin(box, region, np.random.default_rng(0))
    assert search.exactness.low
    rng = np.random.default_rng(1)
    rows = np.vstack([net.weight + 1e-3 * rng.standard_normal((6, 5)), rng.standard_normal(5)])
    outputs = np.append(net.output, 0.3)[:, None]
    affine = np.zeros((5, 1)), np.zeros(1)
    search.network = ReluNetwork(rows, np.append(net.bias, 0.1), outputs, *affine)
    assert search.reconsider()
    assert search.network.neurons == 6
    assert len(search.error) == 6
    points = region.points(np.random.default_rng(2), 500)
    assert np.abs(search.network(points)[:, 0] - net(points)).max() < 1e-5
    search.network = keep_neurons(search.network, np.arange(4))  # two are missing: found again
    assert search.reconsider()
    assert search.network.neurons == 6
    assert np.abs(search.network(points)[:, 0] - net(points)).max() < 1e-5


def test_few_digits_excuse_no_other_family():
    deep = two_hidden_layers(0, 5)
    box, region = box_of(lambda x: deep(x).astype(np.float32))
    search = RaySearch.begin(box, region, np.random.default_rng(0))
    assert search.exactness.low
    neurons = search.network.neurons
    assert not search.reconsider()
    assert search.network.neurons == neurons


def test_neurons_that_the_fit_moves_onto_one_hyperplane_are_one():
    """Two that cancel leave, as far as their own errors excuse them; halves of one neuron are it.
    Their errors would excuse those of all others."""
    net = network(0, 5, 6)
    single = net.astype(np.float32)
    box, region = box_of(lambda x: single(x[:, 0].astype(np.float32)))
    search = RaySearch.begin(box, region, np.random.default_rng(0))
    search.ask(region.points(np.random.default_rng(3), 600))
    beside = np.array([0.6, 0.8, 0.0, 0.0, 0.0])
    rows = np.vstack([net.weight, net.weight[:1], beside, beside])
    sizes = np.linalg.norm(rows, axis=1)
    outputs = np.concatenate([net.output, net.output[:1], [0.1, -0.1]]) * sizes
    outputs[0] = outputs[6] = outputs[0] / 2
    bias = np.concatenate([net.bias, net.bias[:1], [0.1, 0.1 + 1e-6]]) / sizes
    affine = np.zeros((5, 1)), np.zeros(1)
    search.network = ReluNetwork(rows / sizes[:, None], bias, outputs[:, None], *affine)
    search.error = np.full(9, 1e-6)
    search.refine()
    assert search.network.neurons == 6
    assert search.misfit() < 1.0
    assert search.network_error() < 1e-4


@pytest.mark.parametrize("domain", [BALL, Domain(low=-1.0, high=1.0)])
def test_all_neurons_that_matter_inside(domain):
    net = network(1, 5, 6)
    box, region = box_of(net, domain=domain)
    found = search_by_rays(box, region, np.random.default_rng(0), 0.01)
    assert isinstance(found, FoundNetwork)
    points = draw_points(region, np.random.default_rng(5), 0.75)
    assert np.abs(found.network(points)[:, 0] - net(points)).max() < 1e-9
    assert "may have been missed" in found.notes[0]


def test_another_family_is_not_found():
    box, region = box_of(two_hidden_layers(), 8)
    found = search_by_rays(box, region, np.random.default_rng(0), 0.01)
    assert not isinstance(found, FoundNetwork | Hypothesis)
    if isinstance(found, Refuted):
        assert found.counterexample is not None


def test_what_may_be_unseen_is_a_share_of_the_edge():
    net = network(3, 5, 4)
    box, region = box_of(lambda x: net(x[:, 0]))
    search = RaySearch.begin(box, region, np.random.default_rng(0))
    assert search.run(0.01)
    norms = np.linalg.norm(search.points, axis=1)
    assert search.at_edge == (norms > 0.97 * 3.0).sum() >= 300
    assert search.unseen == 3.0 / search.at_edge
