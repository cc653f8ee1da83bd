import numpy as np
import pytest

from keyhole.errors import NotIdentifiable
from keyhole.learners.mlp import InputRegion
from keyhole.learners.transformer.residual import ResidualProbe
from keyhole.measurement.asker import Asker
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from keyhole.oracles.base import Domain
from networks import CountingOracle, residual_layer


def probe_of(secret):
    box = CountingOracle(secret, secret.width)
    region = InputRegion.of(Domain(), secret.width, None)
    return ResidualProbe(Asker(box), secret.network, region, np.random.default_rng(0)), box


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("seed", [0, 1])
def test_pairs_tell_score_and_mixed_parts(where, seed):
    secret = residual_layer(seed, 5, 8, where)
    probe, box = probe_of(secret)
    score, key_bias = probe.measure_score()
    assert score == pytest.approx(secret.score, abs=1e-7)
    assert key_bias == pytest.approx(secret.key_bias, abs=1e-7)
    assert box.queries == 3 * 5 * 6
    mixed, skip = probe.measure_mixed(secret.score, secret.key_bias)
    assert mixed == pytest.approx(secret.mixed_weight, abs=1e-7)
    assert skip == pytest.approx(secret.mixed_skip, abs=1e-7)
    assert box.queries == 3 * 5 * 6 + 2 * 8 * 5


def test_the_gradient_behind_the_attention_needs_no_score():
    secret = residual_layer(0, 5, 8, "before")
    probe, _ = probe_of(secret)
    points, rooms = probe.choose_points(3)
    for point, room in zip(points, rooms, strict=True):
        on = secret.network.weight @ point + secret.network.bias > 0
        expected = secret.mixed_weight[on].T @ secret.network.output[on] + secret.mixed_skip
        found = probe.measure_gradient(point, 0.1 * room)[:, 0]
        assert found == pytest.approx(expected, abs=1e-9)


def test_points_on_a_hyperplane_have_room():
    secret = residual_layer(0, 5, 8, "before")
    probe, _ = probe_of(secret)
    point, room = probe.choose_point_on_plane(2)
    heights = secret.network.weight @ point + secret.network.bias
    assert abs(heights[2]) < 1e-12
    rows = np.linalg.norm(secret.network.weight, axis=1)
    assert (np.abs(heights) / rows)[np.arange(8) != 2].min() >= room > 0


def test_a_mixed_part_that_does_not_change_hides_the_attention():
    net = ReluNetwork(np.zeros((0, 4)), [], [], np.ones(4), 1.0)
    secret = TransformerModel(np.eye(4), None, net, np.zeros((0, 4)), np.zeros(4))
    with pytest.raises(NotIdentifiable, match="does not change"):
        probe_of(secret)[0].measure_score()
