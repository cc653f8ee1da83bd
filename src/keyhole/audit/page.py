"""An audit as one HTML file: the model, what was decided, error against queries, every row."""

import math
from collections.abc import Sequence
from pathlib import Path

from keyhole.audit.picture import DOMAINS
from keyhole.audit.summary import HELPS, LEAKS, Row, advice, rows
from keyhole.audit.sweep import Audit
from keyhole.report import builder
from keyhole.report.builder import Page, Section, Table, Tone
from keyhole.report.charts import Chart, Level, Logarithmic, Series, Tick, dots

SMALLEST = 1e-16  # errors below are drawn here: they are rounding


def write_audit(audit: Audit, path: str | Path) -> Path:
    """Writes the page of an audit; the file appears whole or not at all."""
    return builder.write_page(build_page(audit), path)


def build_page(audit: Audit) -> Page:
    """What the page says.

    Args:
        audit: The finished audit.

    Returns:
        The page: exposed if some protection leaves a copy that does the model's work.
    """
    table = rows(audit)
    most = [row for row in table if row.bounded and row.function_error is not None]
    errors = [row.function_error for row in most if row.function_error is not None]
    best = min(errors, default=None)
    tone, badge, headline = judge(best)
    size, answers = audit.model["heads"], audit.model["outputs"]
    model = (
        f"{size} {'head' if size == 1 else 'heads'} of width {audit.model['width']}, "
        f"answering with {'one number' if answers is None else f'{answers} numbers'} "
        f"(digest {audit.model['digest']})"
    )
    return Page(
        headline,
        "audit",
        tone,
        badge,
        (advice(table, audit.max_norm), *audit.notes),
        tuple(list_facts(audit, table, best)),
        (
            Section("The model", texts=(f"{model}.",)),
            Section("Error against queries", charts=tuple(draw_charts(audit, table))),
            Section("Every attack", table=build_table(audit, table)),
        ),
    )


def judge(best: float | None) -> tuple[Tone, str, str]:
    """Tone, badge and headline, by how far the best copy behind a limit on tokens is off."""
    if best is None:
        return "fair", "no copy yet", "No attack ended with a copy of this model."
    if best < LEAKS:
        return "bad", "exposed", "Queries give a copy that does this model's work."
    if best < HELPS:
        return "fair", "partly exposed", "Queries give a rough copy of this model."
    return "good", "kept", "No attack gave a copy that is of use."


def list_facts(
    audit: Audit, table: Sequence[Row], best: float | None
) -> list[tuple[str, str, str]]:
    stolen = [row.queries for row in table if row.function_error is not None]
    facts = [("Attacks", f"{len(audit.cells):,}", f"{len(audit.plan.protections)} protections")]
    if stolen:
        facts.append(("Fewest queries", f"{min(stolen):,}", "that gave a copy"))
    if best is not None:
        facts.append(("Best copy", f"{best:.1e}", "of the answers' root mean square"))
    facts.append(("Tokens", f"norm ≤ {audit.max_norm:.3g}", "and of any size, where shown"))
    return facts


def draw_charts(audit: Audit, table: Sequence[Row]) -> list[Chart]:
    """For each domain the error of the copy's answers against queries, one series a protection."""
    charts = []
    for bounded, words in DOMAINS:
        here = [row for row in table if row.bounded == bounded and row.function_error is not None]
        if here:
            charts.append(draw_chart(here, words.format(norm=audit.max_norm)))
    return charts


def draw_chart(here: Sequence[Row], domain: str) -> Chart:
    """Protections alternate between the two colours that the page has; the table tells them."""
    errors = [max(row.function_error or 0.0, SMALLEST) for row in here]
    heights = Logarithmic.around([*errors, HELPS, LEAKS])
    asked = sorted({row.queries for row in here})
    low, high = math.log(asked[0]), math.log(asked[-1])

    def place(queries: int) -> float:
        return 50.0 if high == low else 100.0 * (math.log(queries) - low) / (high - low)

    series = []
    for number, title in enumerate(dict.fromkeys(row.title for row in here)):
        points = [
            (place(row.queries), heights.height(max(row.function_error or 0.0, SMALLEST)))
            for row in here
            if row.title == title
        ]
        series.append(Series(title, dots(points), ("main", "fresh")[number % 2]))
    last = [row for row in here if row.queries == asked[-1]] or list(here)
    off = min(row.function_error or 0.0 for row in last)
    ticks = asked[:1]
    for queries in asked:
        if place(queries) - place(ticks[-1]) > 8:  # percent: labels that do not touch
            ticks.append(queries)
    return Chart(
        f"Error of the copy's answers, {domain}",
        f"After {asked[-1]:,} queries the nearest copy is off by {off:.1e} of the answers' root "
        "mean square.",
        "queries",
        "error of the answers",
        tuple(Tick(place(queries), f"{queries:,}") for queries in ticks),
        heights.ticks(),
        tuple(series),
        (
            Level(heights.height(HELPS), "no copy above"),
            Level(heights.height(LEAKS), "does the model's work below"),
        ),
    )


def build_table(audit: Audit, table: Sequence[Row]) -> Table:
    """One row for each protection and number of queries."""
    heads = (
        *("answers as", "result", "tokens", "queries"),
        *("error of parameters", "error of answers", "change of honest answers"),
    )
    found = []
    for row in table:
        errors = (row.parameter_error, row.function_error)
        cells = (
            row.title,
            row.outcome.lower().replace("_", " "),
            f"norm ≤ {audit.max_norm:.3g}" if row.bounded else "any size",
            f"{row.queries:,}",
            *("–" if error is None else f"{error:.1e}" for error in errors),
            f"{row.cost:.1e}" if row.cost else "none",
        )
        found.append(builder.Row(cells, judge(row.function_error)[0]))
    return Table(heads, tuple(found))
