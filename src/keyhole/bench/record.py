"""Results of a suite as JSON, and the table that a document shows of it.

The document is made from the JSON and from nothing else, so that the two can be compared.
"""

import json
import math
import os
import platform
import subprocess
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from keyhole import __version__
from keyhole.bench.measure import Row, Slope
from keyhole.errors import FileFormatError


@dataclass(frozen=True)
class Record:
    """A suite as it was run: what, where, when, and every figure."""

    suite: str
    title: str
    rows: list[Row]
    growth: list[Slope] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    student_seconds: float = 0.0
    commit: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""


def describe_machine() -> dict[str, Any]:
    return {
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "keyhole": __version__,
    }


def describe_commit(folder: Path | None = None) -> str:
    """The commit of the working copy, empty outside one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=folder, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout.strip()


def make_record(
    suite: str,
    title: str,
    rows: list[Row],
    growth: list[Slope],
    seeds: list[int],
    student_seconds: float,
) -> Record:
    return Record(
        suite, title, rows, growth, seeds, student_seconds,
        describe_commit(Path(__file__).parent), describe_machine(),
        datetime.now(UTC).date().isoformat(),
    )  # fmt: skip


def to_json(record: Record) -> str:
    """Infinite and missing figures are null: JSON has neither."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(asdict(record)), indent=1, ensure_ascii=False) + "\n"


def read_record(path: Path) -> Record:
    try:
        stored = json.loads(path.read_text("utf-8"))
        rows = [Row(**row) for row in stored.pop("rows")]
        growth = [
            Slope(**{**slope, "sizes": tuple(slope["sizes"]), "queries": tuple(slope["queries"])})
            for slope in stored.pop("growth")
        ]
        return Record(**stored, rows=rows, growth=growth)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileFormatError(f"{path} is no record of a suite: {error}") from None


def write_record(record: Record, folder: Path) -> tuple[Path, Path]:
    """SUITE.json and the document SUITE.md made from it."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{record.suite}.json", folder / f"{record.suite}.md"
    data.write_text(to_json(record), "utf-8")
    page.write_text(render_markdown(read_record(data)), "utf-8")
    return data, page


def render_markdown(record: Record) -> str:
    """The document of a suite."""
    lines = [
        f"# {record.title}",
        "",
        f"Written by `keyhole bench {record.suite} --out docs/results`; the figures are those of "
        f"[{record.suite}.json]({record.suite}.json).",
        "",
        "| case | method | queries | / floor | error of parameters | error of answers "
        "| time | outside the box | peak memory | solved | ended |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|---|",
    ]
    lines += ["| " + " | ".join(show_row(row)) + " |" for row in record.rows]
    if record.growth:
        lines += [
            "",
            "| growth | sizes | queries | exponent | theory |",
            "|---|---|---|--:|--:|",
        ]
        for slope in record.growth:
            sizes = ", ".join(f"{size:g}" for size in slope.sizes)
            queries = ", ".join(f"{count:,.0f}" for count in slope.queries)
            lines.append(
                f"| {slope.what} | {sizes} | {queries} | {slope.fitted:.2f} | {slope.theory:g} |"
            )
    machine = record.machine
    lines += [
        "",
        f"Medians over {len(record.seeds)} seeds ({record.seeds[0]} … {record.seeds[-1]}). "
        "Errors are relative: of the worst block of parameters up to the symmetries, and of "
        "answers to fresh random sequences (root mean square; labels: the share that differs). "
        f"Students know the family, all sizes and the scale of each block, get as many answers to "
        f"random queries as Keyhole paid for, and {record.student_seconds:g} s. "
        f"{machine.get('processor')}, {machine.get('cores')} cores, Python "
        f"{machine.get('python')}, numpy {machine.get('numpy')}, commit {record.commit}, "
        f"{record.date}.",
        "",
    ]
    return "\n".join(lines)


def show_row(row: Row) -> list[str]:
    """The cells of a row, as text."""

    def error(value: float | None) -> str:
        return "–" if value is None else f"{value:.0e}"

    def seconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.2g} s"

    method = f"{row.method} (quoted: {row.quoted})" if row.quoted else row.method
    ratio = "–" if not row.floor else f"{row.queries / row.floor:.2f}"
    return [
        row.case,
        method,
        f"{row.queries:,.0f}",
        ratio,
        error(row.parameters),
        error(row.answers),
        seconds(row.seconds),
        seconds(row.outside),
        "–" if row.memory is None else f"{row.memory:.1f} MiB",
        "–" if row.solved is None else f"{row.solved} of {row.seeds}",
        row.ended.replace("_", " ").lower() if row.ended.isupper() else row.ended,
    ]
