"""A case is run by every method on the same box, and judged alike."""

import numpy as np
import pytest

from keyhole.bench import SUITES, run_case, run_suite
from keyhole.bench.cases import attention_case, token_attention_case
from keyhole.bench.measure import measure_growth
from keyhole.errors import InvalidArgument
from keyhole.learners.multi_head import MultiHead
from keyhole.learners.single_head import SingleHead

SECONDS = 0.2


def test_every_method_gets_as_many_queries_and_is_judged_alike() -> None:
    heard: list[str] = []
    case = attention_case("two heads", MultiHead(), width=6, heads=2)
    rows = run_case(case, seconds=SECONDS, memory=True, told=heard.append)
    assert [f"{row.case}: {row.method}" for row in rows] == heard
    first, *others = rows
    assert (first.method, first.ended, first.solved) == ("Keyhole", "RECOVERED", 1)
    assert first.parameters is not None
    assert first.parameters < 1e-8
    assert first.answers is not None
    assert first.answers < 1e-8
    assert first.floor == 84
    assert first.memory is not None
    assert first.memory > 0
    assert len({row.queries for row in rows}) == 1
    assert others
    assert all(row.solved == 0 for row in others)


def test_figures_are_medians_and_successes_add_up() -> None:
    case = attention_case("a head", SingleHead(), width=4)
    row = run_case(case, seeds=3, seconds=SECONDS)[0]
    assert (row.solved, row.seeds) == (3, 3)
    assert row.outside is not None
    assert row.seconds is not None
    assert row.outside <= row.seconds


@pytest.mark.parametrize("name", sorted(SUITES))
def test_the_smallest_case_of_every_suite_is_solved_by_keyhole_alone(name: str) -> None:
    """Students at the same queries are behind by orders of magnitude; the papers' algorithms may be
    as good, and behind noise so may a fit."""
    rows, slopes = run_suite(name, quick=True, seconds=SECONDS)
    keyhole, *others = rows
    assert keyhole.solved == 1, keyhole
    assert slopes == []
    students = [row for row in others if row.method.startswith(("student", "least squares"))]
    assert students or name == "tokens"
    if name != "noise":
        for row in students:
            assert row.solved == 0
            assert row.parameters is None or row.parameters > 10 * (keyhole.parameters or 0.0)


def test_students_learn_attention_on_tokens_too() -> None:
    rows = run_case(token_attention_case(40, 6, 2, tied=False), seconds=SECONDS)
    assert rows[0].solved == 1
    assert {"student (Adam)", "student (L-BFGS)"} <= {row.method for row in rows}


def test_queries_of_one_head_grow_with_the_square_of_its_width() -> None:
    growth = SUITES["single-head"].growth[0]
    slope = measure_growth(type(growth)(growth.what, (16, 32, 64), growth.case, growth.theory))
    assert abs(slope.fitted - 2.0) < 0.05
    assert list(slope.values) == sorted(slope.values)
    assert slope.memory[-1] > slope.memory[0] > 0


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="there are single-head"):
        run_suite("nothing")
    with pytest.raises(InvalidArgument, match="above 0"):
        run_case(SUITES["single-head"].cases[0], seconds=0.0)


def test_boxes_come_from_their_seed() -> None:
    case = SUITES["single-head"].cases[0]
    one, same, other = (case.draw(seed).model.heads[0].score for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert not np.array_equal(one, other)
