"""Options that several commands share."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

Width = Annotated[
    int | None, typer.Option(help="Width of a token, where the target does not tell.")
]
MaxLength = Annotated[int | None, typer.Option(help="Longest sequence the box accepts.")]
MaxNorm = Annotated[float | None, typer.Option(help="Largest token norm the box accepts.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed asks the same queries.")]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, help="Money per million tokens, of a language model's prompts."),
]
Out = Annotated[Path | None, typer.Option(help="Save the run (model, errors, verdict) here.")]
Report = Annotated[
    Path | None, typer.Option("--report", help="Write a report to look at: one HTML file.")
]


ADDRESS = re.compile(r"(https?://)(?:[^/?#]*@)?([^?#]*).*", re.IGNORECASE | re.DOTALL)
REQUEST = "--request"


def typed(*more: str, hide: bool = True) -> str:
    """The command under way as it can be typed again, and `more` words. `hide` leaves out what a
    file must not hold."""
    words = [*sys.argv[1:], *more]
    return shlex.join(["keyhole", *(without_secrets(words) if hide else words)])


def without_secrets(words: list[str]) -> list[str]:
    """A command without the users, passwords and queries of its addresses, and without messages
    to an endpoint: runs and reports hold it."""
    shown = [ADDRESS.sub(r"\1\2", word) for word in words]
    for place, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        if before == REQUEST and not word.startswith("@"):  # a file of that name tells nothing
            shown[place] = "…"
        elif word.startswith(f"{REQUEST}=") and not word.startswith(f"{REQUEST}=@"):
            shown[place] = f"{REQUEST}=…"
    return shown
