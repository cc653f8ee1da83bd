"""A title and a body of HTML as a page, for what brings its own markup."""

from pathlib import Path

from markupsafe import Markup

from keyhole.report.builder import Page, Section, write_page


def write_simple_page(title: str, body: str, path: str | Path) -> Path:
    """Writes a page with a title and a body of HTML.

    Args:
        title: The headline.
        body: Markup of our own, in which what others named is escaped.
        path: The file, which appears whole or not at all.

    Returns:
        The path.
    """
    return write_page(Page(title, "page", sections=(Section(markup=Markup(body)),)), path)
