"""The table of all probes against all anchors gives the score."""

import numpy as np
import pytest

from boxes import CountingBox
from keyhole.errors import IllConditioned
from keyhole.learners.single_head.calibration import (
    Calibration,
    calibrate,
    draw_probes,
    measure_key_bias,
)
from keyhole.learners.single_head.score_table import OddsTable, measure_table, solve_table
from keyhole.linalg.bases import Basis
from keyhole.measurement.linear_response import measure_values
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import open_oracle

WIDTH = 9


def prepare(model: Attention) -> tuple[Calibration, Basis, CountingBox]:
    box = CountingBox(model, WIDTH)
    oracle, rng = open_oracle(box), np.random.default_rng(0)
    linear = measure_values(oracle, rng)
    overlap = draw_probes(oracle.spec, linear, rng)
    bias = measure_key_bias(oracle, linear, overlap)
    calibration = calibrate(oracle, linear, overlap, bias, rng)
    box.seen = 0
    return calibration, calibration.draw_anchors(rng), box


def fill(calibration: Calibration, anchors: Basis, spread: float) -> OddsTable:
    return measure_table(
        calibration.meter(), anchors, calibration.values_of(anchors), spread, calibration.longest
    )


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [None, 2, 9])
def test_exact_products_give_the_score(outputs: int | None, bias: bool) -> None:
    model = attention(np.random.default_rng(1), WIDTH, outputs=outputs, bias=bias)
    calibration, anchors, _ = prepare(model)
    everything = np.arange(WIDTH)
    product = calibration.probes.rows(everything) @ model.heads[0].score
    product = product @ anchors.rows(everything).T
    error, inverse = np.full((WIDTH, WIDTH), 1e-3), np.ones(WIDTH)
    table = OddsTable(product, error, inverse, NoiseModel(), 1.0)
    score = solve_table(calibration, anchors, table)
    np.testing.assert_allclose(score.matrix, model.heads[0].score, atol=1e-12)
    assert score.unknowns == WIDTH**2
    assert (score.error > 0).all()


@pytest.mark.parametrize("guess", [1e-3, 1.0, 1e3])
def test_a_wrong_guess_of_the_scale_costs_few_queries_and_no_digits(guess: float) -> None:
    model = attention(np.random.default_rng(2), WIDTH)
    calibration, anchors, box = prepare(model)
    table = fill(calibration, anchors, guess * calibration.scale)
    assert box.seen <= 2 * WIDTH**2
    score = solve_table(calibration, anchors, table)
    np.testing.assert_allclose(score.matrix, model.heads[0].score, rtol=0, atol=1e-11)
    assert table.spread == pytest.approx(np.sqrt(np.mean(table.product**2)), rel=0.5)


def test_one_large_entry_is_asked_again_with_shorter_anchors() -> None:
    (head,) = attention(np.random.default_rng(3), WIDTH).heads
    score = np.array(head.score)
    score += 300.0 * np.outer(*np.linalg.qr(score)[0][:, :2].T)
    model = Attention([Head(score, None, head.value)])
    calibration, anchors, box = prepare(model)
    found = solve_table(calibration, anchors, fill(calibration, anchors, 1.0))
    np.testing.assert_allclose(found.matrix, score, atol=1e-10)
    assert box.seen > WIDTH**2  # some of them twice


def test_a_box_that_always_attends_to_one_token_is_ill_conditioned() -> None:
    model = attention(np.random.default_rng(4), WIDTH)
    calibration, anchors, box = prepare(model)
    value = model.heads[0].value
    box.function = lambda tokens: tokens[:, -1] @ value
    with pytest.raises(IllConditioned, match="decades"):
        fill(calibration, anchors, 1.0)
