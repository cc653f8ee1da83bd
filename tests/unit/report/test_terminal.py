import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import keyhole
from boxes import impostors
from keyhole.models.random import attention
from keyhole.report.terminal import PICTURE, SIGNS, counterexample, picture, reduced, show

MODEL = attention(np.random.default_rng(0), 40, bias=True)


def printed(what: Any, colour: bool = False) -> str:
    stream = io.StringIO()
    Console(
        file=stream, width=140, force_terminal=colour, color_system="truecolor" if colour else None
    ).print(what)
    return stream.getvalue()


def test_a_recovery_tells_its_numbers() -> None:
    text = printed(show(keyhole.recover(learner=keyhole.SingleHead(), box=MODEL), colour=False))
    assert "RECOVERED" in text
    words = " ".join(line.partition("│")[2].partition("│")[0] for line in text.splitlines())
    words = " ".join(words.split())
    assert "to learn (1.00 × the floor), 59 to verify" in words
    assert "float64" in text
    assert "agrees: 59 fresh queries" in text
    assert "at most 5%" in words
    assert "tolerance" in text
    assert "may go unnoticed" in words
    for block in ("offset", "score", "key bias", "value"):
        assert f"error of {block}" in text


def test_a_rejection_shows_the_query() -> None:
    box = keyhole.open_oracle(impostors(8)["two heads"], width=8)
    text = printed(
        show(keyhole.recover(learner=keyhole.SingleHead(), box=box, throw=False), colour=False)
    )
    assert "REJECTED" in text
    assert "counterexample" in text
    assert "tokens of width 8" in text


def test_a_run_that_found_nothing_can_be_shown() -> None:
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=MODEL, budget=3, throw=False)
    assert "BUDGET_EXHAUSTED" in printed(show(recovery, colour=False))


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (40, 40), (29, 31)])
@pytest.mark.parametrize("colour", [False, True])
def test_any_matrix_has_a_picture(shape: tuple[int, int], colour: bool) -> None:
    text = printed(picture(np.random.default_rng(0).standard_normal(shape), colour), colour)
    assert text.strip()
    assert picture(np.zeros(shape), colour)  # nothing to divide by


def test_the_picture_shows_the_signs() -> None:
    lines = str(picture(np.array([[1.0, -1.0], [0.0, 0.5]]), colour=False)).splitlines()
    assert lines[0] == SIGNS[-1] + SIGNS[0]
    assert lines[1][0] == SIGNS[len(SIGNS) // 2]


def test_cells_show_their_largest_entry() -> None:
    matrix = np.zeros((100, 100))
    matrix[99, 0] = -7.0
    cells = reduced(matrix)
    assert cells.shape == (PICTURE, PICTURE)
    assert cells[-1, 0] == -7.0
    assert np.count_nonzero(cells) == 1


def test_long_answers_are_shown_where_they_differ_most() -> None:
    box, model = np.arange(9.0), np.arange(9.0)
    box[[2, 4, 7, 8]] += 0.5
    text = printed(counterexample(keyhole.Counterexample(np.zeros((2, 3)), box, model, "a reason")))
    assert "box    2.5  4.5  7.5  8.5 … (entries 2, 4, 7, 8 of 9)" in text
    assert "model  2  4  7  8 … (entries 2, 4, 7, 8 of 9)" in text


def test_answers_of_two_kinds_are_shown_as_they_are() -> None:
    example = keyhole.Counterexample(np.zeros((2, 3)), np.arange(9.0), "an error", "a reason")
    text = printed(counterexample(example))
    assert "0  1  2  3 … (9 numbers)" in text
    assert "an error" in text


def test_a_score_in_factors_has_the_error_of_the_product() -> None:
    text = printed(show(keyhole.recover(attention(np.random.default_rng(1), 12)), colour=False))
    line = next(line for line in text.splitlines() if "error of score" in line)
    assert float(line.split("error of score")[1].split()[0]) < 1e-10
    assert "score_left" not in text
