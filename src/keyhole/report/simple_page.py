"""A verdict or an audit as one HTML file that needs nothing else, in the looks of the report."""

import html
from pathlib import Path

from keyhole.models.files import replacing
from keyhole.report.html import TEMPLATES
from keyhole.text import clean


def write_simple_page(title: str, body: str, path: str | Path) -> Path:
    """Writes a page with a title and a body of HTML (ours: what others named is escaped in it); the
    file appears whole or not at all."""
    path, name = Path(path), html.escape(clean(title))
    style = (TEMPLATES / "report.css").read_text("utf-8")
    text = (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        "<meta name='color-scheme' content='light dark'><link rel='icon' href='data:,'>"
        f"<title>{name}</title><style>{style}\nmain div {{ overflow-x: auto; }}\n"
        "th, td { padding: 0.2em 0.8em 0.2em 0; text-align: left; }\n"
        "h1 { margin: 24px 0; }</style></head>"
        "<body><div class='top'><p class='brand'>Keyhole</p></div>"
        f"<main><h1>{name}</h1>{body}</main></body></html>\n"
    )
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
    return path
