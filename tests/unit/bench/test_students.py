"""The baselines are fair ones: where they can succeed, they do."""

import numpy as np
import pytest

from keyhole.bench import students as taught
from keyhole.bench.students import Lesson, fit_least_squares, students, train
from keyhole.models.canonical import distance
from keyhole.models.mlp import Mlp
from keyhole.models.random import attention, block


def lesson(model, tokens, seconds):
    return Lesson(tokens, model(tokens), model, seconds)


def test_least_squares_finds_one_small_head() -> None:
    rng = np.random.default_rng(0)
    model = attention(rng, 3)
    found = fit_least_squares(lesson(model, rng.standard_normal((60, 4, 3)), np.inf), rng)
    assert found.ended == "settled"
    assert distance(found.model, model) < 1e-6


@pytest.mark.parametrize("kind", ["Adam", "L-BFGS"])
def test_a_trained_student_comes_nearer(kind: str) -> None:
    rng = np.random.default_rng(0)
    model = Mlp(rng.standard_normal((2, 3)), np.zeros(2), rng.standard_normal((3, 2)),
                activation="gelu")  # fmt: skip
    tokens = rng.standard_normal((100, 1, 3))
    start = type(model).from_arrays(lesson(model, tokens, 1.0).start(np.random.default_rng(1)))
    found = train(lesson(model, tokens, 0.5), np.random.default_rng(1), kind).model
    gaps = [float(np.linalg.norm(m(tokens) - model(tokens))) for m in (start, found)]
    assert gaps[1] < 0.5 * gaps[0]


def test_epsilons_are_granted_and_nothing_else() -> None:
    model = block(np.random.default_rng(0), 4, heads=2, norm="post")
    start = lesson(model, np.zeros((1, 2, 4)), 1.0).start(np.random.default_rng(1))
    arrays = model.to_arrays()
    granted = [name for name in arrays if np.array_equal(start[name], arrays[name])]
    assert [name for name in granted if arrays[name].size and np.any(arrays[name])] == ["epsilons"]


def test_without_torch_only_least_squares_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(students()) == 3
    monkeypatch.setattr(taught, "find_spec", lambda name: None)
    assert list(students()) == ["least squares (SciPy)"]
