"""A verdict for continuous integration: JUnit XML, SARIF, and Markdown for a pull request."""

import json
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from keyhole import __version__
from keyhole.report.builder import Page, Section
from keyhole.report.rows import answers_apart
from keyhole.results import Verdict, plain
from keyhole.text import clean


def to_record(verdict: Verdict, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict in numbers, with facts about the comparison (box, model, seed, time)."""
    record = plain(vars(verdict))
    return {
        **record,
        "confidence": 0.95,
        "fraction": verdict.fraction,
        "format_changed": verdict.format_changed,
        "version": __version__,
        **plain(dict(facts)),
    }


def to_junit(verdict: Verdict, facts: Mapping[str, Any]) -> str:
    """One test case that fails where the box differs."""
    suites = ElementTree.Element("testsuites")
    failed = 0 if verdict.agrees else 1
    suite = ElementTree.SubElement(
        suites, "testsuite", name="keyhole verify", tests="1", failures=str(failed)
    )
    case = ElementTree.SubElement(
        suite, "testcase", classname="keyhole.verify", name=clean(str(facts.get("box", "box")))
    )
    if failed:
        failure = ElementTree.SubElement(case, "failure", message=f"the box {verdict.word}")
        failure.text = clean(verdict.bound)
    ElementTree.SubElement(case, "system-out").text = json.dumps(to_record(verdict, facts))
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def to_sarif(verdict: Verdict, facts: Mapping[str, Any]) -> str:
    """SARIF 2.1.0: no result where the box agrees, one where it does not."""
    rule = {
        "id": "keyhole/box-differs",
        "shortDescription": {"text": "The box is not the model that was signed off."},
    }
    result = {
        "ruleId": rule["id"],
        "level": "error",
        "message": {"text": clean(f"The box {verdict.word}. {verdict.bound}")},
        "properties": to_record(verdict, facts),
    }
    run = {
        "tool": {"driver": {"name": "keyhole", "version": __version__, "rules": [rule]}},
        "results": [] if verdict.agrees else [result],
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def to_markdown(verdict: Verdict, facts: Mapping[str, Any]) -> str:
    """A summary for a pull request."""
    rows = {
        "fresh queries": f"{verdict.queries:,}",
        "largest difference": f"{verdict.difference:.1e} of its answer's size",
        "tolerance (median)": f"{verdict.tolerance:.1e} of an ordinary answer's size",
        "largest difference / its tolerance": f"{verdict.worst:.2g}",
        "changes that may go unnoticed": "below "
        f"{max(verdict.noticed.values(), default=float('inf')):.1e} of a block",
        "number format": f"{verdict.format or 'unknown'}"
        + (f", was {verdict.format_before}" if verdict.format_changed else ""),
        **{str(name): str(fact) for name, fact in facts.items()},
    }
    table = "".join(f"| {name} | {_cell(value)} |\n" for name, value in rows.items())
    return f"### The box {verdict.word}\n\n{_cell(verdict.bound)}\n\n| | |\n|---|---|\n{table}"


def to_page(verdict: Verdict, facts: Mapping[str, Any]) -> Page:
    """The verdict as a page: what was compared, what would have been noticed, what differs.

    Args:
        verdict: The verdict.
        facts: Of the comparison: box, model, seed, time.

    Returns:
        The page.
    """
    noticed = tuple((name, f"from {size:.1e}") for name, size in verdict.noticed.items())
    said = [Section("The comparison", pairs=tuple((str(n), str(f)) for n, f in facts.items()))]
    if noticed:
        words = "Changes of a block of parameters, relative to the block, from this size on."
        said.insert(0, Section("What would have been noticed", (words,), pairs=noticed))
    if verdict.counterexample is not None:
        found = verdict.counterexample
        box, model = answers_apart(found)
        shown = (("The box answers", box), ("The model says", model))
        why = (f"A query on which the two differ: {found.reason}.",)
        said.insert(0, Section("Counterexample", why, pairs=shown))
    earlier = f"and {verdict.replayed:,} earlier answers" if verdict.replayed else ""
    return Page(
        f"The box {verdict.word}.",
        "verdict",
        "good" if verdict.agrees else "bad",
        "agrees" if verdict.agrees else "differs",
        (verdict.bound,),
        (
            ("Fresh queries", f"{verdict.queries:,}", earlier),
            ("Largest difference", f"{verdict.difference:.1e}", "of the answers' size"),
            ("Tolerance", f"{verdict.tolerance:.1e}", "at the median"),
            ("Number format", verdict.format or "unknown", ""),
        ),
        tuple(said),
    )


def _cell(text: str) -> str:
    """Text that ends no cell, opens no tag and starts no code."""
    safe = clean(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")
    return " ".join(safe.replace("`", "'").split())
