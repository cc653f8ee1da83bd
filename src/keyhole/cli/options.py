"""Options that several commands share."""

import shlex
import sys
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

Width = Annotated[
    int | None, typer.Option(help="Width of a token, where the target does not tell.")
]
MaxLength = Annotated[int | None, typer.Option(help="Longest sequence the box accepts.")]
MaxNorm = Annotated[float | None, typer.Option(help="Largest token norm the box accepts.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Seed = Annotated[int, typer.Option(help="The same seed asks the same questions.")]
Out = Annotated[Path | None, typer.Option(help="Save the run (model, errors, verdict) here.")]
Report = Annotated[
    Path | None, typer.Option("--report", help="Write a report to look at: one HTML file.")
]


def typed(*more: str, hide: bool = True) -> str:
    """The command under way as it can be typed again, and `more` words. `hide` leaves out what a
    file must not hold."""
    words = [*sys.argv[1:], *more]
    return shlex.join(["keyhole", *(without_secrets(word) if hide else word for word in words)])


def without_secrets(target: str) -> str:
    """An address without the user's name and password: the command is written into reports."""
    if not target.startswith(("http://", "https://")):
        return target
    parts = urlsplit(target)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
