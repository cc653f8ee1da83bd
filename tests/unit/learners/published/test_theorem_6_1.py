"""The published algorithm: exact under its conditions, worse without them."""

import numpy as np
import pytest

import keyhole
from boxes import CountingBox
from keyhole.learners.published.theorem_6_1 import learn_as_published
from keyhole.models.attention import Attention, Head

WIDTH = 6


def head(smallest: float) -> Attention:
    """A score of norm one, and a value whose smallest entry is this."""
    rng = np.random.default_rng(0)
    score = rng.standard_normal((WIDTH, WIDTH))
    value = np.where(rng.random(WIDTH) < 0.5, -1.0, 1.0)
    value[0] = smallest
    return Attention([Head(score / np.linalg.norm(score, 2), None, value)])


def error(model: Attention, rounding: float = 0.0) -> float:
    def answer(tokens: np.ndarray) -> np.ndarray:
        exact = model(tokens)
        return exact if not rounding else rounding * np.round(exact / rounding)

    box = CountingBox(answer, WIDTH)
    found = learn_as_published(keyhole.open_oracle(box), 1.0)
    assert box.seen == WIDTH**2 + WIDTH
    assert found.diagnostics.as_dict() == {"score_bound": 1.0, "method": "paper"}
    return float(np.linalg.norm(found.model.heads[0].score - model.heads[0].score))


def test_exact_answers_give_the_score() -> None:
    assert error(head(1.0)) < 1e-12


@pytest.mark.parametrize("smallest", [1.0, 0.01])
def test_the_error_is_the_tolerance_over_the_smallest_value(smallest: float) -> None:
    found = error(head(smallest), rounding=1e-6)
    assert 1e-7 / smallest < found < 1e-4 / smallest
