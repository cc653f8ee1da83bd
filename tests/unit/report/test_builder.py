"""One builder for all pages."""

import re
from pathlib import Path

from keyhole.report.builder import TEMPLATES, Page, Row, Section, Table, render_page, write_page

PAGE = Page(
    "A <i>box</i>",
    "verdict",
    "bad",
    "differs",
    ("First.",),
    (("Queries", "59", "fresh"),),
    (
        Section("Rows", table=Table(("name", "result"), (Row(("<a>", "no"), "bad", "x/y.html"),))),
        Section(items=("one", "two"), pairs=(("seed", "0"),)),
    ),
)


def test_what_others_named_is_escaped() -> None:
    text = render_page(PAGE)
    assert "A &lt;i&gt;box" in text
    assert "<a>" not in text


def test_a_page_says_verdict_figures_and_sections_in_this_order() -> None:
    text = render_page(PAGE).partition("<main")[2]
    places = [text.index(word) for word in ("differs", "First.", "59", "Rows", "x/y.html", "seed")]
    assert places == sorted(places)
    assert 'class="result bad"' in text


def test_a_page_needs_nothing_else_and_runs_no_script() -> None:
    text = render_page(PAGE)
    assert not re.search(r"(src|href)=['\"]https?:", text)
    assert "<script" not in text
    assert "script-src" not in text


def test_every_template_stands_in_the_one_frame() -> None:
    own = {path.name for path in TEMPLATES.glob("*.html")} - {"frame.html", "figures.html"}
    for name in own:
        text = (TEMPLATES / name).read_text()
        assert text.startswith('{% extends "frame.html" %}'), name
        assert "<html" not in text


def test_written_whole(tmp_path: Path) -> None:
    place = write_page(PAGE, tmp_path / "new" / "page.html")
    assert place.read_text("utf-8") == render_page(PAGE)
    assert len(list(tmp_path.rglob("*.html"))) == 1
