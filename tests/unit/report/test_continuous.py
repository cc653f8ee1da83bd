import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

from keyhole.errors import Counterexample
from keyhole.report.builder import write_page
from keyhole.report.continuous import to_junit, to_markdown, to_page, to_record, to_sarif
from keyhole.results import Verdict

AGREED = Verdict(True, 60, 0, 0.5, 1e-9, "All agree.", format="float64", difference=1e-10)
EXAMPLE = Counterexample(np.ones((2, 3)), np.float64(1.5), np.array(2.5), "a reason")
DIFFERS = Verdict(False, 60, 0, 9.0, 1e-9, "It differs: <b>|`x`.", EXAMPLE)
FACTS = {"box": "https://host/<model>", "seed": 7}


def test_the_record_holds_numbers() -> None:
    record = to_record(AGREED, FACTS)
    assert (record["seed"], record["difference"], record["format"]) == (7, 1e-10, "float64")
    assert 0.04 < record["fraction"] < 0.05
    json.dumps(record)


def test_junit_fails_where_the_box_differs() -> None:
    assert ElementTree.fromstring(to_junit(AGREED, FACTS)).find(".//failure") is None
    case = ElementTree.fromstring(to_junit(DIFFERS, FACTS)).find(".//testcase")
    assert case is not None
    assert case.get("name") == "https://host/<model>"
    failure = case.find("failure")
    assert failure is not None
    assert failure.text == "It differs: <b>|`x`."


def test_sarif_has_a_result_where_the_box_differs() -> None:
    assert json.loads(to_sarif(AGREED, FACTS))["runs"][0]["results"] == []
    (result,) = json.loads(to_sarif(DIFFERS, FACTS))["runs"][0]["results"]
    assert result["level"] == "error"
    assert result["properties"]["worst"] == 9.0


def test_markdown_is_not_broken_by_what_a_box_says() -> None:
    shown = to_markdown(DIFFERS, FACTS)
    assert shown.startswith("### The box differs")
    assert "&lt;b>\\|'x'." in shown
    assert "| seed | 7 |" in shown


def test_a_page_stands_alone_and_escapes_what_a_box_says(tmp_path: Path) -> None:
    place = write_page(to_page(DIFFERS, FACTS), tmp_path / "page.html")
    page = place.read_text()
    assert "<b>" not in page
    assert "<differs>" not in page
    assert "https://host/&lt;model&gt;" in page
    assert "src=" not in page


def test_a_changed_number_format_stands_in_the_record_and_the_summary() -> None:
    changed = replace(AGREED, format="float16", format_before="float64", noticed={"heads.0": 2e-3})
    assert to_record(changed, FACTS)["format_changed"] is True
    assert "float16, was float64" in to_markdown(changed, FACTS)
    assert "2.0e-03" in to_markdown(changed, FACTS)
    assert "float16 (was float64)" in changed._repr_html_()
