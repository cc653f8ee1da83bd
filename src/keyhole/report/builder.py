"""The one builder of pages: every page of Keyhole is one HTML file that needs nothing else.

A page has a frame (`templates/frame.html`: style, headline, badge, leading sentences, figures) and
a content. The report of a run and the audit of a language model have templates of their own; all
others are a `Page` of sections. Whatever a box or its owner named is escaped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from keyhole.models.files import replacing
from keyhole.report.charts import Chart
from keyhole.text import clean

TEMPLATES = Path(__file__).parent / "templates"
Tone = Literal["good", "fair", "bad"]


@dataclass(frozen=True)
class Row:
    """Cells of a table; the first is the row's name, and may link to a page of its own."""

    cells: tuple[str, ...]
    tone: Tone | None = None  # colour of the second cell
    link: str = ""


@dataclass(frozen=True)
class Table:
    heads: tuple[str, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Section:
    """A part of a page, shown in this order."""

    title: str = ""
    texts: tuple[str, ...] = ()
    items: tuple[str, ...] = ()
    pairs: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    charts: tuple[Chart, ...] = ()


@dataclass(frozen=True)
class Page:
    """What a page says before its sections: the verdict, for readers who stop there."""

    headline: str
    kind: str  # beside the name of the program: "audit", "verdict"
    tone: Tone = "good"
    badge: str = ""
    lead: tuple[str, ...] = ()
    facts: tuple[tuple[str, str, str], ...] = ()  # name, figure, what it is compared with
    sections: tuple[Section, ...] = field(default=())


def render_page(page: Page) -> str:
    """The page as HTML.

    Args:
        page: What it says.

    Returns:
        The text of one file.

    Example:
        >>> text = render_page(Page("A <b>box</b>", "verdict", badge="agrees"))
        >>> "&lt;b&gt;box" in text, "http://" in text
        (True, False)
    """
    shown = {name: getattr(page, name) for name in page.__dataclass_fields__}
    return render("page.html", {**shown, "title": page.headline}, script=False)


def write_page(page: Page, path: str | Path) -> Path:
    """Writes the page; the file appears whole or not at all."""
    return write(render_page(page), path)


def render(template: str, values: Mapping[str, Any], *, script: bool) -> str:
    """A template of ours with its values; `script` brings heat maps and the switch to dark."""
    style, code = (
        Markup((TEMPLATES / f"report.{kind}").read_text("utf-8")) for kind in ("css", "js")
    )
    return _environment().get_template(template).render(values, style=style, script=script and code)


def write(text: str, path: str | Path) -> Path:
    """Writes a file that appears whole or not at all."""
    path = Path(path)
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
    return path


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: clean(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
