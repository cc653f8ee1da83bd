"""Epsilon is found over decades, where it shows, and nowhere else."""

import numpy as np
import pytest

from keyhole.models.norm import Norm
from keyhole.stages.epsilon import epsilon_of_share, epsilons_behind, find_epsilon


@pytest.mark.parametrize("epsilon", [1e-12, 1e-8, 1e-5, 1e-2, 30.0])
def test_epsilon_over_decades(epsilon):
    sizes = []

    def look(size):
        sizes.append(size)
        share = np.sqrt(size**2 / (size**2 + epsilon))
        return epsilon_of_share(round(share, 4), size)  # as few digits show it

    assert find_epsilon(look) == pytest.approx(epsilon, rel=0.01)
    assert len(sizes) <= 6


@pytest.mark.parametrize("shown", [0.0, np.inf, np.nan])
def test_what_never_shows_is_not_found(shown):
    assert find_epsilon(lambda size: shown) is None


def test_no_share_is_no_epsilon():
    assert epsilon_of_share(-0.1, 1.0) == np.inf


def test_answers_of_a_norm_show_its_epsilon():
    rng = np.random.default_rng(0)
    norm = Norm(rng.uniform(0.5, 2.0, 8), rng.standard_normal(8), 3e-4)
    tokens = np.array([1e-3, 2e-2, 1.0])[:, None] * rng.standard_normal((3, 8))
    found, clear = epsilons_behind(norm, tokens @ norm.plane, norm(tokens))
    assert found == pytest.approx(np.full(3, 3e-4), rel=1e-6)
    assert np.argmax(clear) == 1
