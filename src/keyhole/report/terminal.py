"""A recovery in the terminal: verdict, numbers, and a picture of the score matrix."""

from typing import Any

import numpy as np
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from keyhole.arrays import Array
from keyhole.models.template import TemplateModel
from keyhole.oracles.wrappers.drift import REASON as CHANGED
from keyhole.report.blocks import blocks_of
from keyhole.report.rows import answers_apart, relative_error, sequence_size
from keyhole.results import Outcome, Recovery, Verdict

PICTURE = 28  # cells along each side of the picture, at most
SIGNS = "Oo.+#"  # from most negative to most positive, where there is no colour


def show(recovery: Recovery, colour: bool = True) -> RenderableType:
    """Summary and picture side by side, the reason and the counterexample below."""
    parts: list[RenderableType] = [summary(recovery)]
    model = recovery.model
    if model is not None and hasattr(model, "heads"):
        for i, head in enumerate(model.heads[:2]):
            if head.width > 2048:  # multiplying factors out would cost more than the picture
                continue
            title = "score" if len(model.heads) == 1 else f"score of head {i}"
            parts.append(Panel(picture(head.score, colour), title=title, expand=False))
    below: list[RenderableType] = [Columns(parts, padding=(0, 2))]
    if recovery.verdict is not None and recovery.verdict.counterexample is not None:
        below.append(counterexample(recovery.verdict.counterexample))
    below.extend(Text(f"• {note}", style="dim") for note in recovery.notes)
    return Group(*below)


def state_tolerance_briefly(verdict: Verdict) -> str:
    """How far apart answers were allowed to be, beside what the box itself is exact to."""
    return f"{verdict.tolerance:.1e} of the answers' size, the box's own {verdict.precision:.1e}"


def summary(recovery: Recovery) -> Panel:
    good = recovery.outcome is Outcome.RECOVERED
    table = Table.grid(padding=(0, 2))
    for name, value in facts(recovery):
        table.add_row(Text(name, style="dim"), Text(value))
    advice = Text(conclude(recovery), style="italic")
    return Panel(
        Group(table, Text(), advice),
        title=f"[bold]{recovery.outcome.name}[/]",
        border_style="green" if good else "red",
        width=62,
    )


def conclude(recovery: Recovery) -> str:
    """Why the run ended so, or the verdict's own sentence: the same as in files and reports."""
    if recovery.reason:
        return recovery.reason
    agrees = recovery.verdict is not None and recovery.verdict.agrees
    return recovery.verdict.bound if agrees and recovery.verdict else recovery.outcome.value


def facts(recovery: Recovery) -> list[tuple[str, str]]:
    """The numbers a reader wants first."""
    ledger, rows = recovery.ledger, []
    if recovery.model is not None:
        rows.append(("model", str(recovery.model)))
    rows.append(("queries", f"{ledger.paid:,}: {ledger}"))
    if ledger.replayed:
        rows.append(("from the journal", f"{ledger.replayed:,}"))
    if ledger.repeated:
        rows.append(("sent again", f"{ledger.repeated:,} after failures"))
    if ledger.prompt_tokens:
        requests = f" in {ledger.requests:,} requests" if ledger.requests else ""
        rows.append(("prompt tokens", f"{ledger.prompt_tokens:,}{requests}"))
    rows.append(("by purpose", ", ".join(f"{k} {v:,}" for k, v in ledger.by_purpose.items())))
    if recovery.errors is not None and recovery.model is not None:
        rows.extend(_error_rows(recovery.model, recovery.errors))
    if "precision" in recovery.details:
        rows.append(("box computes in", str(recovery.details["precision"])))
    if recovery.verdict is not None:
        verdict = recovery.verdict
        asked = f"{verdict.word}: {verdict.queries} fresh queries, {verdict.replayed:,} old answers"
        rows.append(("verdict", asked if verdict.queries else "refused while learning"))
        if verdict.agrees:
            rows.append(("tolerance", state_tolerance_briefly(verdict)))
        if verdict.noticed:
            name, change = max(verdict.noticed.items(), key=lambda item: item[1])
            rows.append(("unseen, perhaps", f"changes of {name} below {change:.1e}"))
    return rows


def _error_rows(model: Any, errors: Any) -> list[tuple[str, str]]:
    """Relative standard errors of the parameter blocks, the largest of several heads; of a template
    that of its worst tensor, which may be one of many."""
    largest: dict[str, float] = {}
    for block in blocks_of(model, errors):
        relative = relative_error(block)
        if relative is not None:
            largest[block.name] = max(relative, largest.get(block.name, 0.0))
    if isinstance(model, TemplateModel):
        worst = max(largest.values(), default=None)
        return [] if worst is None else [("worst error", f"{worst:.1e} (of a tensor, relative)")]
    return [(f"error of {name}", f"{error:.1e} (relative)") for name, error in largest.items()]


def counterexample(example: Any) -> Panel:
    tokens = np.asarray(example.input)
    box, other = ("now   ", "before") if example.reason == CHANGED else ("box   ", "model ")
    theirs, ours = answers_apart(example)
    text = f"{sequence_size(tokens)} ({example.reason})\n{box} {theirs}\n{other} {ours}"
    return Panel(Text(text), title="counterexample", border_style="red", expand=False)


def picture(matrix: Array, colour: bool = True) -> Text:
    """The matrix as coloured half blocks, two rows of cells per line; as signs without colour."""
    cells = reduced(matrix)
    size = float(np.max(np.abs(cells), initial=0.0)) or 1.0
    levels = np.clip(cells / size, -1, 1)
    text = Text()
    if not colour:
        for row in levels:
            text.append("".join(SIGNS[round((level + 1) * (len(SIGNS) - 1) / 2)] for level in row))
            text.append("\n")
        text.append(f"{SIGNS[0]} is -{size:.3g}, {SIGNS[-1]} is +{size:.3g}")
        return text
    if len(levels) % 2:
        levels = np.vstack([levels, np.zeros((1, levels.shape[1]))])
    for upper, lower in zip(levels[::2], levels[1::2], strict=True):
        for top, bottom in zip(upper, lower, strict=True):
            text.append("▀", style=f"{_colour(top)} on {_colour(bottom)}")
        text.append("\n")
    text.append(f"blue −{size:.3g}   red +{size:.3g}", style="dim")
    return text


def reduced(matrix: Array) -> Array:
    """Down to PICTURE cells a side; each cell shows its entry of largest size."""
    rows = np.array_split(np.arange(matrix.shape[0]), min(PICTURE, matrix.shape[0]))
    columns = np.array_split(np.arange(matrix.shape[1]), min(PICTURE, matrix.shape[1]))
    cells = np.empty((len(rows), len(columns)))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            block = matrix[np.ix_(row, column)]
            cells[i, j] = block.flat[np.argmax(np.abs(block))]
    return cells


def _colour(level: float) -> str:
    negative, positive = np.array([59, 111, 212]), np.array([212, 87, 42])
    goal = positive if level > 0 else negative
    paper = np.array([24, 24, 28])  # zero
    red, green, blue = (paper + (goal - paper) * abs(level) ** 0.7).astype(int)
    return f"#{red:02x}{green:02x}{blue:02x}"
