"""JSON of files, checked against the types of the records it is read into.

A file may be damaged, or of another version: what is read is of the annotated type, or a
WrongType says where it is not. Annotations that are understood: bool, int, float, str, None, Any,
unions, tuple[X, ...], Mapping[str, X] and dataclasses of these.
"""

import json
import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


class WrongType(ValueError):
    """A value of another type than its place in the record has."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; NaN and infinity, which JSON has not, are refused."""
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise WrongType(f"{name} is no number of JSON")


def read_as(kind: Any, value: Any, place: str) -> Any:
    """`value` as `kind`; a missing number (None, where a float is wanted) stands for infinity."""
    if kind is Any:
        return value
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _read_as_one(parts, value, place)
    if origin is tuple:
        _need(isinstance(value, list), "a list", value, place)
        return tuple(read_as(parts[0], item, f"{place}[{i}]") for i, item in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        _need(isinstance(value, dict), "an object", value, place)
        return {key: read_as(parts[1], item, f"{place}.{key}") for key, item in value.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return read_record(kind, value, place)
    return _read_plain(kind, value, place)


def _read_as_one(kinds: tuple[Any, ...], value: Any, place: str) -> Any:
    """The first kind of a union that fits."""
    if value is None and type(None) in kinds:
        return None
    reasons = []
    for kind in kinds:
        try:
            return read_as(kind, value, place)
        except WrongType as error:
            reasons.append(str(error))
    raise WrongType(reasons[0])


def _read_plain(kind: Any, value: Any, place: str) -> Any:
    widest = 2**63  # whole numbers beyond are no counts
    if kind is float:
        if value is None:
            return math.inf
        _need(type(value) in (int, float), "a number", value, place)
        number = float(value) if abs(value) < widest or type(value) is float else math.inf
        _need(math.isfinite(number), "a finite number", value, place)
        return number
    if kind is int:
        _need(type(value) is int and abs(value) < widest, "a whole number", value, place)
        return value
    names = {str: "text", bool: "true or false", type(None): "null"}
    _need(type(value) is kind, names.get(kind, kind.__name__), value, place)
    return value


def read_record(kind: type[Record], value: Any, place: str = "record") -> Record:
    """A dataclass from an object with its fields. Those with a default may be missing; fields
    that it does not have are left out."""
    _need(isinstance(value, dict), "an object", value, place)
    hints, known = get_type_hints(kind), {}
    for field in fields(kind):  # type: ignore[arg-type]
        if field.name in value:
            known[field.name] = read_as(
                hints[field.name], value[field.name], f"{place}.{field.name}"
            )
        elif field.default is MISSING and field.default_factory is MISSING:
            raise WrongType(f"{place} lacks {field.name}")
    return kind(**known)


def _need(good: bool, wanted: str, value: Any, place: str) -> None:
    if not good:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else f"{shown[:60]}…"
        raise WrongType(f"{place} must be {wanted}, got {shown}")
