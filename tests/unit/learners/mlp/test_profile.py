"""One neuron looked at by itself: which activation bends so?"""

import numpy as np
import pytest

from keyhole.learners.mlp.far_field import FarField
from keyhole.learners.mlp.profile import (
    find_strange_profile,
    project_out,
    read_profile,
    read_resolved_profile,
)
from keyhole.models.mlp import ACTIVATIONS

NAMES = ["gelu", "silu", "gelu_tanh"]
RADIUS = 1e5


def softplus(a: np.ndarray) -> np.ndarray:
    return np.logaddexp(0.0, a)


PHI = {
    "gelu": ACTIVATIONS["gelu"].value,
    "silu": ACTIVATIONS["silu"].value,
    "mish": lambda a: a * np.tanh(softplus(a)),
}


def network(seed: int, phi: str, neurons: int = 4):
    """A box of one hidden layer and what it is at infinity."""
    rng = np.random.default_rng(seed)
    inner, bias = rng.standard_normal((neurons, 3)), rng.standard_normal(neurons)
    outer = rng.standard_normal((2, neurons))
    far = FarField(inner, bias, outer.T, np.zeros((2, 3)), np.zeros(2))
    return far, lambda points, why: PHI[phi](points @ inner.T + bias) @ outer.T


@pytest.mark.parametrize("phi", ["gelu", "silu"])
def test_a_known_activation_fits_the_profile_of_its_neuron(phi: str) -> None:
    far, ask = network(0, phi)
    profile = read_profile(ask, far, 0, 1.0, RADIUS, np.random.default_rng(1))
    assert profile is not None
    left = {name: profile.fit(name).left for name in NAMES}
    assert min(left, key=left.get) == phi
    assert left[phi] < 1e-6
    assert find_strange_profile(ask, far, NAMES, 1.0, RADIUS, np.random.default_rng(2)) is None


@pytest.mark.parametrize("size", [1e-2, 1.0, 20.0, 200.0])
def test_bends_of_any_width_beside_the_points_that_are_asked_first(size: float) -> None:
    far, ask = network(0, "gelu")
    assert find_strange_profile(ask, far, NAMES, size, 1e6, np.random.default_rng(2)) is None
    found = read_resolved_profile(ask, far, 0, NAMES, size, 1e6, np.random.default_rng(2))
    assert found is not None
    assert found[1].left < 1e-4


def test_another_activation_is_shown_by_a_point() -> None:
    far, ask = network(0, "mish")
    shown = find_strange_profile(ask, far, NAMES, 1.0, RADIUS, np.random.default_rng(2))
    assert shown is not None
    point, answer, guess = shown
    np.testing.assert_allclose(answer, ask(point[None], "")[0], rtol=1e-12)
    assert np.abs(answer - guess).max() > 1e-4


def test_nothing_is_said_where_planes_are_close() -> None:
    far, ask = network(0, "mish")
    assert read_profile(ask, far, 0, 1.0, 1.0, np.random.default_rng(1)) is None
    assert find_strange_profile(ask, far, NAMES, 1.0, 1.0, np.random.default_rng(2)) is None


def test_lines_are_projected_out() -> None:
    columns = np.column_stack([np.ones(5), np.arange(5.0)])
    np.testing.assert_allclose(project_out(columns, 3.0 + 2.0 * np.arange(5.0)), 0, atol=1e-12)
