"""Reading examples from a file: a NumPy archive with `inputs`, `outputs` and, if padded, `mask`."""

import zipfile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import FileFormatError

ARCHIVE, ARRAY = b"PK", b"\x93NUMPY"  # how such files begin
KNOWN = ("inputs", "outputs", "mask")


class ExampleArrays(NamedTuple):
    """What `learn` takes: inputs, outputs and the mask of padded inputs, or None."""

    inputs: Array
    outputs: Array
    mask: Array | None


def _archive(path: Path, file: BinaryIO) -> Any:
    if not file.read(len(ARRAY)).startswith((ARCHIVE, ARRAY)):
        raise ValueError("it is neither a NumPy archive nor a NumPy array")
    file.seek(0)
    archive = np.load(file, allow_pickle=False)
    if isinstance(archive, np.ndarray):
        raise FileFormatError(
            f"{path} holds a single array; expected an .npz with 'inputs' and 'outputs'"
        )
    return archive


def read_examples(path: str | Path) -> ExampleArrays:
    """The arrays of an .npz file. Nothing in it is executed: pickled objects are refused."""
    path = Path(path)
    try:
        with path.open("rb") as file, _archive(path, file) as archive:
            parts: dict[str, Any] = {name: archive[name] for name in archive.files if name in KNOWN}
            others = [name for name in archive.files if name not in KNOWN]
    except FileNotFoundError as error:
        raise FileFormatError(f"there is no file {path}") from error
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise FileFormatError(
            f"{path} is not a readable .npz of plain number arrays ({error}). Write it with "
            "numpy.savez(path, inputs=X, outputs=Y)"
        ) from error
    missing = [name for name in ("inputs", "outputs") if name not in parts]
    if missing:
        found = ", ".join(sorted([*parts, *others])) or "nothing"
        raise FileFormatError(
            f"{path} lacks {' and '.join(missing)} (it holds {found}). Write it with "
            "numpy.savez(path, inputs=X, outputs=Y)"
        )
    return ExampleArrays(parts["inputs"], parts["outputs"], parts.get("mask"))
