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


@pytest.mark.parametrize("seed", range(4))
def test_an_exact_head_is_recovered_within_its_error_bars(seed: int) -> None:
    rng = np.random.default_rng([seed, 32])
    score = rng.standard_normal((32, 32))
    truth = Attention([Head(score / np.linalg.norm(score, 2), None, rng.standard_normal(32))])
    found = keyhole.recover(truth, keyhole.SingleHead(method="paper", score_bound=1.0))
    assert found.outcome is keyhole.Outcome.RECOVERED
    off = np.abs(found.model.heads[0].score - truth.heads[0].score)
    assert 0.9 < float(np.mean(off <= 2.0 * found.errors.heads[0].score)) <= 1.0


def test_a_bound_that_the_score_exceeds_is_refused_with_the_query() -> None:
    with pytest.raises(keyhole.WrongFamily, match=r"score_bound=0\.01") as refused:
        learn_as_published(keyhole.open_oracle(CountingBox(head(1.0), WIDTH)), 0.01)
    assert refused.value.counterexample is not None


def test_nothing_is_known_of_a_row_behind_a_value_of_zero() -> None:
    found = learn_as_published(keyhole.open_oracle(CountingBox(head(0.0), WIDTH)), 1.0)
    errors = found.errors.heads[0].score
    assert (errors[0] == 1.0).all()  # half of the interval that the bound leaves
    assert errors[1:].max() < 1e-12
