"""What an audit found: one row per protection and number of queries, and a sentence of advice."""

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from keyhole.audit.protections import Protection
from keyhole.audit.sweep import FORMAT, Audit
from keyhole.text import clean

HELPS = 0.1  # a copy that is off by this much of the answers' root mean square is no copy
LEAKS = 1e-2  # and one this close does the model's work


@dataclass(frozen=True)
class Row:
    """Medians over the repetitions; None where no repetition gave a model."""

    bounded: bool
    protection: str
    title: str
    multiple: int
    queries: int
    outcome: str
    parameter_error: float | None
    function_error: float | None
    cost: float


def rows(audit: Audit) -> list[Row]:
    """In the order of the plan: tokens bounded first, then protections, then queries."""
    groups: dict[tuple[bool, str, int], list[Mapping[str, Any]]] = {}
    for cell in audit.cells:
        key = (bool(cell["bounded"]), str(cell["protection"]), int(cell["multiple"]))
        groups.setdefault(key, []).append(cell)
    order = {name: number for number, name in enumerate(audit.plan.protections)}
    found = sorted(groups, key=lambda key: (not key[0], order[key[1]], key[2]))
    return [_row(*key, groups[key]) for key in found]


def _row(bounded: bool, protection: str, multiple: int, cells: list[Mapping[str, Any]]) -> Row:
    return Row(
        bounded,
        protection,
        Protection.parse(protection).title,
        multiple,
        int(median(cell["queries"] for cell in cells)),
        ", ".join(sorted({cell["outcome"] for cell in cells})),
        _middle(cells, "parameter_error"),
        _middle(cells, "function_error"),
        float(median(cell["cost"] for cell in cells)),
    )


def _middle(cells: list[Mapping[str, Any]], name: str) -> float | None:
    numbers = [cell[name] for cell in cells if cell[name] is not None]
    return float(median(numbers)) if numbers else None


def advice(table: list[Row], max_norm: float) -> str:
    """Which protection would actually help, and what it costs."""
    last = _strongest(row for row in table if row.bounded)
    known = [row for row in last if row.function_error is not None]
    useful = [row for row in known if (row.function_error or 0.0) >= HELPS]
    parts = [_best(known, useful, max_norm)] if known else []
    if len(known) < len(last):
        names = ", ".join(row.title for row in last if row.function_error is None)
        parts.append(
            f"This attack did not finish, which proves nothing, against: {names}. More queries "
            "(--multiples) may end it."
        )
    loose = _strongest(row for row in table if not row.bounded)
    parts += _without_limit(
        [row for row in loose if row.function_error is not None and row.function_error < LEAKS],
        useful,
    )
    stolen = [row.queries for row in table if row.function_error is not None]
    if stolen:
        parts.append(
            f"{min(stolen):,} queries were the fewest that gave a copy; only fewer than there "
            "are unknowns leave the parameters open in every case."
        )
    return " ".join(parts)


def _best(known: list[Row], useful: list[Row], max_norm: float) -> str:
    """The cheapest protection that helps, or the one that comes closest to it."""
    if useful:
        best = min(useful, key=lambda row: row.cost)
        return (
            f"With tokens limited to norm {max_norm:.3g}, {best.title} helps: after "
            f"{best.queries:,} queries a copy is still off by {best.function_error:.0%} of the "
            f"answers, and honest answers change by {_share(best.cost)}."
        )
    best = max(known, key=lambda row: row.function_error or 0.0)
    return (
        f"None of these protections keeps the model: even behind {best.title}, which changes "
        f"honest answers by {_share(best.cost)}, {best.queries:,} queries give a copy whose "
        f"answers are within {_share(best.function_error or 0.0)} (tokens limited to norm "
        f"{max_norm:.3g})."
    )


def _without_limit(leaking: list[Row], useful: list[Row]) -> list[str]:
    """What the protections would be worth if tokens could be of any size."""
    names = {row.protection for row in leaking}
    undone = ", ".join(row.title for row in useful if row.protection in names)
    if undone:
        return [
            f"Without the limit on tokens {undone} would not help: longer tokens drown the "
            "disturbance."
        ]
    if leaking and not useful:
        worst = max(leaking, key=lambda row: row.cost)
        return [
            f"Without the limit on tokens even {worst.title} leaves a copy within "
            f"{_share(worst.function_error or 0.0)}."
        ]
    return []


def _strongest(table: Any) -> list[Row]:
    """For each protection, the row with most queries."""
    last: dict[str, Row] = {}
    for row in table:
        if row.protection not in last or row.multiple > last[row.protection].multiple:
            last[row.protection] = row
    return list(last.values())


def _share(number: float) -> str:
    least_percent = 1e-3  # shares below are told as a power of ten
    return f"{number:.2%}" if number >= least_percent else f"a fraction {number:.0e}"


def to_json(audit: Audit) -> dict[str, Any]:
    """Everything, in plain types."""
    table = rows(audit)
    return {
        "format": FORMAT,
        "model": dict(audit.model),
        "plan": audit.plan.to_json(),
        "max_norm": audit.max_norm,
        "rows": [asdict(row) for row in table],
        "cells": [dict(cell) for cell in audit.cells],
        "notes": list(audit.notes),
        "advice": advice(table, audit.max_norm),
    }


def show_rows(audit: Audit) -> str:
    """The audit as a table of HTML, for notebooks and pages."""
    names = ("tokens", "answers as", "queries", "outcome", "parameters", "answers", "honest change")
    lines = [f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"]
    found = rows(audit)
    for row in found:
        errors = (row.parameter_error, row.function_error)
        cells = (
            f"norm ≤ {audit.max_norm:.3g}" if row.bounded else "any size",
            row.title,
            f"{row.queries:,}",
            row.outcome.lower().replace("_", " "),
            *("–" if error is None else f"{error:.1e}" for error in errors),
            f"{row.cost:.1e}",
        )
        lines.append(f"<tr>{''.join(f'<td>{html.escape(clean(c))}</td>' for c in cells)}</tr>")
    text = " ".join((*[advice(found, audit.max_norm)], *audit.notes))
    return f"<div><table>{''.join(lines)}</table><p>{html.escape(clean(text))}</p></div>"
