"""Kinks are told from curves on short arcs, in answers of any precision."""

import numpy as np
import pytest

from keyhole.learners.block.arcs import bends_smoothly
from keyhole.models.mlp import ACTIVATIONS


def look(activation, error, neurons, seed, small=1.0):
    """Whether a network on the unit sphere of six dimensions looks smooth; answers off by `error`,
    relatively, and neurons of so small outgoing weights beside an affine part."""
    rng = np.random.default_rng(seed)
    rows, bias = rng.standard_normal((neurons, 6)) * 2.0, rng.standard_normal(neurons)
    outer, linear = small * rng.standard_normal((neurons, 6)), rng.standard_normal((6, 6))
    bend = ACTIVATIONS[activation].value

    def ask(points):
        seen = bend(points @ rows.T + bias) @ outer + points @ linear
        return seen * (1.0 + error * rng.standard_normal(seen.shape))

    return bends_smoothly(ask, 6, error, rng)


@pytest.mark.parametrize("error", [1e-15, 1e-10, 6e-8, 1e-6])
@pytest.mark.parametrize(("activation", "smooth"), [("relu", False), ("gelu", True)])
def test_kinks_are_told_from_curves(activation, smooth, error):
    seen = [look(activation, error, neurons, seed) for neurons in (8, 16) for seed in range(5)]
    assert seen == [smooth] * 10


def test_a_bend_below_the_rounding_is_none():
    assert not look("gelu", 1e-6, 4, 0, small=1e-7)
