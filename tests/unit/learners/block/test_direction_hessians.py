import numpy as np
import pytest

from keyhole.learners.block.direction_fit import Data, Directed, lengths, residual_of, with_one
from keyhole.learners.block.direction_hessians import (
    bent_of,
    find_turns,
    flattest_turns,
    frames_across,
    join_network,
    lower_rank,
    read_directions,
    two_sided,
)
from keyhole.learners.mlp import (
    HessianTable,
    NotEnough,
    likely_activations,
    spread_places,
    weights_of,
)


def secret(width, neurons, activation="gelu", radius=1.0):
    rng = np.random.default_rng(5)
    rows = rng.uniform(-2.0, 2.0, (neurons, width + 1))
    rows[:, -1] *= 0.3
    rows[:, :-1] /= radius
    affine = np.column_stack([3.0 * np.eye(width) / radius, 0.4 * rng.standard_normal(width)])
    outer = rng.uniform(-1.0, 1.0, (width, neurons)) / np.sqrt(neurons)
    return Directed(affine, outer, rows, activation)


def asking(net, log=None):
    def ask(points, purpose):
        if log is not None:
            log.append(len(points))
        z = net(points)
        return z / lengths(z)

    return ask


def stencils(net, size=8, count=3):
    """The directions around places, and the true gradients of the logarithms of the lengths."""
    width, rng = len(net.affine), np.random.default_rng(0)
    frame = np.linalg.qr(rng.standard_normal((width, width)))[0].T
    table = HessianTable(asking(net), frame, width - size, two_sided(2.0**-53))
    table.grow(size, spread_places(width - size, count, rng))
    axes, step = table.u_axes[:size], 1e-5
    turns = [
        [
            np.log(lengths(net((place + step * axis)[None])) / lengths(net((place - step * axis)[None])))
            [0, 0] / (2 * step)
            for axis in axes
        ]
        for place in table.places
    ]  # fmt: skip
    bent = bent_of(np.array(table.centre), table.gradients(size), table.hessians(size))
    return bent, np.array(turns)


def test_frames_are_orthonormal_and_across():
    n = np.random.default_rng(0).standard_normal((3, 5))
    frames = frames_across(n)
    assert frames.shape == (3, 4, 5)
    assert np.allclose(np.einsum("kqp,kp->kq", frames, n), 0.0)
    assert np.allclose(np.einsum("kqp,krp->kqr", frames, frames), np.eye(4))


@pytest.mark.parametrize("expected", [10, 100])  # a guess beside it, and one that has no room
def test_the_rank_tells_how_lengths_change(expected):
    bent, truth = stencils(secret(11, 12))
    rough = np.linalg.norm(flattest_turns(bent) - truth) / np.linalg.norm(truth)
    found = find_turns(bent, 20, 30.0, expected)
    assert found is not None
    turns, rank = found
    assert rank == 12
    assert np.linalg.norm(turns - truth) < 1e-4 * np.linalg.norm(truth)
    assert rough > 1e-3


def test_a_rank_too_high_tells_them_too():
    bent, truth = stencils(secret(11, 12))
    turns, sizes = lower_rank(bent, flattest_turns(bent), 15)
    assert np.linalg.norm(turns - truth) < 1e-4 * np.linalg.norm(truth)
    assert sizes[11] > 1e3 * sizes[12]


@pytest.mark.parametrize("activation", ["gelu", "silu"])
def test_a_network_is_found_from_directions(activation):
    radius = 2.0
    net = secret(12, 24, activation, radius)
    asked = []
    inside = Directed(net.affine * np.append(np.full(12, radius), 1.0), net.outer,
                      net.rows * np.append(np.full(12, radius), 1.0), activation)  # fmt: skip
    sketch = read_directions(asking(inside, asked), 12, 2.0**-53, np.random.default_rng(1))
    assert sketch.rows.shape == (1, 24, 12)
    assert sum(asked) < 700
    assert likely_activations(sketch, ("tanh", "silu", "gelu"))[0] == activation
    rows = weights_of(sketch, activation)[0].inner
    gaps = [np.abs(np.concatenate([rows - one, rows + one])).max(axis=1).min()
            for one in inside.rows]  # fmt: skip
    assert max(gaps) < 1e-2
    points = np.random.default_rng(2).standard_normal((60, 12))
    points *= radius / lengths(points)
    z = net(points)
    joined = join_network(sketch, activation, radius, points, z / lengths(z))
    assert joined.neurons == 24
    assert residual_of(joined, Data(with_one(points), z / lengths(z)))[0] < 1e-5


def test_too_many_neurons_are_said_to_be_too_many():
    with pytest.raises(NotEnough, match="too many neurons"):
        read_directions(asking(secret(7, 20)), 7, 2.0**-53, np.random.default_rng(1))
