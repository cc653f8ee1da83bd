"""The published algorithm of Theorem 4.1: exact on generic heads, and where it stops."""

import numpy as np
import pytest

import keyhole
from boxes import CountingBox
from keyhole.learners.published.theorem_4_1 import learn_exactly
from keyhole.models.attention import Attention, Head

WIDTH = 6


def draw_head(scale: float = 1.0, value: np.ndarray | None = None) -> Attention:
    rng = np.random.default_rng(0)
    score = scale * rng.standard_normal((WIDTH, WIDTH))
    drawn = rng.uniform(0.5, 1.5, WIDTH)
    return Attention([Head(score, None, drawn if value is None else value)])


def test_a_generic_head_takes_as_many_queries_as_it_has_unknowns() -> None:
    secret = draw_head()
    box = CountingBox(secret, WIDTH)
    found = learn_exactly(keyhole.open_oracle(box))
    assert box.seen == WIDTH**2 + WIDTH == found.floor
    assert keyhole.distance(found.model, secret) < 1e-13
    assert found.diagnostics.as_dict()["method"] == "theorem-4.1"


@pytest.mark.parametrize("seed", range(4))
def test_it_is_recovered_within_its_error_bars(seed: int) -> None:
    rng = np.random.default_rng(seed)
    truth = Attention([Head(rng.standard_normal((16, 16)) / 4, None, rng.standard_normal(16))])
    found = keyhole.recover(truth, keyhole.SingleHead(method="theorem-4.1"))
    off = np.abs(found.model.heads[0].score - truth.heads[0].score)
    assert 0.9 < float(np.mean(off <= 2.0 * found.errors.heads[0].score)) <= 1.0


def test_a_small_value_costs_digits_that_keyholes_own_probes_keep() -> None:
    value = np.ones(WIDTH)
    value[2] = 1e-6
    secret = draw_head(value=value)
    theirs = keyhole.recover(secret, "SingleHead", verify=False).model
    published = learn_exactly(keyhole.open_oracle(secret)).model
    truth = secret.heads[0].score
    assert np.abs(published.heads[0].score - truth)[2].max() > 1e-12
    assert np.abs(theirs.heads[0].score - truth)[2].max() < 1e-12


def test_a_value_of_zero_hides_a_row() -> None:
    value = np.ones(WIDTH)
    value[3] = 0.0
    with pytest.raises(keyhole.IllConditioned, match="zero at entry 3"):
        learn_exactly(keyhole.open_oracle(draw_head(value=value)))


def test_a_weight_that_rounds_to_one_ends_without_a_number() -> None:
    with pytest.raises(keyhole.IllConditioned, match="0 or 1 within its rounding"):
        learn_exactly(keyhole.open_oracle(draw_head(scale=100.0)))


def test_something_else_is_refused_with_the_query() -> None:
    def box(tokens: np.ndarray) -> np.ndarray:  # a sum instead of a mean
        return 3.0 * tokens.sum(axis=(1, 2))

    with pytest.raises(keyhole.WrongFamily) as refused:
        learn_exactly(keyhole.open_oracle(box, width=WIDTH))
    assert refused.value.counterexample is not None


def test_a_bounded_domain_is_not_left() -> None:
    box = keyhole.open_oracle(draw_head(), max_norm=1.0)
    with pytest.raises(keyhole.KeyholeError, match="e_i"):
        keyhole.recover(box, keyhole.SingleHead(method="theorem-4.1"))
