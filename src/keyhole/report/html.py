"""A recovery as one HTML file that needs nothing else: no network, no other file."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from keyhole.models.files import replacing
from keyhole.report.page import page
from keyhole.results import Recovery

TEMPLATES = Path(__file__).parent / "templates"


def render(recovery: Recovery, folder: str | Path | None = None) -> str:
    """The report's HTML; `folder` is where the run is saved. Whatever the box or its owner named is
    escaped.

    >>> import numpy as np
    >>> from keyhole.models.random import attention
    >>> from keyhole.results import Ledger, Outcome
    >>> model = attention(np.random.default_rng(0), 4)
    >>> text = render(Recovery(Outcome.UNVERIFIED, model, None, None, Ledger()))
    >>> text.startswith("<!doctype html>"), "http://" in text
    (True, False)
    """
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        page(recovery),
        folder=repr(str(folder or "run")),
        style=Markup((TEMPLATES / "report.css").read_text("utf-8")),  # our own files, not input
        script=Markup((TEMPLATES / "report.js").read_text("utf-8")),
    )


def write_report(recovery: Recovery, path: str | Path, folder: str | Path | None = None) -> Path:
    """Writes the report; the file appears whole or not at all."""
    path = Path(path)
    text = render(recovery, folder)
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
    return path
