"""Nodes are named exactly from few moments, with and without a shifted constant."""

import numpy as np
import pytest

from keyhole.linalg.sparse_moments import (
    build_trigonometric_patterns,
    find_support_from_moments,
    find_support_from_vectors,
)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_nodes_from_twice_as_many_moments(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    angles = 2 * np.pi * np.arange(64) / 64
    nodes = np.sort(rng.choice(64, count, replace=False))
    weights = rng.standard_normal(count)
    moments = build_trigonometric_patterns(count, angles)[:, nodes] @ weights
    found = find_support_from_moments(moments, angles, 1e-9)
    np.testing.assert_array_equal(found.nodes, nodes)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-4, atol=1e-8)
    assert found.misfit < 1e-9


def test_an_unknown_constant_is_seen_through() -> None:
    rng = np.random.default_rng(0)
    angles = 2 * np.pi * np.arange(50) / 50
    nodes = np.array([3, 20, 41])
    moments = build_trigonometric_patterns(4, angles)[:, nodes] @ rng.standard_normal(3)
    moments[0] += 5.0
    assert find_support_from_moments(moments, angles, 1e-9).misfit > 1e-3
    found = find_support_from_moments(moments, angles, 1e-9, constant_known=False)
    np.testing.assert_array_equal(found.nodes, nodes)


def test_vectors_need_one_pattern_more_than_nodes() -> None:
    rng = np.random.default_rng(1)
    patterns, nodes = rng.standard_normal((6, 100)), np.array([7, 8, 9, 50, 99])
    answers = patterns[:, nodes] @ rng.standard_normal((5, 12))
    found = find_support_from_vectors(answers, patterns, 1e-9)
    np.testing.assert_array_equal(found.nodes, nodes)
    assert found.misfit < 1e-12
