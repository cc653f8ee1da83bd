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
from keyhole.extras import need


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
    counted: str = "Queries include those that verified"  # what records of 0.1 do not say


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
        "Queries are those to learn; those that verify come on top",
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
        growth = [Slope(**_listed_as_tuples(slope)) for slope in stored.pop("growth")]
        return Record(**stored, rows=rows, growth=growth)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FileFormatError(f"{path} is no record of a suite: {error}") from None


def _listed_as_tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()
    }


def write_record(record: Record, folder: Path) -> tuple[Path, Path]:
    """SUITE.json, the document SUITE.md made from it, and SUITE.svg where something grows."""
    folder.mkdir(parents=True, exist_ok=True)
    data, page = folder / f"{record.suite}.json", folder / f"{record.suite}.md"
    data.write_text(to_json(record), "utf-8")
    page.write_text(render_markdown(read_record(data)), "utf-8")
    if record.growth:
        draw_growth(record, folder / f"{record.suite}.svg")
    return data, page


def draw_growth(record: Record, path: Path) -> None:
    """Figures against sizes, both logarithmic, with the slopes of theory; needs matplotlib."""
    need("matplotlib", "pictures", "a plot of growth")
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": record.suite, "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.2 * len(record.growth), 3.2), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(1, len(record.growth), squeeze=False)[0]
        for panel, slope in zip(panels, record.growth, strict=True):
            sizes, values = np.array(slope.sizes), np.array(slope.values)
            line = values[-1] * (sizes / sizes[-1]) ** slope.theory
            panel.loglog(sizes, line, color="0.6", label=f"exponent {slope.theory:g}")
            panel.loglog(sizes, values, "o", label=f"measured, {slope.fitted:.2f}")
            panel.set_xticks(sizes, [f"{size:g}" for size in sizes])
            panel.minorticks_off()
            panel.set_title(slope.what, fontsize=8)
            panel.legend(frameon=False, fontsize=8)
        figure.savefig(path, metadata={"Date": None})


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
            "| growth | sizes | figures | exponent | theory | of time | of memory |",
            "|---|---|---|--:|--:|--:|--:|",
        ]
        lines += ["| " + " | ".join(show_slope(slope)) + " |" for slope in record.growth]
        lines += ["", f"![{record.title}: growth]({record.suite}.svg)"]
    machine = record.machine
    lines += [
        "",
        f"Medians over {len(record.seeds)} seeds ({record.seeds[0]} … {record.seeds[-1]}). "
        f"{record.counted}. "
        "Errors are relative: of the worst block of parameters up to the symmetries, and of "
        "answers to fresh random sequences (root mean square; labels: the share that differs). "
        f"Students know the family, all sizes and the scale of each block, get as many answers to "
        f"random queries as Keyhole learns from, and {record.student_seconds:g} s. Times are of "
        "the processor, so that other work on the machine does not count. "
        f"{machine.get('processor')}, {machine.get('cores')} cores, Python "
        f"{machine.get('python')}, numpy {machine.get('numpy')}, commit {record.commit}, "
        f"{record.date}.",
        "",
    ]
    return "\n".join(lines)


def show_slope(slope: Slope) -> list[str]:
    """The cells of a growth, as text."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if value >= 1.0 else f"{value:.1e}"

    def exponent(values: tuple[float, ...]) -> str:
        return f"{slope.fit(values):.2f}" if values else "–"

    return [
        slope.what,
        ", ".join(f"{size:g}" for size in slope.sizes),
        ", ".join(map(number, slope.values)),
        exponent(slope.values),
        f"{slope.theory:g}",
        exponent(slope.seconds),
        exponent(slope.memory),
    ]


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


def render_summary(records: list[Record]) -> str:
    """One line for each suite: its largest case that Keyhole solved every time, and the best other
    method there that was measured on the same boxes."""
    lines = [
        "| suite | case | queries / floor | error of parameters | best alternative, same boxes |",
        "|---|---|--:|--:|---|",
    ]
    for record in records:
        measured = [row for row in record.rows if not row.quoted]
        solved = [row for row in measured if row.floor and row.solved == row.seeds]
        if not solved:
            continue
        ours = solved[-1]
        others = [row for row in measured if row.case == ours.case and row is not ours]
        best = min(others, key=lambda row: row.parameters or math.inf, default=None)
        other = "–"
        if best is not None:
            error = "no model" if best.parameters is None else f"{best.parameters:.0e}"
            other = f"{best.method}: {error}"
        ratio = f"{ours.queries / (ours.floor or 1.0):.2f}"
        error = f"{ours.parameters:.0e}" if ours.parameters is not None else "–"
        lines.append(f"| {record.title} | {ours.case} | {ratio} | {error} | {other} |")
    return "\n".join(lines)
