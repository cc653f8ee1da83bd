"""Tensors of the Open Inference Protocol v2, as JSON and in the binary extension.

Shared by the client and by the server. Whatever is wrong with a message raises `Malformed` with a
sentence; nothing in a message is trusted, its sizes least of all.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array

DATATYPES = {  # the protocol's names; the bytes are little-endian
    "BOOL": "?",
    "UINT8": "<u1",
    "UINT16": "<u2",
    "UINT32": "<u4",
    "UINT64": "<u8",
    "INT8": "<i1",
    "INT16": "<i2",
    "INT32": "<i4",
    "INT64": "<i8",
    "FP16": "<f2",
    "FP32": "<f4",
    "FP64": "<f8",
}
NAMES = {np.dtype(kind).newbyteorder("="): name for name, kind in DATATYPES.items()}
HEADER_LENGTH = "Inference-Header-Content-Length"
MAX_RANK = 8  # dimensions of a tensor that anybody means


class Malformed(Exception):
    """A message that does not follow the protocol."""


@dataclass(frozen=True, eq=False)
class Tensor:
    """A named array on the wire."""

    name: str
    array: Array

    @property
    def datatype(self) -> str:
        return datatype_of(self.array.dtype)


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The protocol's name of a number format."""
    name = NAMES.get(dtype.newbyteorder("="))
    if name is None:
        raise Malformed(f"numbers of type {dtype} have no name in the protocol")
    return name


def encode(head: dict[str, Any], key: str, tensor: Tensor, binary: bool) -> tuple[bytes, int]:
    """A message with one tensor under `key` ("inputs" or "outputs"), and the length of its JSON
    part (the whole message, if not binary)."""
    entry: dict[str, Any] = {
        "name": tensor.name,
        "shape": list(tensor.array.shape),
        "datatype": tensor.datatype,
    }
    array = np.ascontiguousarray(tensor.array)
    if binary:
        entry["parameters"] = {"binary_data_size": array.nbytes}
    else:
        entry["data"] = array.ravel().tolist()
    body = json.dumps({**head, key: [entry]}).encode()
    if not binary:
        return body, len(body)
    # multiples of 16 bytes let the receiver use the numbers where they lie
    body += b" " * (-len(body) % 16)
    data = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return b"".join((body, data.data.cast("B") if data.size else b"")), len(body)


def decode(
    body: bytes | bytearray, header_length: str | None, key: str
) -> tuple[dict[str, Any], list[Tensor]]:
    """The JSON part of a message and the tensors under `key`."""
    split = json_part(body, header_length)
    message = parsed(body[:split])
    entries = message.get(key)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise Malformed(f'"{key}" must be a list of tensors')
    tensors, start = [], split
    for entry in entries:
        size = binary_size(entry)
        if size is None:
            tensors.append(_from_json(entry))
            continue
        if start + size > len(body):
            raise Malformed(f"the message ends before the {size} bytes of a tensor")
        tensors.append(_from_bytes(entry, memoryview(body)[start : start + size]))
        start += size
    if start != len(body):
        raise Malformed(f"{len(body) - start} bytes follow the last tensor")
    return message, tensors


def json_part(body: bytes | bytearray, header_length: str | None) -> int:
    """Bytes of a message that are JSON: all, unless a header says how many."""
    if header_length is None:
        return len(body)
    if not header_length.isascii() or not header_length.isdigit() or len(header_length) > 18:
        raise Malformed(f"{HEADER_LENGTH} must be a number")
    if int(header_length) > len(body):
        raise Malformed(f"{HEADER_LENGTH} exceeds the message")
    return int(header_length)


def parsed(text: bytes | bytearray) -> dict[str, Any]:
    """A JSON object."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {str(error)[:200]}") from error
    if not isinstance(message, dict):
        raise Malformed("the message must be a JSON object")
    return message


def binary_size(entry: dict[str, Any]) -> int | None:
    """How many bytes of binary data belong to this tensor; None if it is in the JSON."""
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise Malformed('"parameters" must be an object')
    size = parameters.get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise Malformed('"binary_data_size" must be a whole number')
    if "data" in entry:
        raise Malformed('a tensor has either "data" or "binary_data_size"')
    return size


def _described(entry: dict[str, Any]) -> tuple[str, tuple[int, ...], np.dtype[Any]]:
    name, shape, datatype = entry.get("name"), entry.get("shape"), entry.get("datatype")
    if not isinstance(name, str):
        raise Malformed('a tensor needs a "name"')
    max_entries = 2**40  # entries of a tensor: a terabyte is no message
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_RANK
        or not all(type(n) is int and n >= 0 for n in shape)
        or math.prod(max(n, 1) for n in shape) > max_entries  # NumPy counts beside a zero too
    ):
        raise Malformed('"shape" must be a short list of whole numbers, none of them huge')
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise Malformed(f'"datatype" must be one of {", ".join(DATATYPES)}')
    return name, tuple(shape), np.dtype(DATATYPES[datatype])


def _from_bytes(entry: dict[str, Any], data: memoryview) -> Tensor:
    name, shape, dtype = _described(entry)
    wanted = math.prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise Malformed(f"shape {list(shape)} needs {wanted} bytes, got {len(data)}")
    return Tensor(name, np.frombuffer(data, dtype).reshape(shape))


def _from_json(entry: dict[str, Any]) -> Tensor:
    name, shape, dtype = _described(entry)
    numbers = _flat(entry.get("data"))
    if len(numbers) != math.prod(shape):
        raise Malformed(f"shape {list(shape)} needs {math.prod(shape)} numbers, got {len(numbers)}")
    try:
        with np.errstate(over="ignore"):
            return Tensor(name, np.array(numbers, dtype=dtype).reshape(shape))
    except (ValueError, TypeError, OverflowError) as error:
        raise Malformed(f'"data" does not hold {entry["datatype"]} numbers: {error}') from error


def _flat(data: Any) -> Sequence[float]:
    """The numbers of a list, flat or nested, row by row."""
    if not isinstance(data, list):
        raise Malformed('a tensor needs "data", a list of numbers')
    level = data
    for _ in range(MAX_RANK):
        if not any(isinstance(item, list) for item in level):
            break
        if not all(isinstance(item, list) for item in level):
            raise Malformed('"data" mixes numbers and lists')
        level = [number for item in level for number in item]
    if not all(type(number) in (int, float, bool) for number in level):
        raise Malformed('"data" must hold numbers only')
    return level
