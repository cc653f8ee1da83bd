"""Files are of the types they are read as, or it is said where they are not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from keyhole.schema import WrongType, parse_json, read_as, read_record


@dataclass(frozen=True)
class Inner:
    count: int
    label: str = "none"


@dataclass(frozen=True)
class Outer:
    inner: Inner
    sizes: tuple[float, ...]
    table: Mapping[str, bool | float | str | None] = field(default_factory=dict)
    maybe: Inner | None = None
    anything: Any = None


GOOD = {"inner": {"count": 3, "more": 1}, "sizes": [1, 2.5, None], "table": {"a": True, "b": "x"}}


def test_a_good_record():
    found = read_record(Outer, GOOD)
    assert found == Outer(Inner(3), (1.0, 2.5, math.inf), {"a": True, "b": "x"})
    assert type(found.sizes[0]) is float


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 3}, "record.inner must be an object, got 3"),
        ({"inner": {}}, "record.inner lacks count"),
        ({"inner": {"count": 3.0}}, "record.inner.count must be a whole number, got 3.0"),
        ({"inner": {"count": True}}, "must be a whole number, got True"),
        ({"inner": {"count": 2**64}}, "must be a whole number"),
        ({"inner": {"count": 3, "label": 4}}, "record.inner.label must be text, got 4"),
        ({"sizes": 3}, "record.sizes must be a list"),
        ({"sizes": [1, "2"]}, r"record.sizes\[1\] must be a number"),
        ({"sizes": [10**400]}, "must be a finite number"),
        ({"sizes": [math.nan]}, "must be a finite number"),
        ({"table": {"a": [1]}}, "record.table.a must be"),
        ({"table": []}, "record.table must be an object"),
        ({"maybe": {"count": "x"}}, "record.maybe.count must be a whole number"),
    ],
)
def test_a_wrong_type_is_told_with_its_place(change, message):
    with pytest.raises(WrongType, match=message):
        read_record(Outer, {**GOOD, **change})


@pytest.mark.parametrize("value", [None, [], "text", 3])
def test_a_record_must_be_one(value):
    with pytest.raises(WrongType, match="record must be an object"):
        read_record(Outer, value)


def test_unions_take_what_fits():
    assert read_as(int | None, None, "x") is None
    assert read_as(bool | float, True, "x") is True
    with pytest.raises(WrongType, match="x must be a whole number"):
        read_as(int | None, "x", "x")


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_numbers_that_json_has_not(text):
    with pytest.raises(WrongType, match="is no number of JSON"):
        parse_json(text)
