"""A recovery as one HTML file that needs nothing else: no network, no other file."""

from pathlib import Path

from keyhole.report import builder
from keyhole.report.page import page
from keyhole.results import Recovery

TEMPLATES = builder.TEMPLATES


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
    values = {**page(recovery), "folder": repr(str(folder or "run"))}
    return builder.render("report.html", values, script=True)


def write_report(recovery: Recovery, path: str | Path, folder: str | Path | None = None) -> Path:
    """Writes the report; the file appears whole or not at all."""
    return builder.write(render(recovery, folder), path)
