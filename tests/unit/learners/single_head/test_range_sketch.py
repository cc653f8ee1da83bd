"""Columns, then rows: the score of a calibrated head, without verification around it."""

import numpy as np
import pytest

from boxes import CountingBox
from keyhole.learners.single_head.calibration import (
    Calibration,
    calibrate,
    draw_probes,
    measure_key_bias,
)
from keyhole.learners.single_head.cross import RankSearch, measure_cross
from keyhole.learners.single_head.hypothesis import Score
from keyhole.learners.single_head.range_sketch import sketch_range
from keyhole.measurement.linear_response import measure_values
from keyhole.models.attention import Attention
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle

WIDTH = 20


def prepare(model: Attention) -> tuple[Calibration, CountingBox]:
    box = CountingBox(model, WIDTH)
    oracle, rng = open_oracle(box), np.random.default_rng(0)
    linear = measure_values(oracle, rng)
    overlap = draw_probes(oracle.spec, linear, rng)
    bias = measure_key_bias(oracle, linear, overlap)
    calibration = calibrate(oracle, linear, overlap, bias, rng)
    box.seen = 0
    return calibration, box


def error(score: Score, model: Attention) -> float:
    truth = model.heads[0].score
    matrix = score.matrix
    whole = matrix[0] @ matrix[1] if isinstance(matrix, tuple) else matrix
    return float(np.linalg.norm(whole - truth) / np.linalg.norm(truth))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("outputs", "rank"), [(4, 1), (4, 3), (20, 6)])
def test_a_sketch_finds_the_rank_with_few_queries_beyond_the_unknowns(
    outputs: int, rank: int, bias: bool
) -> None:
    model = attention(np.random.default_rng(rank), WIDTH, outputs=outputs, rank=rank, bias=bias)
    calibration, box = prepare(model)
    rng = np.random.default_rng(1)
    score = sketch_range(calibration, calibration.draw_anchors(rng), rng, RankSearch())
    assert score.diagnostics.rank == rank
    assert error(score, model) < 1e-11
    group = calibration.group
    columns, rows = rank * -(-WIDTH // group), (WIDTH - rank) * -(-rank // group)
    assert box.seen <= columns + rows + 4 * rank + 12


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rank", [1, 4, WIDTH])
def test_a_cross_approximation_finds_the_rank_at_the_floor(rank: int, bias: bool) -> None:
    model = attention(np.random.default_rng(rank), WIDTH, rank=rank, bias=bias)
    calibration, box = prepare(model)
    rng = np.random.default_rng(1)
    score = measure_cross(calibration, calibration.draw_anchors(rng), rng, RankSearch())
    assert score.diagnostics.rank == rank
    assert error(score, model) < 1e-11
    assert 2 * rank * WIDTH - rank * rank <= box.seen
    assert box.seen <= 2 * rank * WIDTH - rank * rank + 3 * rank + 4


@pytest.mark.parametrize("outputs", [None, 4])
def test_a_prescribed_rank_leaves_the_rest_out_and_says_how_much(outputs: int | None) -> None:
    model = attention(np.random.default_rng(5), WIDTH, outputs=outputs, rank=6)
    calibration, _ = prepare(model)
    rng, search = np.random.default_rng(1), RankSearch(rank=2)
    measure = measure_cross if outputs is None else sketch_range
    score = measure(calibration, calibration.draw_anchors(rng), rng, search)
    assert score.diagnostics.rank == 2
    truth = model.heads[0].score
    left_out = truth - score.matrix[0] @ score.matrix[1]
    stated = np.asarray(score.error[0] @ score.error[1])
    assert np.linalg.norm(left_out) <= 4.0 * np.linalg.norm(stated)
    assert score.diagnostics.truncation > 0


def test_patience_ends_the_search_for_the_rank() -> None:
    model = attention(np.random.default_rng(6), WIDTH, outputs=4)
    calibration, patient = prepare(model)
    rng = np.random.default_rng(1)
    sketch_range(calibration, calibration.draw_anchors(rng), rng, RankSearch())
    calibration, hasty = prepare(model)
    rng = np.random.default_rng(1)
    score = sketch_range(calibration, calibration.draw_anchors(rng), rng, RankSearch(), 3)
    assert score.diagnostics.rank == WIDTH
    assert error(score, model) < 1e-11
    assert hasty.seen < patient.seen
