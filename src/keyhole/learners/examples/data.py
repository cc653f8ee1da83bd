"""Labelled examples at the border: what users bring, checked, as rows the algebra works on.

Inputs: an array (n, k, d); a list of arrays (length, d) of several lengths; or a padded array with
a mask (n, k), true at real tokens. Outputs: every position (n, k, D) or a list of (length, D);
the last position (n, D); a scalar at the last position (n,). Files: a NumPy archive with `inputs`,
`outputs` and, if padded, `mask`.
"""

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keyhole.arrays import Array, finite_array
from keyhole.errors import FileFormatError, InvalidArgument, NotIdentifiable
from keyhole.fitting.attention_rows import MASKED, Rows
from keyhole.linalg.rank import count_above_share

SMALL_ARCHIVE = 2**30  # bytes that the arrays of any file may take


@dataclass(frozen=True, eq=False)
class Examples:
    """Rows in double precision, and how the user wrote them."""

    rows: Rows
    form: str  # "every" position, "last" position, or "scalar" at the last
    roundoff: float  # unit roundoff of the numbers the user brought

    @property
    def count(self) -> int:
        return len(self.rows.tokens)


def build_examples(inputs: Any, outputs: Any, mask: Any = None, *, bias: bool = False) -> Examples:
    """The user's arrays as rows, or a sentence on what is wrong with them."""
    sequences = _read_sequences(inputs, mask)
    labels, form = _read_labels(outputs, [len(s) for s in sequences], mask)
    width, longest = sequences[0].shape[1], max(len(s) for s in sequences)
    count, reads = len(sequences), longest if form == "every" else 1
    tokens = np.zeros((count, longest, width))
    padding = np.full((count, 1, longest), MASKED)
    weights = np.zeros((count, reads))
    targets = np.zeros((count, reads, labels[0].shape[-1]))
    for i, (sequence, label) in enumerate(zip(sequences, labels, strict=True)):
        tokens[i, : len(sequence)] = sequence
        padding[i, 0, : len(sequence)] = 0.0
        weights[i, : len(label)] = 1.0
        targets[i, : len(label)] = label
    lengths = np.array([len(s) for s in sequences])
    anchors = tokens if form == "every" else tokens[np.arange(count), lengths - 1][:, None, :]
    if bias:
        anchors = np.concatenate([anchors, np.ones((*anchors.shape[:2], 1))], axis=2)
    rows = Rows(
        anchors,
        tokens,
        padding if (lengths < longest).any() else None,
        weights,
        targets,
        offset=bias,
    )
    single = all(label.dtype == np.float32 for label in labels)
    return Examples(rows, form, float(np.finfo(np.float32 if single else np.float64).eps) / 2)


def _read_padded(inputs: Array, mask: Any) -> list[Array]:
    """The tokens of every sequence that are no padding."""
    if mask is None:
        return list(finite_array("inputs", inputs, ndim=3))
    real = _read_mask(inputs, mask)
    inputs = np.where(real[:, :, None], inputs, 0)  # padding may hold anything, even NaN
    array = finite_array("inputs", inputs, ndim=3)
    return [row[keep] for row, keep in zip(array, real, strict=True)]


def _read_sequences(inputs: Any, mask: Any) -> list[Array]:
    if hasattr(inputs, "__array__") and not isinstance(inputs, np.ndarray):
        inputs = np.asarray(inputs)  # a tensor of another library
    if isinstance(inputs, np.ndarray) and inputs.dtype != object:
        parts = _read_padded(inputs, mask)
    elif isinstance(inputs, (Sequence, np.ndarray)):
        if mask is not None:
            raise InvalidArgument("a mask goes with a padded array, not with a list of sequences")
        parts = [finite_array(f"inputs[{i}]", part, ndim=2) for i, part in enumerate(inputs)]
    else:
        raise InvalidArgument(
            f"inputs must be an array (n, k, d) or a list of arrays (length, d), got "
            f"{type(inputs).__name__}"
        )
    if not parts:
        raise InvalidArgument("there are no examples")
    widths = {part.shape[1] for part in parts}
    if len(widths) > 1 or 0 in widths:
        raise InvalidArgument(f"tokens must share one width of at least 1, got {sorted(widths)}")
    short = next((i for i, part in enumerate(parts) if len(part) == 0), None)
    if short is not None:
        raise InvalidArgument(f"example {short} has no tokens")
    return [part.astype(np.float64) for part in parts]


def _read_mask(inputs: Array, mask: Any) -> Array:
    """Which tokens count."""
    keep = np.asarray(mask)
    flags = keep.dtype.kind in "buif" and np.isin(keep, (0, 1)).all()
    if not flags or inputs.ndim != 3 or keep.shape != inputs.shape[:2]:
        raise InvalidArgument(
            f"mask must be true or false (1 or 0) for each token, shape {inputs.shape[:2]}, got "
            f"{keep.dtype} of shape {keep.shape}{'' if flags else ' with other values'}"
        )
    return keep.astype(bool)


def _read_label_list(outputs: Sequence[Any], lengths: list[int]) -> list[Array]:
    parts = [finite_array(f"outputs[{i}]", part, ndim=2) for i, part in enumerate(outputs)]
    _check_lengths("outputs", [len(p) for p in parts], lengths)
    if len({part.shape[1] for part in parts}) > 1:
        raise InvalidArgument("outputs must share one number of columns")
    return parts


