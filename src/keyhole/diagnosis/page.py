"""A diagnosis as one HTML file, to attach to an issue of the server's project."""

from pathlib import Path
from typing import Any

from keyhole.diagnosis.result import Diagnosis, ProbeEvidence
from keyhole.report import builder
from keyhole.report.builder import Page, Row, Section, Table


def write_page(diagnosis: Diagnosis, reference: str, suspect: str, path: str | Path) -> Path:
    """Writes the page of a diagnosis.

    Args:
        diagnosis: what was found.
        reference: how the reference is called on the page.
        suspect: how the suspect is called on the page; users and queries of addresses are left out.
        path: the file, which appears whole or not at all.

    Returns:
        The path.
    """
    return builder.write_page(build_page(diagnosis, reference, suspect), path)


def build_page(diagnosis: Diagnosis, reference: str, suspect: str) -> Page:
    """What the page says: the causes, the queries that decide, the hypotheses that were refuted."""
    named = ", and ".join(cause.name for cause in diagnosis.causes)
    differs = f"The suspect differs: {named}." if named else "The suspect differs."
    largest = f"tolerance {diagnosis.tolerance:.1e}"
    facts = [
        ("Rows asked", f"{diagnosis.queries:,}", ""),
        ("Largest difference", f"{diagnosis.difference:.1e}", largest),
        ("Number format", diagnosis.format, ""),
    ]
    if diagnosis.causes:
        facts.insert(2, ("Left over", f"{diagnosis.left_over:.1e}", "under the causes named"))
    sections = [
        list_causes(diagnosis),
        *(show_evidence(item) for item in diagnosis.evidence),
        list_hypotheses(diagnosis),
        Section("Notes", items=diagnosis.notes) if diagnosis.notes else None,
        Section(
            "The comparison",
            pairs=(("reference", reference), ("suspect", suspect.partition("?")[0])),
        ),
    ]
    return Page(
        "The suspect is healthy." if diagnosis.same else differs,
        "diagnosis",
        "good" if diagnosis.same else "bad",
        "healthy" if diagnosis.same else "different",
        (str(diagnosis),),
        tuple(facts),
        tuple(section for section in sections if section is not None),
    )


def list_causes(diagnosis: Diagnosis) -> Section | None:
    heads = ("cause", "where", "changes answers by", "how sure", "explains", "what to do")
    rows = tuple(
        Row((c.name, c.module, f"{c.size:.1e}", f"{c.certainty:.1f} decades", c.explains, c.advice))
        for c in diagnosis.causes
    )
    return Section("Causes", table=Table(heads, rows)) if rows else None


def show_evidence(item: ProbeEvidence) -> Section:
    """A query that decides, with both answers."""
    rows = [(f"row {k}", _numbers(row)) for k, row in enumerate(item.rows)]
    rows += [
        (f"reference, row {item.row}", _numbers(item.reference)),
        (f"suspect, row {item.row}", _numbers(item.suspect)),
        ("they differ by", f"{item.residual:.1e}"),
        ("with the causes named", f"{item.explained:.1e}"),
    ]
    return Section(f"Evidence: {item.purpose}", table=Table((), tuple(Row(row) for row in rows)))


def list_hypotheses(diagnosis: Diagnosis) -> Section | None:
    rows = tuple(Row((str(row), f"{row.left_over:.1e}")) for row in diagnosis.ranking)
    return Section("Hypotheses", table=Table(("hypothesis", "left over"), rows)) if rows else None


def _numbers(values: Any, shown: int = 24) -> str:
    """The first numbers of an array."""
    flat = values.ravel().tolist()
    words = [f"{v:.6g}" if isinstance(v, float) else str(v) for v in flat[:shown]]
    return ", ".join(words) + (f" … ({len(flat)} numbers)" if len(flat) > shown else "")
