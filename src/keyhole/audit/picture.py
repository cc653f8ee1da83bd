"""An audit as a table for the terminal and as a plot in a file."""

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from keyhole.audit.summary import HELPS, LEAKS, Row, advice, rows
from keyhole.audit.sweep import Audit
from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.models.files import replacing

SUFFIXES = (".png", ".svg", ".pdf")
DOMAINS = ((True, "tokens of norm at most {norm:.3g}"), (False, "tokens of any size"))


def show(audit: Audit) -> RenderableType:
    """One table per domain: parameter error and function error, by number of queries."""
    table = rows(audit)
    parts: list[RenderableType] = []
    for bounded, title in DOMAINS:
        here = [row for row in table if row.bounded == bounded]
        if here:
            parts.append(_table(here, title.format(norm=audit.max_norm)))
    parts.append(
        Text(
            "Errors of the stolen copy: parameters (relative) | answers (of their root mean "
            "square). Queries in units of the unknowns.",
            style="dim",
        )
    )
    parts.extend(Text(note, style="dim") for note in audit.notes)
    parts.append(Text(advice(table, audit.max_norm), style="bold"))
    return Group(*parts)


def _table(here: list[Row], title: str) -> Table:
    multiples = sorted({row.multiple for row in here})
    shown = Table(title=title, title_justify="left", header_style="bold")
    shown.add_column("answers as", no_wrap=True)
    shown.add_column("honest change", justify="right")
    for multiple in multiples:
        shown.add_column(f"{multiple} ×", justify="right", no_wrap=True)
    for name in dict.fromkeys(row.protection for row in here):
        mine = {row.multiple: row for row in here if row.protection == name}
        first = next(iter(mine.values()))
        entries = [_entry(mine.get(multiple)) for multiple in multiples]
        shown.add_row(first.title, f"{first.cost:.1e}" if first.cost else "none", *entries)
    return shown


def _entry(row: Row | None) -> Text:
    if row is None:
        return Text("")
    if row.parameter_error is None or row.function_error is None:
        return Text(row.outcome.lower().replace("_", " "), style="yellow")
    off = row.function_error
    style = "red" if off < LEAKS else "yellow" if off < HELPS else "green"
    return Text(f"{row.parameter_error:.1e} | {row.function_error:.1e}", style=style)


def checked_plot(path: str | Path) -> Path:
    """The path of a plot, if it can be one: asked before the work, not after it."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidArgument(f"a plot ends in {', '.join(SUFFIXES)}, got {path.name}")
    need("matplotlib", "pictures", "a plot")
    return path


def draw(audit: Audit, path: str | Path) -> Path:
    """Writes the plot: error against queries, one colour per protection."""
    path = checked_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    table = rows(audit)
    domains = [d for d in DOMAINS if any(row.bounded == d[0] for row in table)]
    figure = Figure(figsize=(5.2 * len(domains) + 1.8, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(domains), sharey=True, squeeze=False)[0]
    for axis, (bounded, title) in zip(axes, domains, strict=True):
        _panel(axis, [row for row in table if row.bounded == bounded])
        axis.set_title(title.format(norm=audit.max_norm), fontsize=10)
    axes[0].set_ylabel("relative error of the copy")
    axes[-1].plot([], [], color="grey", label="parameters")
    axes[-1].plot([], [], color="grey", linestyle=":", label="answers")
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:].lower(), dpi=150)
    return path


def _panel(axis: Any, here: list[Row]) -> None:
    smallest = 1e-16  # errors below are drawn here: they are rounding
    for number, name in enumerate(dict.fromkeys(row.protection for row in here)):
        mine = [row for row in here if row.protection == name]
        done = [r for r in mine if r.parameter_error is not None and r.function_error is not None]
        colour, queries = f"C{number % 10}", [row.queries for row in done]
        marker = "os"[number // 10 % 2]
        parameters = [max(row.parameter_error or 0.0, smallest) for row in done]
        answers = [max(row.function_error or 0.0, smallest) for row in done]
        axis.plot(queries, parameters, marker=marker, color=colour, label=mine[0].title, ms=4)
        axis.plot(queries, answers, marker=marker, color=colour, linestyle=":", ms=3, alpha=0.6)
    axis.axhline(1.0, color="grey", linewidth=0.5)
    axis.set_xscale("log")
    axis.set_yscale("log")
    ticks = {row.multiple: row.queries for row in sorted(here, key=lambda row: row.queries)}
    axis.set_xticks(list(ticks.values()), [f"{number:,}" for number in ticks.values()])
    axis.minorticks_off()
    axis.set_xlabel("queries")
    axis.grid(alpha=0.3)
