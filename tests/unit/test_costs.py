"""Which tests are quick."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

import costs


def make_item(file: str, function: str, slow: bool = False) -> Any:
    mark = pytest.mark.slow.mark if slow else None
    return SimpleNamespace(
        path=costs.TESTS / file,
        name=f"{function}[3]",
        originalname=function,
        get_closest_marker=lambda name: mark,
    )


def test_a_test_is_quick_unless_measured_marked_or_apart() -> None:
    table = {"unit/test_x.py": {"test_long": 3.0}}
    assert costs.is_quick(make_item("unit/test_x.py", "test_short"), table)
    assert not costs.is_quick(make_item("unit/test_x.py", "test_long"), table)
    assert not costs.is_quick(make_item("unit/test_x.py", "test_short", slow=True), table)
    assert not costs.is_quick(make_item("browser/test_y.py", "test_short"), table)


def test_what_ran_replaces_what_was_known_and_what_is_gone_goes() -> None:
    own, file = "test_every_listed_test_is_there", "unit/test_costs.py"
    other = "test_a_test_is_quick_unless_measured_marked_or_apart"
    known = {
        file: {"test_gone": 9.0, own: 3.0, other: 4.0},
        "unit/test_no_more.py": {"test_a": 1.0},
    }
    text = costs.build_table(known, {file: {own: 2.04}})
    assert json.loads(text) == {file: {other: 4.0, own: 2.0}}
    assert json.loads(costs.build_table(known, {file: {own: 0.1}})) == {file: {other: 4.0}}


def test_every_listed_test_is_there() -> None:
    """A renamed test is measured anew, or its line goes."""
    for file, functions in costs.read_costs().items():
        text = (costs.TESTS / file).read_text()
        for function in functions:
            assert f"def {function.split('::')[-1]}(" in text, (file, function)
