import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.canonical import canonical_network, distance
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from networks import layer, network, residual_layer


def shuffled(net: ReluNetwork, seed: int = 0) -> ReluNetwork:
    """The same function: neurons permuted, scaled, some turned around."""
    rng = np.random.default_rng(seed)
    order, scale = rng.permutation(net.neurons), rng.uniform(0.1, 9.0, net.neurons)
    flip = rng.random(net.neurons) < 0.5
    sign = np.where(flip, -1.0, 1.0)
    skip = net.skip + net.weight[flip].T @ net.output[flip]
    offset = net.offset + net.bias[flip] @ net.output[flip]
    weight = (net.weight * (scale * sign)[:, None])[order]
    return ReluNetwork(
        weight, (net.bias * scale * sign)[order], (net.output / scale)[order], skip, offset
    )


def test_symmetries_leave_no_distance():
    net = network(0, 5, 9)
    assert distance(shuffled(net), net) < 1e-14


def test_canonical_form_is_the_same_function():
    net = shuffled(network(1, 5, 9))
    points = np.random.default_rng(0).standard_normal((50, 5))
    assert canonical_network(net)(points) == pytest.approx(net(points), abs=1e-12)


def test_neurons_on_one_plane_act_as_one():
    net = network(0, 3, 2)
    doubled = ReluNetwork(
        np.vstack([net.weight, 3 * net.weight[:1]]),
        np.append(net.bias, 3 * net.bias[0]),
        np.append(net.output, 0.0),
    )
    doubled = ReluNetwork(
        doubled.weight,
        doubled.bias,
        [net.output[0] / 2, net.output[1], net.output[0] / 6],
    )
    assert distance(doubled, net) < 1e-14


def test_a_changed_weight_is_seen():
    net = network(0, 5, 9)
    other = ReluNetwork(net.weight * 1.01, net.bias, net.output)
    assert 1e-3 < distance(other, net) < 1e-1


def test_another_number_of_neurons_is_infinitely_far():
    assert distance(network(0, 5, 9), network(0, 5, 8)) == np.inf


def test_vector_answers():
    net = network(0, 5, 9, 3)
    assert distance(ReluNetwork(2 * net.weight, 2 * net.bias, net.output / 2), net) < 1e-14


def test_layers_compare_score_and_network():
    model = layer(0, 4, 6)
    same = TransformerModel(model.score, None, shuffled(model.network))
    other = TransformerModel(1.1 * model.score, None, model.network)
    assert distance(same, model) < 1e-13
    assert distance(other, model) == pytest.approx(0.1)


@pytest.mark.parametrize("where", ["before", "after"])
def test_residual_layers_compare_up_to_order_scale_and_side(where):
    secret = residual_layer(0, 4, 6, where)
    net, mixed = secret.network, secret.mixed_weight
    order = np.random.default_rng(0).permutation(6)
    turned = decided_side(secret, 2)
    shuffled_net = ReluNetwork(3 * net.weight[order], 3 * net.bias[order], net.output[order] / 3)
    shuffled_net = ReluNetwork(
        shuffled_net.weight, shuffled_net.bias, shuffled_net.output, net.skip, net.offset
    )
    same = TransformerModel(
        secret.score, secret.key_bias, shuffled_net, 3 * mixed[order], secret.mixed_skip
    )
    assert distance(same, secret) < 1e-13
    assert distance(turned, secret) < 1e-13
    other = TransformerModel(secret.score, secret.key_bias, net, 1.1 * mixed, secret.mixed_skip)
    assert distance(other, secret) > 0.01


def decided_side(model, j):
    """The same layer with neuron j turned around."""
    net = model.network
    sign = np.where(np.arange(net.neurons) == j, -1.0, 1.0)
    inner = ReluNetwork(
        sign[:, None] * net.weight,
        sign * net.bias,
        net.output,
        net.skip + net.output[j] * net.weight[j],
        net.offset + net.output[j] * net.bias[j],
    )
    skip = model.mixed_skip + net.output[j] * model.mixed_weight[j]
    return TransformerModel(
        model.score, model.key_bias, inner, sign[:, None] * model.mixed_weight, skip
    )


def test_networks_and_layers_do_not_compare():
    with pytest.raises(InvalidArgument):
        distance(network(0, 4, 6), layer(0, 4, 6))
