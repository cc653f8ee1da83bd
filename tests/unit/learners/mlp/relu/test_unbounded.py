import numpy as np
import pytest

from keyhole.learners.base import Refuted
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.gradients import Gradients
from keyhole.learners.mlp.relu.hypothesis import FoundNetwork, NetworkBox
from keyhole.learners.mlp.relu.line_search import LineFit
from keyhole.learners.mlp.relu.unbounded import (
    FewDigits,
    assemble_network,
    learn_from_line,
    predict_errors,
    search_one_line,
)
from keyhole.oracles.base import Domain
from networks import CountingOracle, gelu, hidden, network, two_hidden_layers

FREE = InputRegion.of(Domain(), 6, None)


def search(function, width=6):
    region = InputRegion.of(Domain(), width, None)
    box = NetworkBox.of(CountingOracle(function, width))
    return search_one_line(box, region, np.random.default_rng(0))


def exact_line(net, frame):
    """What a line search and gradients without any error would find."""
    gain = net.weight @ frame.direction
    order = np.argsort(-(net.weight @ frame.origin + net.bias) / gain)
    times = (-(net.weight @ frame.origin + net.bias) / gain)[order]
    middles = np.concatenate([times[:1] - 1, (times[:-1] + times[1:]) / 2, times[-1:] + 1])
    on = frame.points(middles) @ net.weight.T + net.bias > 0
    cells = np.einsum("pm,md,mk->pdk", on, net.weight, net.output_table)
    slopes = np.einsum("pdk,d->pk", cells, frame.direction)
    table = np.einsum("pdk,ed->pek", cells, frame.across)
    values = net(frame.points(middles)).reshape(len(middles), -1)
    width = len(frame.across)
    spans = np.full(len(middles), 0.1)
    line = LineFit(
        times, np.diff(slopes, axis=0), slopes, middles, values, spans, 1e-16, 1.0, (-9, 9), 1
    )
    steps = np.full((len(middles), width), 0.01)
    across = (net.weight @ frame.across.T / gain[:, None])[order]
    bases = np.repeat(middles[:, None], width, axis=1)
    return line, Gradients(np.arange(len(middles)), table, steps, bases, across)


def test_line_and_gradients_assemble_to_the_network():
    net = network(0, 6, 10)
    frame, _ = FREE.line(np.random.default_rng(0))
    line, gradients = exact_line(net, frame)
    found = assemble_network(line, frame, gradients)
    points = np.random.default_rng(1).standard_normal((200, 6))
    assert found(points)[:, 0] == pytest.approx(net(points), abs=1e-11)
    errors = predict_errors(line, gradients)
    assert errors == pytest.approx(1e-16 * (1 + np.abs(line.anchors)) / 0.01)


@pytest.mark.parametrize("outputs", [None, 4])
def test_one_line_sees_all_neurons(outputs):
    net = network(1, 6, 12, outputs)
    rng = np.random.default_rng(0)
    frame, reach = FREE.line(rng)
    box = NetworkBox.of(CountingOracle(net, 6))
    found = learn_from_line(box.ask, frame, reach, FREE.room, box, trusting=True)
    assert found.network.neurons == 12
    points = rng.standard_normal((200, 6))
    expected = net(points).reshape(200, -1)
    assert np.abs(found.network(points) - expected).max() < 1e-7
    assert len(found.error) == 12


def test_a_network_is_found_and_validated():
    found = search(network(2, 6, 9))
    assert isinstance(found, FoundNetwork)
    assert found.network.neurons == 9
    assert found.lines == 1
    assert found.agreement <= found.exactness.allowed


def test_strategies_return_what_they_saw():
    single = network(0, 6, 9).astype(np.float32)
    assert isinstance(search(lambda x: single(x[:, 0].astype(np.float32))), FewDigits)
    smooth = search(hidden(gelu), 8)
    assert isinstance(smooth, Refuted)
    assert smooth.counterexample is not None
    deep = search(two_hidden_layers(), 8)
    assert isinstance(deep, Refuted)
    assert "not one hidden layer" in deep.reason
