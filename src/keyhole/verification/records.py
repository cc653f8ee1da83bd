"""Files that one can rely on: signatures and evidence, with a digest over every byte.

The first line names the format and the SHA-256 of all that follows; the rest is one JSON object.
Numbers are kept to the last bit. The digest finds accidents, and changes by whoever cannot change
the first line too: publish it, or keep it apart, and it binds. Files are readable by their owner
alone: they hold answers.
"""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import FileFormatError
from keyhole.models.files import replacing
from keyhole.oracles.rows import Row

LARGEST = 2**30  # bytes of a file that is read


def write_record(path: str | Path, format_: str, body: dict[str, Any]) -> str:
    """Writes a file of its format, whole or not at all; its digest."""
    path = Path(path)
    content = (json.dumps(body, sort_keys=True, allow_nan=False) + "\n").encode()
    digest = hashlib.sha256(content).hexdigest()
    with replacing(path) as temporary:
        temporary.write_bytes(_head(format_, digest) + content)
    return digest


def _head(format_: str, digest: str) -> bytes:
    return f"{format_} sha256:{digest}\n".encode()


def holds_record(path: str | Path, format_: str) -> bool:
    """Whether a file claims to be of this format."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(format_) + 1) == f"{format_} ".encode()
    except OSError:
        return False


def read_record(path: str | Path, format_: str) -> tuple[dict[str, Any], str]:
    """The object in a file, and its digest; a FileFormatError where a single byte was altered."""
    path = Path(path)
    if not path.is_file():
        raise FileFormatError(f"{path} does not exist or is not a file")
    if path.stat().st_size > LARGEST:
        raise FileFormatError(f"{path} is larger than any {format_} file")
    head, _, content = path.read_bytes().partition(b"\n")
    digest = hashlib.sha256(content).hexdigest()
    if head + b"\n" != _head(format_, digest):
        if not head.startswith(f"{format_} ".encode()):
            raise FileFormatError(f"{path} is no {format_} file: its first line says otherwise")
        raise FileFormatError(
            f"{path} was altered or cut: its contents do not have the digest of its first line"
        )
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} holds no JSON: {error}") from error
    if not isinstance(body, dict):
        raise FileFormatError(f"{path} holds no object")
    return body, digest


def pack_array(array: Array) -> dict[str, Any]:
    """An array as JSON, to the last bit."""
    plain = np.ascontiguousarray(array)
    plain = plain.astype(plain.dtype.newbyteorder("<"))
    return {
        "type": plain.dtype.str,
        "shape": list(plain.shape),
        "bytes": base64.b64encode(plain.tobytes()).decode(),
    }


def unpack_array(packed: Any) -> Array:
    """The array behind JSON that `pack_array` made; numbers and nothing else."""
    try:
        kind = np.dtype(packed["type"])
        if kind.kind not in "fiu":
            raise ValueError(f"type {kind}")
        numbers = np.frombuffer(base64.b64decode(packed["bytes"], validate=True), dtype=kind)
        return numbers.reshape([int(side) for side in packed["shape"]])
    except (KeyError, TypeError, ValueError) as error:
        raise FileFormatError(f"a file holds an array that is none: {error}") from error


def pack_row(row: Row) -> Any:
    """A text as it is, anything else as an array."""
    return row if isinstance(row, str) else pack_array(np.asarray(row))


def unpack_row(packed: Any) -> Row:
    return packed if isinstance(packed, str) else unpack_array(packed)
