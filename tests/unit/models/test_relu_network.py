import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.relu_network import ReluNetwork
from networks import network


def test_answers_by_its_definition():
    net = ReluNetwork([[1.0, 2.0]], [-1.0], [3.0], [0.5, 0.0], 4.0)
    points = np.array([[1.0, 1.0], [0.0, 0.0]])
    assert net(points) == pytest.approx([4 + 0.5 + 3 * 2, 4.0])


def test_reads_the_last_position_of_a_sequence():
    net = network(0, 3, 5)
    tokens = np.random.default_rng(0).standard_normal((4, 6, 3))
    assert np.array_equal(net(tokens), net(tokens[:, -1]))


@pytest.mark.parametrize("outputs", [None, 3])
def test_arrays_round_trip(outputs):
    net = network(0, 3, 5, outputs)
    again = ReluNetwork.from_arrays(net.to_arrays())
    points = np.random.default_rng(0).standard_normal((7, 3))
    assert np.array_equal(net(points), again(points))
    assert net.outputs == outputs


def test_no_neurons_is_an_affine_function():
    net = ReluNetwork(np.zeros((0, 2)), [], [], [1.0, 2.0], 3.0)
    assert net(np.ones((1, 2))) == pytest.approx([6.0])


def test_many_points_are_answered_in_chunks(monkeypatch):
    net = network(0, 3, 5)
    points = np.random.default_rng(0).standard_normal((50, 3))
    whole = net(points)
    monkeypatch.setattr("keyhole.models.base.HIDDEN_VALUES", 20)
    assert net(points) == pytest.approx(whole, abs=1e-14)


@pytest.mark.parametrize(
    ("change", "word"),
    [({"bias": [0.0]}, "bias"), ({"output": [1.0]}, "output"), ({"skip": [1.0]}, "skip")],
)
def test_shapes_that_disagree_are_refused(change, word):
    parts = {"weight": np.eye(2), "bias": [0.0, 0.0], "output": [1.0, 1.0], "skip": [0.0, 0.0]}
    with pytest.raises(InvalidArgument, match=word):
        ReluNetwork(**(parts | change))


def test_missing_parameter_is_named():
    with pytest.raises(InvalidArgument, match="bias"):
        ReluNetwork.from_arrays({"weight": np.eye(2)})


def test_points_of_another_width_are_refused():
    with pytest.raises(InvalidArgument, match="shape"):
        network(0, 3, 5)(np.zeros((4, 2)))


def test_single_precision_stays_single():
    net = network(0, 3, 5).astype(np.float32)
    assert net(np.zeros((1, 3))).dtype == np.float32
