"""Heads as eigenvalues of the Jacobian: clusters, ranges, and the correction of differences."""

import numpy as np
import pytest

from keyhole.errors import IllConditioned
from keyhole.learners.base import Hypothesis, Inconclusive
from keyhole.learners.multi_head.bounded_tokens import (
    BoundedProblem,
    Point,
    cluster_eigenvectors,
    correct_slopes,
    find_disjoint_windows,
    find_ranges,
    join_spaces,
    learn_bounded,
    measure_slopes,
    orthonormalise,
    update_ranges,
)
from keyhole.learners.multi_head.joint_heads import ValueMaps
from keyhole.models.random import attention
from keyhole.oracles.base import Domain
from multi_head_boxes import asker, layer_box, random_layer

WIDTH = 8


class Prior:
    heads, rank, bias, attempts = None, None, None, 3


def heads_in_turn(seed: int) -> tuple[list[np.ndarray], ValueMaps, np.ndarray, np.ndarray]:
    """Two heads of width four: ranges, value maps, scores and key biases."""
    rng = np.random.default_rng(seed)
    ranges = [np.linalg.qr(rng.standard_normal((WIDTH, 4)))[0] for _ in range(2)]
    maps = ValueMaps.of_ranges(ranges, rng.standard_normal((WIDTH, WIDTH)))
    return (
        ranges,
        maps,
        rng.standard_normal((2, WIDTH, WIDTH)) / 4,
        rng.standard_normal((2, WIDTH)) / 4,
    )


def jacobian(maps: ValueMaps, keys: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Of u -> sum_h sigma(u . k_h) u M_h."""
    share = 1 / (1 + np.exp(-keys @ at))
    parts = zip(share, keys, maps.products, strict=True)
    return sum(s * m + s * (1 - s) * np.outer(k, at @ m) for s, k, m in parts)  # type: ignore[return-value]


def contains(space: np.ndarray, inside: np.ndarray) -> bool:
    return bool(np.linalg.norm(inside - space @ (space.T @ inside)) < 1e-6)


def test_exact_jacobians_give_the_ranges_of_the_values() -> None:
    ranges, maps, scores, biases = heads_in_turn(0)
    rng = np.random.default_rng(1)
    keys, inverse = scores @ rng.standard_normal(WIDTH) + biases, np.linalg.inv(maps.total)
    matrices = [jacobian(maps, keys, at) @ inverse for at in rng.standard_normal((2, WIDTH))]
    found = find_ranges(matrices, 2)
    for truth in ranges:
        assert any(contains(space, truth) for space in found)
    again = update_ranges(matrices, ranges)
    for space, truth in zip(again, ranges, strict=True):
        assert contains(space, truth)
    assert len(cluster_eigenvectors(matrices[0], 2)) == 2
    with pytest.raises(IllConditioned, match="no clusters"):
        cluster_eigenvectors(np.diag(np.arange(8.0) ** 2), 2)


def test_the_model_predicts_the_error_of_its_differences() -> None:
    """One-sided differences of the forward model, corrected, are its exact Jacobian."""
    _, maps, scores, biases = heads_in_turn(2)
    rng = np.random.default_rng(3)
    anchor, at = rng.standard_normal((2, WIDTH))
    keys, step, frame = scores @ anchor + biases, 1e-2, np.eye(WIDTH)

    def forward(u: np.ndarray) -> np.ndarray:
        share = 1 / (1 + np.exp(-keys @ u))
        return np.einsum("h,d,hdo->o", share, u, maps.products)

    slopes = np.stack([(forward(at + step * row) - forward(at)) / step for row in frame])
    exact = jacobian(maps, keys, at)
    problem = BoundedProblem(asker(lambda x: x[:, 0], WIDTH), frame, maps.total, 3.0, anchor, step)
    corrected = correct_slopes(problem, Point(at, slopes), scores, biases, maps)
    assert np.abs(slopes - exact).max() > 1e-4
    np.testing.assert_allclose(corrected, exact, atol=1e-11)


def test_differences_are_asked_inside_the_radius() -> None:
    model = attention(np.random.default_rng(4), WIDTH, heads=2, outputs=WIDTH)
    seen: list[np.ndarray] = []

    def box(tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens)
        return model(tokens)

    anchor = np.full(WIDTH, 1 / np.sqrt(WIDTH))
    problem = BoundedProblem(asker(box, WIDTH), np.eye(WIDTH), np.eye(WIDTH), 3.0, anchor, 1e-4)
    point = measure_slopes(problem, np.random.default_rng(5))
    assert point.slopes.shape == (WIDTH, WIDTH)
    assert len(seen[0]) == WIDTH + 1
    assert np.linalg.norm(seen[0], axis=2).max() <= 3.0


def test_windows_are_tight_and_apart() -> None:
    values = np.array([0.0, 0.01, 0.02, 0.5, 0.9, 0.91, 0.92, 1.0])
    assert find_disjoint_windows(values, 3, 2) == [0, 4]
    assert find_disjoint_windows(values, 3, 3) is None


def test_spaces() -> None:
    frame = np.linalg.qr(np.random.default_rng(6).standard_normal((6, 6)))[0]
    joined = join_spaces(frame[:, :2], frame[:, 1:3])
    assert contains(joined, frame[:, :3])
    turned = orthonormalise((frame[:, :2] @ np.array([[1, 1j], [1j, 1]])).astype(complex), 2)
    assert contains(turned, frame[:, :2])


def test_the_strategy_returns_and_does_not_throw() -> None:
    rng = np.random.default_rng(7)
    scalar = asker(attention(rng, 6, heads=2), 6, domain=Domain(max_norm=2.0))
    assert isinstance(learn_bounded(scalar, rng, Prior()), Inconclusive)
    away = asker(attention(rng, 6, heads=2), 6, domain=Domain(low=0.5, high=1.0))
    assert isinstance(learn_bounded(away, rng, Prior()), Inconclusive)
    narrow = asker(attention(rng, 6, heads=3, outputs=6), 6, domain=Domain(max_norm=2.0))
    assert isinstance(learn_bounded(narrow, rng, Prior()), Inconclusive)
    layer = asker(layer_box(random_layer(WIDTH, 2, 0)), WIDTH, domain=Domain(max_norm=3.0))
    found = learn_bounded(layer, np.random.default_rng(8), Prior())
    assert isinstance(found, Hypothesis)
    assert len(found.model.heads) == 2
