"""The one gate that text passes on its way out: into messages, files, reports and terminals.

What a box, a file or an endpoint says may hold anything: a token that was sent to it, escape
sequences that move a terminal's cursor, halves of characters that no file can hold. `clean` takes
these out. Every error and every record of a run passes it when it is made, every line of the
command line when it is printed.
"""

import html
import json
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

# all control characters but newline and tab, marks that turn the direction of writing, halves of
# characters (surrogates)
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
MARK = "[token]"

_secrets: dict[str, re.Pattern[str]] = {}


def keep_secret(word: str) -> None:
    """From now on `word` is cut out of everything that leaves, as it is, as a URL, JSON or HTML
    would write it, and whatever the case of its letters (hosts are lower case)."""
    shortest = 4  # characters of a secret: shorter ones are parts of ordinary words
    if len(word) < shortest or word in _secrets:
        return
    forms = {word, quote(word, safe=""), quote(word), json.dumps(word)[1:-1], html.escape(word)}
    longest_first = sorted(forms, key=len, reverse=True)
    _secrets[word] = re.compile("|".join(re.escape(form) for form in longest_first), re.IGNORECASE)


def clean(text: str) -> str:
    r"""The text without secrets and without what only a machine would read.

    >>> clean("red \x1b[31malert")
    'red [31malert'
    """
    text = UNPRINTABLE.sub("", text)
    for secret in _secrets.values():
        text = secret.sub(MARK, text)
    return text


def clean_all(value: Any) -> Any:
    """The same for every text in a record; what is no text, list or mapping stays as it is."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean_all(key): clean_all(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(clean_all(item) for item in value)
    return value


def html_table(rows: Mapping[str, str], text: str = "") -> str:
    """Rows of a name and what it is, and a paragraph, for notebooks: HTML without style of its
    own, so that it follows the notebook's light or dark theme."""
    lines = "".join(
        f"<tr><th style='text-align:left'>{html.escape(name)}</th>"
        f"<td style='text-align:left'>{html.escape(clean(value))}</td></tr>"
        for name, value in rows.items()
    )
    paragraph = f"<p>{html.escape(clean(text))}</p>" if text else ""
    return f"<div><table>{lines}</table>{paragraph}</div>"
