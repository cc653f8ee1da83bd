import numpy as np
import pytest

from keyhole.learners.mlp.relu.gradients import Frame, choose_anchors, measure_gradients
from keyhole.learners.mlp.relu.line_search import FAR, search_line
from networks import network


@pytest.mark.parametrize("outputs", [None, 8])
def test_normals_across_the_line(outputs):
    net = network(1, 6, 20, outputs)
    rng = np.random.default_rng(0)
    frame = Frame.random(*rng.standard_normal((2, 6)))

    def ask(points):
        return net(points).reshape(len(points), -1)

    line = search_line(lambda t: ask(frame.points(t)), 2.0**-52, 0.0, (-FAR, FAR))
    found = measure_gradients(ask, line, frame, lambda points, length: np.full(len(points), np.inf))
    gain = net.weight @ frame.direction
    order = np.argsort(-(net.weight @ frame.origin + net.bias) / gain)
    truth = (net.weight @ frame.across.T / gain[:, None])[order]
    assert np.abs(found.across - truth).max() / np.abs(truth).max() < 1e-6
    assert len(found.anchors) <= (21 if outputs is None else 6)


def test_frame_is_orthogonal_to_its_line():
    frame = Frame.random(np.zeros(5), np.arange(1.0, 6.0))
    assert np.abs(frame.across @ frame.direction).max() < 1e-12
    assert np.linalg.norm(frame.across, axis=1) == pytest.approx(np.linalg.norm(frame.direction))


def test_anchors_reach_both_ends():
    net = network(2, 6, 20, 8)
    frame = Frame.random(*np.random.default_rng(1).standard_normal((2, 6)))
    line = search_line(lambda t: net(frame.points(t)), 2.0**-52, 0.0, (-FAR, FAR))
    anchors = choose_anchors(line)
    assert anchors[0] == 0
    assert anchors[-1] == 20
    assert np.diff(anchors).max() <= 6
