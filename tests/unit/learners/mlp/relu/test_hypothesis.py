import numpy as np
import pytest

from keyhole.learners.base import Inconclusive, Refuted
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.hypothesis import (
    Exactness,
    FoundNetwork,
    NetworkBox,
    build_hypothesis,
    derive_standard_errors,
    drop_rounding,
    refuse,
    validate_network,
)
from keyhole.learners.mlp.relu.least_squares import unflatten_output
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Domain
from keyhole.oracles.noise import NoiseModel
from networks import CountingOracle, network

FREE = InputRegion.of(Domain(), 5, None)
EXACT = Exactness(1e-16, 1.0)


def test_single_precision_is_recognised_by_its_answers():
    exact = network(0, 5, 6).astype(np.float32)
    box = NetworkBox.of(CountingOracle(lambda x: exact(x[:, 0].astype(np.float32)), 5))
    points = np.random.default_rng(0).standard_normal((4, 5))
    assert box.clean
    box.ask(points)
    box.ask(points + 1)
    assert not box.clean
    assert box.relative == 2.0**-24
    assert (box.round_points(points) == points.astype(np.float32)).all()
    assert box.spent == 8


def test_stated_noise_is_taken():
    stated = NoiseModel(1e-9, additive=1e-6, step=2e-6)
    box = NetworkBox.of(CountingOracle(network(0, 5, 6), 5, precision=stated))
    assert box.relative == 1e-9
    assert box.noise == pytest.approx(2e-6)


def test_validation_finds_a_difference():
    net = network(0, 5, 6)
    box = NetworkBox.of(CountingOracle(net, 5))
    right, wrong = unflatten_output(net), unflatten_output(network(1, 5, 6))
    assert validate_network(box, FREE, right, np.random.default_rng(0))[0] < 1e-14
    gap, worst = validate_network(box, FREE, wrong, np.random.default_rng(0))
    assert gap > 1e-3
    assert worst.box_answer == pytest.approx(net(worst.input)[0])


def test_a_failure_is_blamed_on_digits_domain_or_family():
    assert isinstance(refuse("x", Exactness(1e-7, 1.0), None), Inconclusive)
    assert isinstance(refuse("x", EXACT, None, rays=4), Inconclusive)
    assert isinstance(refuse("x", EXACT, None), Refuted)


def test_what_is_within_its_errors_is_zero():
    net = network(0, 5, 6)
    model = ReluNetwork(net.weight, net.bias, net.output, np.full(5, 1e-15), 1e-15)
    errors = derive_standard_errors(model, np.full(6, 1e-14), 1e-14, 1.0)
    found = drop_rounding(model, errors, EXACT, 1.0)
    assert not found.skip.any()
    assert found.offset == 0
    assert (found.bias == net.bias).all()
    assert (errors.weight > 0).all()


def test_a_hypothesis_has_oriented_neurons_errors_and_diagnostics():
    net = network(0, 5, 4)
    box = NetworkBox.of(CountingOracle(net, 5))
    box.ask(np.zeros((1, 5)))  # shows that answers are numbers
    turned = ReluNetwork(
        -net.weight,
        -net.bias,
        net.output,
        net.weight.T @ net.output,
        net.bias @ net.output,
    )
    found = FoundNetwork(
        unflatten_output(turned), np.full(4, 1e-14), 1e-14, 1e-15, EXACT, 1, ("A note.",)
    )
    learned = build_hypothesis(found, box, FREE, orient=True)
    assert learned.model.outputs is None
    assert learned.model.weight == pytest.approx(net.weight)
    assert learned.diagnostics.orientation_certified
    assert learned.diagnostics.function_error == pytest.approx(2e-14)
    assert learned.floor == 4 * 6 + 1
    assert learned.notes == ("A note.",)
    open_sides = build_hypothesis(found, box, FREE, orient=False)
    assert not open_sides.diagnostics.orientation_certified
    assert "not decided" in open_sides.notes[0]


def test_sides_that_only_large_errors_excuse_are_not_taken():
    net = network(1, 5, 4)
    skip = np.full(5, 1e-3)  # small beside the errors below, not beside the answers' rounding
    box = NetworkBox.of(CountingOracle(net, 5))
    box.ask(np.zeros((1, 5)))  # shows that answers are numbers
    beside = ReluNetwork(net.weight, net.bias, net.output, skip, 0.0)
    found = FoundNetwork(unflatten_output(beside), np.full(4, 1e-1), 1e-1, 1e-15, EXACT, 1)
    learned = build_hypothesis(found, box, FREE, orient=True)
    assert not learned.diagnostics.orientation_certified
    points = np.random.default_rng(0).standard_normal((50, 5))
    assert learned.model(points) == pytest.approx(beside(points), abs=1e-9)
