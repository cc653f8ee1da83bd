"""A watch to look at: the curve of its e-value over the nights, JUnit XML, and one JSON object.

What is shown is read from the watch by its attributes: this file knows no test.
"""

import html
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from markupsafe import Markup

from keyhole import __version__
from keyhole.report.builder import Page, Row, Section, Table, write_page
from keyhole.report.charts import Logarithmic, whole_ticks
from keyhole.results import plain
from keyhole.text import clean


def to_record(watch: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The watch in numbers."""
    last = watch.history[-watch.nights :]
    return {
        "alarm": watch.alarm,
        "since": watch.since,
        "first_alarm": watch.first_alarm,
        "e_value": watch.e_value,
        "alarm_from": 1.0 / watch.alpha,
        "alpha": watch.alpha,
        "nights": watch.nights,
        "asked": watch.asked,
        "bad": watch.bad,
        "sentence": str(watch),
        "verdict": plain(vars(watch.verdict)),
        "history": [plain(vars(night)) for night in last],
        "version": __version__,
        **plain(dict(facts)),
    }


def to_junit(watch: Any, facts: Mapping[str, Any]) -> str:
    """One test case that fails where there is an alarm."""
    suites = ElementTree.Element("testsuites")
    failed = int(watch.alarm)
    suite = ElementTree.SubElement(
        suites, "testsuite", name="keyhole watch", tests="1", failures=str(failed)
    )
    name = clean(str(facts.get("box", "box")))
    case = ElementTree.SubElement(suite, "testcase", classname="keyhole.watch", name=name)
    if failed:
        failure = ElementTree.SubElement(case, "failure", message="the box changed")
        failure.text = clean(str(watch))
    ElementTree.SubElement(case, "system-out").text = json.dumps(to_record(watch, facts))
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def draw_curve(values: list[float], alarm: float) -> str:
    """E against nights on a logarithmic axis, with the line from which on it is an alarm; SVG in
    the colours of the page."""
    axis = Logarithmic.around([*values, alarm])
    wide, high, left = 640, 240, 56
    last = len(values)

    def place(number: int, value: float) -> tuple[float, float]:
        across = 0.5 if last == 1 else number / (last - 1)
        return left + across * (wide - left - 8), 8 + axis.height(value) / 100 * (high - 40)

    points = [place(k, max(value, 1e-17)) for k, value in enumerate(values)]
    line = " ".join(f"{'M' if not k else 'L'}{x:.1f} {y:.1f}" for k, (x, y) in enumerate(points))
    dots = "".join(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5'/>" for x, y in points[-60:])
    level = place(0, alarm)[1]
    ticks = "".join(
        f"<text x='{left - 6}' y='{8 + tick.at / 100 * (high - 40) + 4:.1f}' text-anchor='end'>"
        f"{html.escape(tick.label)}</text>"
        for tick in axis.ticks()
    )
    nights = "".join(
        f"<text x='{left + tick.at / 100 * (wide - left - 8):.1f}' y='{high - 12}' "
        f"text-anchor='middle'>{tick.label}</text>"
        for tick in whole_ticks(last)
    )
    said = f"e-value after each of {last} nights, {values[-1]:.3g} at the end; alarm from {alarm:g}"
    return (
        f"<svg viewBox='0 0 {wide} {high}' role='img' aria-label='{html.escape(said)}' "
        "style='width:100%;max-width:56rem;font:12px sans-serif' fill='currentColor'>"
        f"<path d='{line}' fill='none' stroke='currentColor' stroke-width='1.5'/>{dots}"
        f"<line x1='{left}' x2='{wide - 8}' y1='{level:.1f}' y2='{level:.1f}' stroke='#c0392b' "
        f"stroke-dasharray='6 4'/><text x='{left + 4}' y='{level - 5:.1f}' fill='#c0392b'>alarm "
        f"from {alarm:g} on</text>{ticks}{nights}"
        f"<text x='{(left + wide) / 2:.0f}' y='{high}' text-anchor='middle'>night</text></svg>"
    )


def write_watch_page(watch: Any, facts: Mapping[str, Any], path: str | Path) -> Path:
    """One HTML file with the curve, what it means, and the nights."""
    armed = watch.history[-watch.nights :]
    curve = draw_curve([night.e_value for night in armed], 1.0 / watch.alpha)
    shown = armed[-30:]
    rows = tuple(
        Row(
            (
                night.when,
                f"{night.asked}",
                f"{night.bad}",
                f"{night.worst:.2g}" if math.isfinite(night.worst) else "beyond",
                f"{night.e_value:.3g}",
            )
        )
        for night in shown
    )
    heads = ("night", "asked", "beyond tolerance", "largest deviation / tolerance", "e-value")
    page = Page(
        "The box changed." if watch.alarm else "No alarm.",
        "watch",
        "bad" if watch.alarm else "good",
        "alarm" if watch.alarm else "no alarm",
        (str(watch),),
        (
            ("Nights", f"{watch.nights:,}", "since the test was armed"),
            ("E-value", f"{watch.e_value:.3g}", f"alarm from {1.0 / watch.alpha:g} on"),
            ("Changed since", watch.since or "no alarm", ""),
            ("Tonight", f"{watch.bad} of {watch.asked}", "answers beyond tolerance"),
        ),
        (
            Section("E-value, night after night", markup=Markup(curve)),
            Section(f"The last {len(shown)} nights", table=Table(heads, rows)),
            Section("The comparison", pairs=tuple((str(n), str(f)) for n, f in facts.items())),
        ),
    )
    return write_page(page, path)
