import numpy as np
import pytest

from keyhole.learners.token_attention.algebra import Maps
from keyhole.learners.token_attention.contexts import Contexts
from keyhole.learners.token_attention.refinement import (
    AnsweredPrompts,
    AttentionModel,
    LowRankMap,
    changes_of,
    choose_rank,
    refine,
)


def problem(seed: int = 0) -> tuple[Maps, AnsweredPrompts, tuple[LowRankMap, ...]]:
    rng = np.random.default_rng(seed)
    left, right = rng.standard_normal((2, 4, 6, 2))
    values, scores = np.split(0.5 * left @ right.transpose(0, 2, 1), 2)
    tokens = rng.standard_normal((20, 6))
    rows = [[(int(t), int(rng.integers(1, 4))) for t in rng.choice(20, 4, replace=False)]
            for _ in range(40)]  # fmt: skip
    point = tuple(LowRankMap.of(m, 2) for both in zip(values, scores, strict=True) for m in both)
    empty = AnsweredPrompts(Contexts.of(rows), np.zeros((40, 6)), tokens, 1e-9, np.full(20, 1e-9))
    answers = AttentionModel(empty).predict(point)
    data = AnsweredPrompts(empty.contexts, answers, tokens, 1e-9, empty.token_errors)
    return Maps(values, scores), data, point


def test_the_jacobian_is_the_derivative():
    _, data, point = problem()
    model = AttentionModel(data)
    jacobian = model.jacobian(point)
    step = 1e-6 * np.random.default_rng(1).standard_normal(jacobian.shape[1])
    change = model.residual(model.retract(point, step)) - model.residual(point)
    assert np.linalg.norm(change - jacobian @ step) < 1e-4 * np.linalg.norm(change)


def test_steps_leave_the_rank_and_count_the_unknowns():
    _, _, point = problem()
    assert all(part.unknowns == 2 * 2 * 6 - 4 for part in point)
    changes = changes_of(point, np.ones(sum(part.unknowns for part in point)))
    assert [change.shape for change in changes] == [(6, 6)] * 4
    assert choose_rank(point[0].matrix, precise=True) == 2
    assert choose_rank(np.eye(5), precise=False) == 5


def test_from_a_start_near_by_the_maps_are_exact():
    maps, data, _ = problem(3)
    rng = np.random.default_rng(4)
    off = Maps(
        *(part + 1e-3 * rng.standard_normal(part.shape) for part in (maps.values, maps.scores))
    )
    found = refine(off, [(2, 2), (2, 2)], data, rng, steps=30)
    assert found.level < 2.0
    for part, truth in zip(found.point[::2], maps.values, strict=True):
        assert part.matrix == pytest.approx(truth, abs=1e-10)


def test_steps_are_as_large_as_the_errors():
    maps, data, _ = problem(5)
    rng = np.random.default_rng(6)
    found = refine(maps, [(2, 2), (2, 2)], data.disturbed(rng), rng, steps=30)
    seen = np.linalg.norm(found.point[0].matrix - maps.values[0])
    drawn = [np.linalg.norm(changes_of(found.point, step)[0]) for step in found.draws]
    assert 0.3 < np.median(drawn) / seen < 3.0
