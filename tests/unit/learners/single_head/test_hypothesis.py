"""A score and the rest of a head become a hypothesis in the shape of the box's answers."""

import numpy as np
import pytest

from keyhole.learners.single_head.hypothesis import (
    Parameters,
    Score,
    SingleHeadDiagnostics,
    assemble,
)

WIDTH = 5


def parameters(outputs: int, bias: float, offset: float) -> Parameters:
    rng = np.random.default_rng(outputs)
    score, value = rng.standard_normal((WIDTH, WIDTH)), rng.standard_normal((WIDTH, outputs))
    return Parameters(score, np.full(WIDTH, bias), value, np.full(outputs, offset))


@pytest.mark.parametrize("bias", [0.0, 1.0])
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("outputs", "scalar"), [(1, True), (1, False), (3, False)])
def test_the_floor_counts_what_is_there(
    outputs: int, scalar: bool, bias: float, offset: float
) -> None:
    known = parameters(outputs, bias, offset)
    found = assemble(scalar, known, known, unknowns=WIDTH**2, diagnostics=SingleHeadDiagnostics())
    unknowns = WIDTH**2 + WIDTH * outputs + WIDTH * bool(bias) + outputs * bool(offset)
    assert found.floor == unknowns / outputs
    assert found.model.outputs == (None if scalar else outputs)
    tokens = np.random.default_rng(0).standard_normal((4, 3, WIDTH))
    assert found.model(tokens).shape == ((4,) if scalar else (4, outputs))


def test_a_score_of_low_rank_has_fewer_unknowns_and_says_why() -> None:
    left, right = np.ones((WIDTH, 2)), np.ones((2, WIDTH))
    score = Score.of_rank(
        2, (left, right), (left, right), reason="so", singular=np.ones(2), truncation=0.5
    )
    assert score.unknowns == 2 * 2 * WIDTH - 4
    assert score.notes == ("Rank 2: so.",)
    shown = score.diagnostics.as_dict()
    assert (shown["rank"], shown["rank_reason"], shown["truncation"]) == (2, "so", 0.5)
    assert "program_gap" not in shown  # what was not found out is not shown


def test_an_unseen_score_is_zero_with_its_bound_for_an_error() -> None:
    score = Score.zero(WIDTH, 1e-3, rank=0)
    assert score.unknowns == 0
    assert not (score.matrix[0] @ score.matrix[1]).any()
    np.testing.assert_array_equal(score.error[0] @ score.error[1], np.full((WIDTH, WIDTH), 1e-3))
