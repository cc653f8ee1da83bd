"""A diagnosis as one HTML file, to attach to an issue of the server's project."""

import html
from pathlib import Path
from typing import Any

from keyhole.diagnosis.result import Diagnosis
from keyhole.report.simple_page import write_simple_page
from keyhole.text import clean


def write_page(diagnosis: Diagnosis, reference: str, suspect: str, path: str | Path) -> Path:
    """Writes the page of a diagnosis.

    Args:
        diagnosis: what was found.
        reference: how the reference is called on the page.
        suspect: how the suspect is called on the page; users and queries of addresses are left out.
        path: the file, which appears whole or not at all.
    """
    title = "The suspect is healthy" if diagnosis.same else "The suspect differs"
    return write_simple_page(title, body(diagnosis, reference, suspect), path)


def body(diagnosis: Diagnosis, reference: str, suspect: str) -> str:
    """The page without its frame; everything that others named is escaped."""
    facts = {
        "reference": reference,
        "suspect": suspect.partition("?")[0],
        "rows asked": str(diagnosis.queries),
        "number format": diagnosis.format,
        "tolerance": f"{diagnosis.tolerance:.1e}",
        "largest difference": f"{diagnosis.difference:.1e}",
        "left over": f"{diagnosis.left_over:.1e}",
    }
    rows: list[tuple[str, ...]]
    parts = [f"<p>{_text(str(diagnosis))}</p>", _table((), facts.items())]
    if diagnosis.causes:
        rows = [
            (c.name, c.module, f"{c.size:.1e}", f"{c.certainty:.1f} decades", c.explains, c.advice)
            for c in diagnosis.causes
        ]
        heads = ("cause", "where", "changes answers by", "how sure", "explains", "what to do")
        parts += ["<h2>Causes</h2>", _table(heads, rows)]
    if diagnosis.evidence:
        parts.append("<h2>Evidence</h2>")
        for item in diagnosis.evidence:
            parts.append(f"<h3>{_text(item.purpose)}</h3>")
            rows = [(f"row {k}", _numbers(row)) for k, row in enumerate(item.rows)]
            rows += [
                (f"reference, row {item.row}", _numbers(item.reference)),
                (f"suspect, row {item.row}", _numbers(item.suspect)),
                ("they differ by", f"{item.residual:.1e}"),
                ("with the causes named", f"{item.explained:.1e}"),
            ]
            parts.append(_table((), rows))
    if diagnosis.ranking:
        rows = [(str(row), f"{row.left_over:.1e}") for row in diagnosis.ranking]
        parts += ["<h2>Hypotheses</h2>", _table(("hypothesis", "left over"), rows)]
    parts += [f"<p>{_text(note)}</p>" for note in diagnosis.notes]
    return "".join(parts)


def _numbers(values: Any, shown: int = 24) -> str:
    """The first numbers of an array."""
    flat = values.ravel().tolist()
    words = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in flat[:shown]]
    return ", ".join(words) + (f" … ({len(flat)} numbers)" if len(flat) > shown else "")


def _table(heads: Any, rows: Any) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    lines = "".join(
        "<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    start = f"<thead><tr>{head}</tr></thead>" if head else ""
    return f"<div><table>{start}<tbody>{lines}</tbody></table></div>"


def _text(words: str) -> str:
    return html.escape(clean(words))
