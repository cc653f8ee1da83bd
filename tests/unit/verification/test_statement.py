import math
from dataclasses import replace

import pytest

from keyhole.errors import Counterexample
from keyhole.verification.statement import (
    state_difference,
    state_hidden,
    state_noticed,
    state_space,
    state_verdict,
)

EXACT = {"tolerance": 2e-14, "precision": 1e-14}


@pytest.mark.parametrize(
    ("count", "share"), [(59, "5%"), (299, "1%"), (200, "1.5%"), (6, "40%"), (1, "95%")]
)
def test_one_sentence_bounds_the_share_that_differs(count: int, share: str) -> None:
    words = state_verdict(count, 0, **EXACT)
    assert "within the box's precision (2.0e-14 of the answers' size)" in words
    assert f"With 95% confidence at most {share} of ordinary queries are answered diff" in words
    assert "nothing is claimed" in words


def test_old_answers_are_mentioned_and_one_is_not_many() -> None:
    assert "and so do all 1,031 answers given while learning" in state_verdict(4, 1031, **EXACT)
    assert state_verdict(1, 0, **EXACT).startswith("The one fresh answer agrees")


def test_a_tolerance_set_by_error_bars_is_not_called_the_precision_of_the_box() -> None:
    words = state_verdict(60, 0, tolerance=6e-4, precision=6e-8)
    assert "within the box's precision" not in words
    assert "within 6.0e-04 of the answers' size" in words
    assert "the box's own precision is 6.0e-08" in words


def test_what_may_go_unnoticed_is_said_of_the_block_seen_worst() -> None:
    assert "heads.1.score (seen worst) by less than 5.0e-03" in state_noticed(
        {"heads.0.score": 1e-6, "heads.1.score": 5e-3}
    )
    assert "nothing about heads.0.value" in state_noticed(
        {"heads.0.value": math.inf, "offset": 1e-3}
    )
    assert state_noticed({}) == ""


def test_noise_that_hides_the_box_is_no_agreement() -> None:
    words = state_hidden(4)
    assert words.startswith("Noise hides the box")
    assert "agree within" not in words


def test_a_difference_is_said_with_its_reason() -> None:
    example = Counterexample([[0.0]], 1.0, 2.0, "a long sequence")
    assert state_difference(example, 1e-9, 3, 59, 0, 0) == (
        "The box and the model differ on 3 of 59 fresh answers. The query shown: a long sequence, "
        "5.0e-01 of the answer apart (ordinary ones may be 1.0e-09 apart)."
    )
    words = state_difference(replace(example, box_answer=[1.0, 2.0]), 1e-9, 0, 59, 2, 1200)
    assert "0 of 59 fresh answers and 2 of 1,200 answers given while learning" in words
    assert words.endswith("The query shown: a long sequence.")  # of another shape


def test_an_output_layer_is_said_to_show_the_space_alone():
    assert state_space().startswith("Only the space of answers was compared")
