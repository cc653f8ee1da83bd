import numpy as np
import pytest

from keyhole.models.mlp import Mlp
from keyhole.models.relu_network import ReluNetwork
from keyhole.report.rows import neuron_rows, sequence_size


def test_neurons_that_act_most_come_first():
    network = Mlp([[3.0, 4.0], [0.0, 1.0], [0.0, 2.0]], [10.0, 0.5, 0.0], [[1.0, 1.0, 4.0]])
    rows = neuron_rows(network)
    assert [row.neuron for row in rows] == [2, 0, 1]
    assert rows[1].norm == "5"
    assert rows[1].distance == "2"
    assert float(rows[1].aligned) == pytest.approx(0.8)
    assert float(rows[0].aligned) == pytest.approx(1.0)
    assert len(neuron_rows(network, most=1)) == 1


def test_a_gate_is_what_bends():
    network = Mlp(np.eye(2), None, np.eye(2), gate=2 * np.eye(2), gate_bias=[1.0, -1.0])
    assert {row.bias for row in neuron_rows(network)} == {"1", "-1"}


def test_other_models_have_no_such_table():
    assert neuron_rows(ReluNetwork([[1.0]], [0.0], [1.0])) == []
    assert neuron_rows(None) == []


def test_the_size_of_a_query_in_words():
    assert sequence_size(np.zeros((1, 4))) == "1 token of width 4"
    assert sequence_size(np.zeros((64, 1))) == "64 tokens"
