"""The parameters of a model as blocks to look at: reduced to a limited number of cells.

A score kept in factors is multiplied out strip by strip, never as a whole, so that the picture of
a matrix of width 4096 costs no more memory than that of a small one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array

SKIPPED = ("labels",)  # the coding of a label-only box is no parameter
FULL_SPECTRUM = 1024  # smaller side of a dense matrix up to which all singular values are computed
LEADING = 64  # singular values of a larger one, by a randomised method
ATTENTION = ("score", "key_bias")  # of a Transformer, whose layer has one head
UNITS = {
    "blocks": "Block", "attention": "Attention", "heads": "Head", "mlp": "Network",
    "network": "Network", "final_norm": "Final norm",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Matrix:
    """A table of numbers, whole or as left @ right; a vector is a table of one row."""

    left: Array | None
    right: Array

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.right.shape[0] if self.left is None else self.left.shape[0]
        return int(rows), int(self.right.shape[1])

    def rows(self, start: int, stop: int) -> Array:
        part = self.right[start:stop] if self.left is None else self.left[start:stop] @ self.right
        return np.asarray(part, dtype=np.float64)

    def strips(self, height: int = 1) -> Iterator[tuple[int, Array]]:
        """Rows in order, in multiples of `height`."""
        rows, columns = self.shape
        strip_entries = 2**20  # entries of a product held at once: 8 MB
        step = max(1, strip_entries // max(1, columns * height)) * height
        for start in range(0, rows, step):
            yield start, self.rows(start, min(rows, start + step))

    def norm(self) -> float:
        return float(np.sqrt(sum(float(np.sum(part**2)) for _, part in self.strips())))

    def singular_values(self) -> tuple[Array, bool]:
        """In falling order, and whether these are all that are not zero."""
        if self.left is not None:
            first = np.linalg.qr(self.left)[1]
            second = np.linalg.qr(self.right.T)[1]
            return np.linalg.svd(first @ second.T, compute_uv=False), True
        if min(self.shape) <= FULL_SPECTRUM:
            return np.linalg.svd(self.rows(0, self.shape[0]), compute_uv=False), True
        whole = self.right
        # directions beyond those kept: the last one kept is then good to some percent
        oversampling = 16
        basis = leading_range(whole, LEADING + oversampling)
        return np.linalg.svd(basis.T @ whole, compute_uv=False)[:LEADING], False


def leading_range(matrix: Array, size: int) -> Array:
    """Orthonormal columns that span nearly all that the largest singular values act on."""
    rng = np.random.default_rng(0)  # of a picture only: the same file every time
    basis = np.linalg.qr(matrix @ rng.standard_normal((matrix.shape[1], size)))[0]
    for _ in range(2):  # each turn cubes the ratios of the singular values
        basis = np.linalg.qr(matrix @ (matrix.T @ basis))[0]
    return np.asarray(basis)


@dataclass(frozen=True, eq=False)
class ParameterBlock:
    """One named parameter of one part of the model."""

    part: str  # "Head 0", "Network", or "" for the layer as a whole
    name: str
    values: Matrix
    errors: Matrix | None
    vector: bool

    @property
    def entries(self) -> int:
        return self.values.shape[0] * self.values.shape[1]


@dataclass(frozen=True, eq=False)
class Cells:
    """A block reduced to cells; each shows its entry of largest size and that entry's error."""

    values: Array
    errors: Array | None
    height: int  # rows of the block per cell
    width: int
    shape: tuple[int, int]
    largest: float
    place: tuple[int, int]  # of the largest entry
    low: float
    high: float


def blocks_of(model: Any, errors: Any) -> list[ParameterBlock]:
    """Every parameter in the order of the model's parts."""
    known = model.to_arrays()
    doubtful: Mapping[str, Array] = {} if errors is None else errors.to_arrays()
    found = []
    for name in known:
        if name in SKIPPED or name.endswith("score_right"):
            continue
        stem = name.removesuffix("_left") if name.endswith("score_left") else name
        part, label = titled(stem)
        values = table(known, stem)
        if values is None or values.shape[0] * values.shape[1] == 0:
            continue
        uncertain = table(doubtful, stem)
        if uncertain is not None and uncertain.shape != values.shape:
            uncertain = None
        vector = np.ndim(known[name]) < 2
        found.append(ParameterBlock(part, label, values, uncertain, vector))
    if {block.part for block in found} <= {"Head 0", ""}:  # a single one needs no number
        found = [replace(block, part=block.part.removesuffix(" 0")) for block in found]
    return sorted(found, key=lambda block: block.part == "")  # what all share comes last


def titled(name: str) -> tuple[str, str]:
    """blocks.1.attention.heads.0.key_bias -> Block 1, head 0, key bias: the numbers that Python and
    the terminal use."""
    *place, last = name.split(".")
    units: list[str] = []
    for word in place:
        if word.isdigit() and units:
            units[-1] += f" {int(word)}"
        elif units and word == "heads":  # whose attention is meant is clear
            units[-1] = UNITS[word]
        else:
            units.append(UNITS.get(word, word))
    part = ", ".join(units).capitalize() if units else "Attention" if last in ATTENTION else ""
    return part, last.replace("_", " ")


def table(arrays: Mapping[str, Array], stem: str) -> Matrix | None:
    if stem in arrays:
        array = np.asarray(arrays[stem])
        return Matrix(None, array if array.ndim == 2 else array.reshape(1, -1))
    left, right = arrays.get(f"{stem}_left"), arrays.get(f"{stem}_right")
    if left is None or right is None:
        return None
    return Matrix(left, right)


def reduced(block: ParameterBlock, side: int, length: int) -> Cells:
    """At most `side` cells each way for a table, `length` for a vector."""
    rows, columns = block.values.shape
    height = -(-rows // side)
    width = -(-columns // (length if block.vector else side))
    values, errors = [], []
    low, high, largest, place = np.inf, -np.inf, -1.0, (0, 0)
    for start, strip in block.values.strips(height):
        low, high = min(low, float(strip.min())), max(high, float(strip.max()))
        spot = int(np.argmax(np.abs(strip)))
        if abs(strip.flat[spot]) > largest:
            largest = float(abs(strip.flat[spot]))
            place = (start + spot // columns, spot % columns)
        doubt = None if block.errors is None else block.errors.rows(start, start + len(strip))
        kept, kept_doubt = largest_entries(strip, doubt, height, width)
        values.append(kept)
        if kept_doubt is not None:
            errors.append(kept_doubt)
    return Cells(
        np.concatenate(values),
        np.concatenate(errors) if errors else None,
        height,
        width,
        (rows, columns),
        largest,
        place,
        low,
        high,
    )


def largest_entries(
    strip: Array, doubt: Array | None, height: int, width: int
) -> tuple[Array, Array | None]:
    """Of every height x width cell the entry of largest size, and the error of that entry."""
    rows, columns = strip.shape
    up, across = -(-rows // height), -(-columns // width)
    number = np.full((up * height, across * width), -1)
    number[:rows, :columns] = np.arange(strip.size).reshape(strip.shape)
    number = number.reshape(up, height, across, width).transpose(0, 2, 1, 3)
    number = number.reshape(up, across, height * width)
    size = np.where(number < 0, -1.0, np.abs(strip.ravel())[number])
    chosen = np.take_along_axis(number, size.argmax(axis=2)[:, :, None], axis=2)[:, :, 0]
    return strip.ravel()[chosen], None if doubt is None else np.abs(doubt.ravel()[chosen])