def _read_labels(outputs: Any, lengths: list[int], mask: Any) -> tuple[list[Array], str]:
    """One (reads, D) array per example, and the form they were written in."""
    if isinstance(outputs, (list, tuple)) and outputs and np.ndim(outputs[0]) == 2:
        return _read_label_list(outputs, lengths), "every"
    array = np.asarray(outputs)
    if array.ndim == 3 and mask is not None and array.shape[:2] == np.shape(mask):
        keep = np.asarray(mask, bool)
        array = finite_array("outputs", np.where(keep[:, :, None], array, 0), ndim=3)
        return [array[i][keep[i]] for i in range(len(array))], "every"
    array = finite_array("outputs", array, ndim=(1, 2, 3))
    if len(array) != len(lengths):
        raise InvalidArgument(f"there are {len(lengths)} inputs but {len(array)} outputs")
    if array.size == 0:
        raise InvalidArgument(f"outputs are empty: shape {array.shape}")
    if array.ndim == 3:
        _check_lengths("outputs", [array.shape[1]] * len(array), lengths)
        return list(array), "every"
    if array.ndim == 2:
        return list(array[:, None, :]), "last"
    return list(array[:, None, None]), "scalar"


def _check_lengths(name: str, found: list[int], lengths: list[int]) -> None:
    if len(found) != len(lengths):
        raise InvalidArgument(f"there are {len(lengths)} inputs but {len(found)} {name}")
    wrong = next(
        (i for i, pair in enumerate(zip(found, lengths, strict=True)) if len(set(pair)) > 1), None
    )
    if wrong is not None:
        raise InvalidArgument(
            f"{name}[{wrong}] has {found[wrong]} positions, its input {lengths[wrong]}; give one "
            "row per token, or the last position only as an array (n, D)"
        )


def check_span(rows: Rows) -> None:
    """Raises NotIdentifiable where the tokens cannot show a whole matrix, whatever the labels."""
    real = np.ones(rows.tokens.shape[:2], bool)
    if rows.padding is not None:
        real = rows.padding[:, 0, :] == 0
    if (rows.lengths < 2).all():
        raise NotIdentifiable(
            "every example has a single token, so no scores are compared: only the sum of the "
            "values can be known. Sequences of two tokens or more are needed"
        )
    steps = (rows.tokens - rows.tokens[:, :1])[real]
    used = rows.anchors[rows.weights > 0]
    for name, vectors, full in (
        ("differences of tokens", steps, rows.width),
        ("tokens", rows.tokens[real], rows.width),
        ("anchor tokens", used, rows.anchors.shape[2]),
    ):
        sizes = np.linalg.svd(vectors, compute_uv=False)
        rank = count_above_share(sizes, 1e-10)
        if rank < full:
            raise NotIdentifiable(
                f"the {name} span only {rank} of {full} dimensions: what the model does outside "
                "leaves no trace in the labels. Examples with other tokens are needed"
            )


class ExampleArrays(NamedTuple):
    """What `learn` takes: inputs, outputs and the mask of padded inputs, or None."""

    inputs: Array
    outputs: Array
    mask: Array | None


def read_examples(path: str | Path) -> ExampleArrays:
    """The arrays of an .npz file. Nothing in it is executed: pickled objects are refused; and
    nothing is unpacked that would take far more room than the file."""
    path = Path(path)
    try:
        parts, others = _read_archive(path)
    except FileNotFoundError as error:
        raise FileFormatError(f"there is no file {path}") from error
    except FileFormatError:
        raise
    except Exception as error:  # a damaged archive may break its reader anywhere
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


def _read_archive(path: Path) -> tuple[dict[str, Array], list[str]]:
    """The arrays that are known, and the names of the others."""
    with path.open("rb") as file:
        start = file.read(6)
        if start == b"\x93NUMPY":
            raise FileFormatError(
                f"{path} holds a single array; expected an .npz with 'inputs' and 'outputs'"
            )
        if not start.startswith(b"PK"):
            raise ValueError("it is neither a NumPy archive nor a NumPy array")
        unpacked_share = 8  # times the size of the file: numbers hardly shrink
        room = max(SMALL_ARCHIVE, unpacked_share * path.stat().st_size)
        found: dict[str, Array] = {}
        others = []
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                name = member.filename.removesuffix(".npy")
                if name not in ("inputs", "outputs", "mask"):
                    others.append(name)
                    continue
                room -= member.file_size
                if room < 0:
                    raise ValueError("its arrays would take far more room than the file")
                with archive.open(member) as content:
                    found[name] = _read_array(content, member.file_size)
    return found, others


def _read_array(content: Any, size: int) -> Array:
    """One array of `size` bytes, head included; its head may claim no more."""
    reader = np.lib.format
    version = reader.read_magic(content)
    heads = {(1, 0): reader.read_array_header_1_0, (2, 0): reader.read_array_header_2_0}
    if version not in heads:
        raise ValueError(f"version {version} of NumPy's format is not known")
    shape, fortran, dtype = heads[version](content)
    if dtype.hasobject or dtype.kind not in "fiub":
        raise ValueError(f"an array of {dtype} holds no plain numbers")
    entries = math.prod(shape)
    if min(shape, default=1) < 0 or entries * dtype.itemsize > size:
        raise ValueError(f"an array of shape {shape} does not fit into {size} bytes")
    data = np.frombuffer(content.read(entries * dtype.itemsize), dtype)
    return data.reshape(shape, order="F" if fortran else "C").copy()
