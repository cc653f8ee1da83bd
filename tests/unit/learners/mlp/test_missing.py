import numpy as np
import pytest

from keyhole.learners.mlp.missing import add_missing, awakened, turned_towards
from keyhole.learners.mlp.refinement import Weights, refine

WIDTH, NEURONS, OUTPUTS = 6, 12, 5


def network(rng, gated=False):
    return Weights(
        rng.standard_normal((NEURONS, WIDTH + 1)),
        rng.standard_normal((OUTPUTS, NEURONS)),
        rng.standard_normal((OUTPUTS, WIDTH + 1)),
        "gelu",
        rng.standard_normal((NEURONS, WIDTH + 1)) if gated else None,
    )


def without(weights, rows):
    """The network without some neurons, the others a little off."""
    kept = np.setdiff1d(np.arange(weights.neurons), rows)
    rng = np.random.default_rng(9)
    inner = weights.inner[kept]
    inner = inner + 1e-5 * rng.standard_normal(inner.shape)
    return Weights(inner, weights.outer[:, kept], weights.affine, weights.activation)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_missing_neuron_is_found(seed):
    rng = np.random.default_rng(seed)
    truth = network(rng)
    truth.inner[3, -1] = -4.0  # it hardly ever fires
    points = rng.standard_normal((400, WIDTH))
    answers = truth(points)
    found = add_missing(without(truth, [3]), points, answers, truth, rng)
    assert found.weights.neurons == NEURONS
    assert len(found.points) == 400 + int(1.3 * 8) + 1
    refined = refine(found.weights, found.points, found.answers, 2.0**-53, errors=False)
    assert refined.residual < 1e-12
    row = refined.weights.inner[-1]
    gaps = [np.linalg.norm(row - side * truth.inner[3]) for side in (1, -1)]
    assert min(gaps) < 1e-9


def test_nothing_joins_a_network_that_is_whole():
    rng = np.random.default_rng(1)
    truth = network(rng)
    points = rng.standard_normal((300, WIDTH))
    start = without(truth, [])
    found = add_missing(start, points, truth(points), truth, rng)
    assert found.weights is start
    assert len(found.points) == 300
    found = add_missing(start, points[:15], truth(points[:15]), truth, rng)  # too few to tell
    assert found.weights is start


def test_gated_networks_stay_as_they_are():
    rng = np.random.default_rng(2)
    truth = network(rng, gated=True)
    points = rng.standard_normal((50, WIDTH))
    assert add_missing(truth, points, truth(points), truth, rng).weights is truth


def test_points_lie_on_both_sides_of_the_bend():
    rng = np.random.default_rng(3)
    points = rng.standard_normal((200, WIDTH))
    row = np.append(np.eye(WIDTH)[0], -1.0)
    turned = turned_towards(points, row, rng)
    assert np.allclose(np.linalg.norm(turned, axis=1), np.linalg.norm(points, axis=1))
    alive = turned[:, 0] > 1.0
    assert 0.3 < alive.mean() < 0.9
    assert (turned[:, 0] >= 0).all()


def test_points_are_turned_to_where_neurons_bend():
    rng = np.random.default_rng(0)
    rows = np.column_stack([rng.standard_normal((40, 30)), rng.standard_normal(40) / 2])
    rows[:6, -1] = [-14.0, -9.0, -11.0, 12.0, 10.0, -12.0]  # their arguments vary by one
    points = rng.standard_normal((400, 30))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    rows[:, :-1] *= 30.0**0.5 / np.linalg.norm(rows[:, :-1], axis=1, keepdims=True)
    rows[:6, -1] /= 5.0

    def either(points):
        arguments = points @ rows[:, :-1].T + rows[:, -1]
        return np.minimum((arguments > -0.5).mean(axis=0), (arguments < 0.5).mean(axis=0))

    turned = awakened(points, rows, rng)
    assert np.linalg.norm(turned, axis=1) == pytest.approx(np.ones(400))
    assert either(points).min() < 0.03
    assert either(turned).min() > 0.1
    assert (awakened(points, rows[6:], rng, share=0.0) == points).all()
