import numpy as np
import pytest

from keyhole.learners.mlp.relu.gradients import Frame
from keyhole.learners.mlp.relu.hyperplanes import clearance, measure_hyperplanes, split_rank_one
from keyhole.learners.mlp.relu.line_search import search_line
from networks import network

REACH = (-3.0, 3.0)


def measured(net, seed=0):
    rng = np.random.default_rng(seed)
    frame = Frame.random(*rng.standard_normal((2, net.width)))
    ask = lambda points: net(points).reshape(len(points), -1)  # noqa: E731
    line = search_line(lambda t: ask(frame.points(t)), 2.0**-52, 0.0, REACH)
    room = lambda points, length: np.full(len(points), np.inf)  # noqa: E731
    return line, frame, measure_hyperplanes(ask, line, frame, room, rng, 1e-15, 0.0)


@pytest.mark.parametrize("outputs", [None, 3])
def test_every_breakpoint_gives_a_neuron(outputs):
    net = network(0, 5, 9, outputs)
    line, frame, found = measured(net)
    times = -(net.weight @ frame.origin + net.bias) / (net.weight @ frame.direction)
    met = np.flatnonzero((times > REACH[0]) & (times < REACH[1]))
    assert len(found.bias) == len(line.breakpoints) == len(met)
    rows = np.linalg.norm(net.weight, axis=1)
    truth = np.column_stack([net.weight, net.bias]) / rows[:, None]
    for weight, bias, output in zip(found.weight, found.bias, found.output, strict=True):
        plane = np.append(weight, bias)
        gaps = np.minimum(*(np.linalg.norm(truth - side * plane, axis=1) for side in (1, -1)))
        j = int(np.argmin(gaps))
        assert gaps[j] < 1e-7
        assert output == pytest.approx(net.output_table[j] * rows[j], abs=1e-7)
    assert (found.error < 1e-8).all()


def test_clearance_is_the_distance_to_neighbours_and_ends():
    line, _, _ = measured(network(0, 5, 9))
    edges = [REACH[0], *line.breakpoints, REACH[1]]
    for t, free in zip(line.breakpoints, clearance(line), strict=True):
        assert free == pytest.approx(min(abs(t - e) for e in edges if e != t))


def test_a_change_of_gradient_is_jump_times_normal():
    rng = np.random.default_rng(0)
    jump, normal = rng.standard_normal((4, 3)), rng.standard_normal((4, 6))
    normal[:, 0] = 1.0
    found = split_rank_one(normal[:, :, None] * jump[:, None, :])
    assert found[0] == pytest.approx(jump)
    assert found[1] == pytest.approx(normal)
