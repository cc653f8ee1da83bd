"""The pair queries and their inversion, against the formula and against hostile boxes."""

import numpy as np
import pytest

from boxes import CountingBox
from keyhole.errors import IllConditioned, WrongFamily
from keyhole.learners.single_head.score_table import BLOCK_GROWTH, measure_table
from keyhole.linalg.bases import equal_overlap, random_basis
from keyhole.measurement.linear_response import measure_values
from keyhole.measurement.log_odds import LogOddsMeter, ProbeSet
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import ArrayBank, QueryBatch, ScaledBank

WIDTH = 8


def meter(
    model: Attention, length: float = 1.0, group: int = 1
) -> tuple[LogOddsMeter, CountingBox]:
    """Probes of one length with equal overlap, as the learner sets them up."""
    box = CountingBox(model, WIDTH)
    oracle = open_oracle(box)
    linear = measure_values(oracle, np.random.default_rng(0))
    left = np.linalg.svd(linear.value, full_matrices=False)[0][:, :group]
    basis = equal_overlap(np.random.default_rng(0), left)
    rows = basis.rows(np.arange(WIDTH))
    probes = ProbeSet(
        ScaledBank(basis, length),
        WIDTH,
        group,
        length * rows @ linear.value,
        length * rows @ model.heads[0].key_bias,
    )
    box.seen = 0
    return LogOddsMeter(oracle, linear, probes, "score"), box


def truth(odds: LogOddsMeter, model: Attention, anchors: np.ndarray) -> np.ndarray:
    probes = odds.probes.bank.rows(np.arange(odds.probes.count))
    return probes @ model.heads[0].score @ anchors.T


@pytest.mark.parametrize(("outputs", "group"), [(None, 1), (4, 4), (3, 3), (8, 8)])
@pytest.mark.parametrize("bias", [False, True])
def test_log_odds_are_probe_score_anchor(outputs: int | None, group: int, bias: bool) -> None:
    model = attention(np.random.default_rng(1), WIDTH, outputs=outputs, bias=bias)
    odds, box = meter(model, group=group)
    anchor = np.random.default_rng(2).standard_normal((1, WIDTH))
    groups = np.arange(odds.probes.groups)
    found = odds.ask(
        ArrayBank(anchor),
        1,
        np.zeros_like(groups),
        groups,
        np.repeat(odds.linear.at(anchor), len(groups), axis=0),
    )
    assert box.seen == odds.probes.groups == -(-WIDTH // group)
    assert not found.saturated.any()
    scores = found.scores.ravel()[:WIDTH] - odds.probes.bias
    np.testing.assert_allclose(scores, truth(odds, model, anchor)[:, 0], atol=1e-12)
    errors = np.abs(scores - truth(odds, model, anchor)[:, 0])
    assert (errors <= 4 * found.errors.ravel()[:WIDTH]).all()


def test_a_value_that_cancels_is_rounded_at_the_size_of_its_terms() -> None:
    """A long anchor without value shows rounding alone: no proof that the box is no head."""
    value = np.random.default_rng(5).standard_normal(WIDTH)
    odds, _ = meter(Attention([Head(np.zeros((WIDTH, WIDTH)), None, value)]))
    anchor = np.random.default_rng(6).standard_normal(WIDTH)
    anchor = 50.0 * anchor / np.linalg.norm(anchor)
    anchor -= (anchor @ value) / (value @ value) * value
    none = QueryBatch.of(np.stack([anchor, anchor])[None], "score")
    rounded = np.array([-1e-16 * 50.0 * np.linalg.norm(value)])
    zero, nothing = np.zeros(1, dtype=np.int64), np.zeros((1, 1))
    found = odds._invert(rounded, none, zero, nothing, np.array([50.0]))
    assert found.saturated.all()
    with pytest.raises(WrongFamily, match="not such a mean"):
        odds._invert(np.array([-np.pi]), none, zero, nothing, np.array([50.0]))


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("guess", [0.1, 1.0, 1e3])
def test_a_table_costs_little_more_than_its_entries(scale: float, guess: float) -> None:
    """However wrong the first guess of the scale is, only the first block suffers."""
    model = attention(np.random.default_rng(3), WIDTH, scale=scale)
    odds, box = meter(model, length=2.0**20)
    anchors = random_basis(np.random.default_rng(4), WIDTH)
    rows = anchors.rows(np.arange(WIDTH))
    exact = truth(odds, model, rows)
    spread = guess * float(np.sqrt(np.mean(exact**2)))
    table = measure_table(odds, anchors, odds.linear.at(rows), spread)
    assert box.seen <= WIDTH**2 + 4 * BLOCK_GROWTH
    assert np.linalg.norm(table.product - exact) < 1e-13 * np.linalg.norm(exact)
    assert table.spread == pytest.approx(float(np.sqrt(np.mean(exact**2))), rel=0.1)


def test_standard_errors_are_of_the_right_size() -> None:
    model = attention(np.random.default_rng(5), WIDTH)
    odds, _ = meter(model, length=2.0**10)
    anchors = random_basis(np.random.default_rng(6), WIDTH)
    rows = anchors.rows(np.arange(WIDTH))
    exact = truth(odds, model, rows)
    spread = float(np.sqrt(np.mean(exact**2)))
    table = measure_table(odds, anchors, odds.linear.at(rows), spread)
    ratio = np.sqrt(np.mean(((table.product - exact) / table.error) ** 2))
    assert 0.03 < ratio < 2.0


def test_the_scale_is_found_from_far_away() -> None:
    for scale in (1e-8, 1.0, 1e8):
        model = attention(np.random.default_rng(7), WIDTH, scale=scale)
        odds, box = meter(model)
        anchor = random_basis(np.random.default_rng(8), WIDTH).rows(np.zeros(1, dtype=int))[0]
        seen = odds.scale(anchor, 1.0, np.inf)
        first = abs(truth(odds, model, anchor[None])[0, 0])
        assert seen == pytest.approx(first, rel=0.2)
        assert box.seen <= 10


def test_no_score_is_told_from_a_small_one() -> None:
    nothing = Attention(
        [Head(np.zeros((WIDTH, WIDTH)), None, np.random.default_rng(0).random(WIDTH))]
    )
    odds, box = meter(nothing, length=2.0**20)
    assert odds.scale(np.eye(WIDTH)[0], 2.0**-20, np.inf) is None
    assert box.seen <= 4


def test_an_answer_outside_the_values_is_refused_with_the_query() -> None:
    model = attention(np.random.default_rng(9), WIDTH)
    odds, _ = meter(model)
    odds.oracle = open_oracle(lambda tokens: 10.0 * np.abs(tokens).sum(axis=(1, 2)), width=WIDTH)
    zeros = np.zeros(1, dtype=np.int64)
    with pytest.raises(WrongFamily) as caught:
        odds.ask(ArrayBank(np.eye(WIDTH)[:1]), 1, zeros, zeros, odds.linear.at(np.eye(WIDTH)[:1]))
    example = caught.value.counterexample
    assert example is not None
    assert np.shape(example.input) == (2, WIDTH)
    assert example.box_answer > example.model_answer


def test_a_box_that_always_picks_one_token_is_ill_conditioned() -> None:
    model = attention(np.random.default_rng(10), WIDTH)
    odds, _ = meter(model)
    odds.oracle = open_oracle(lambda tokens: tokens[:, 0] @ model.heads[0].value, width=WIDTH)
    with pytest.raises(IllConditioned):
        odds.scale(np.eye(WIDTH)[0], 1.0, np.inf)
