"""Parameters as pictures: what is drawn of every part of a model, and the words beside it."""

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.report.blocks import Cells, ParameterBlock, reduced
from keyhole.report.charts import Chart, spectrum_chart

CELLS = 180_000  # of all pictures together: with errors, 2 MB of the file
SIDE = 256  # cells along a side, at most
PARTS_SHOWN = 64  # heads with pictures; the table of errors lists all


@dataclass(frozen=True)
class Picture:
    """One block as the page draws it; `data` goes to the script, the rest into the text."""

    title: str
    summary: str
    data: Mapping[str, Any]
    legend: str  # the largest size, where colour ends
    vector: bool


@dataclass(frozen=True)
class Part:
    """A head, a network, or the rest of a layer."""

    title: str
    tables: tuple[Picture, ...]
    vectors: tuple[Picture, ...]
    scalars: tuple[tuple[str, str], ...]
    chart: Chart | None
    open: bool


def parts(blocks: list[ParameterBlock]) -> list[Part]:
    names = list(dict.fromkeys(block.part for block in blocks))[:PARTS_SHOWN]
    tables = sum(not block.vector for block in blocks if block.part in names)
    side = min(SIDE, int(math.sqrt(CELLS / max(1, tables))))
    least_length = 32  # of a vector, however many there are
    longest = 256  # cells of a vector, at most
    length = min(longest, max(least_length, CELLS // max(1, 4 * len(blocks))))
    open_parts = 4  # heads shown unfolded
    return [
        part([b for b in blocks if b.part == name], side, length, name, place < open_parts)
        for place, name in enumerate(names)
    ]


def part(blocks: list[ParameterBlock], side: int, length: int, name: str, opened: bool) -> Part:
    pictures, scalars, chart = [], [], None
    for block in blocks:
        if block.vector and block.values.norm() == 0.0:
            scalars.append((block.name, "zero"))
            continue
        if block.entries == 1:
            scalars.append((block.name, with_error(block)))
            continue
        pictures.append(picture(block, reduced(block, side, length)))
        if block.name == "score":
            chart = spectrum_chart(block)
    tables = tuple(picture for picture in pictures if not picture.vector)
    vectors = tuple(picture for picture in pictures if picture.vector)
    return Part(name or "Layer", tables, vectors, tuple(scalars), chart, opened)


def with_error(block: ParameterBlock) -> str:
    value = float(block.values.rows(0, 1)[0, 0])
    if block.errors is None:
        return signed_long(value)
    return f"{signed_long(value)} ± {float(block.errors.rows(0, 1)[0, 0]):.1e}"


def picture(block: ParameterBlock, cells: Cells) -> Picture:
    rows, columns = cells.shape
    shape = f"{columns:,} entries" if block.vector else f"{rows:,} × {columns:,}"
    row, column = cells.place
    place = f"entry {column}" if block.vector else f"row {row}, column {column}"
    summary = (
        f"{shape}, from {signed(cells.low)} to {signed(cells.high)}; "
        f"the largest in size at {place}."
    )
    if cells.height > 1 or cells.width > 1:
        group = f"{cells.width}" if block.vector else f"{cells.height} × {cells.width}"
        summary += f" Each cell shows the largest of {group} entries."
    data = {
        "rows": len(cells.values),
        "columns": int(cells.values.shape[1]),
        "height": cells.height,
        "width": cells.width,
        "shape": [rows, columns],
        "scale": cells.largest,
        "vector": block.vector,
        "values": packed(cells.values),
        "errors": None if cells.errors is None else packed(cells.errors),
    }
    title = block.name[:1].upper() + block.name[1:]
    return Picture(title, summary, data, f"{cells.largest:.3g}", block.vector)


def signed(number: float) -> str:
    return f"{number:.4g}".replace("-", "−")


def signed_long(number: float) -> str:
    sign, digits = ("−" if number < 0 else ""), f"{abs(number):.7g}"
    return sign + digits


def packed(numbers: Array) -> str:
    """Seven digits each, which is more than a picture can tell."""
    return base64.b64encode(np.ascontiguousarray(numbers, dtype="<f4").tobytes()).decode()
