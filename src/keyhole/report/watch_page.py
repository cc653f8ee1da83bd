"""A watch to look at: the curve of its e-value over the nights, JUnit XML, and one JSON object.

What is shown is read from the watch by its attributes: this file knows no test.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from keyhole import __version__
from keyhole.report.builder import Page, Row, Section, Table, write_page
from keyhole.report.charts import Chart, Level, Logarithmic, Series, dots, whole_ticks
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


def draw_curve(values: Sequence[float], alarm: float) -> Chart:
    """E against nights on a logarithmic axis, with the line from which on it is an alarm."""
    axis, last = Logarithmic.around([*values, alarm]), len(values)
    points = [
        (50.0 if last == 1 else 100.0 * k / (last - 1), axis.height(value))
        for k, value in enumerate(values)
    ]
    return Chart(
        "Evidence that the box changed",
        f"The e-value after each night, {values[-1]:.3g} after the last; alarm from {alarm:g} on.",
        "night",
        "e-value",
        whole_ticks(last),
        axis.ticks(),
        (Series("e-value", dots(points), "main"),),
        (Level(axis.height(alarm), f"alarm from {alarm:g} on"),),
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
            Section("Night after night", charts=(curve,)),
            Section("The last nights" if len(shown) > 1 else "Tonight", table=Table(heads, rows)),
            Section("The comparison", pairs=tuple((str(n), str(f)) for n, f in facts.items())),
        ),
    )
    return write_page(page, path)
