"""Options that several commands share, and the oracle they describe."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from keyhole.oracles.base import Oracle

Target = Annotated[
    str,
    typer.Argument(
        help="`package.module:attribute` (imports that code), or a saved keyhole model.",
        show_default=False,
    ),
]
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


def opened(
    target: str, width: int | None, max_length: int | None, max_norm: float | None
) -> "Oracle":
    from keyhole.oracles.open import open_oracle

    return open_oracle(target, width, max_length, max_norm)


def typed(context: typer.Context, *, hide: bool = True, **changes: Any) -> str:
    """The command under way as it can be typed again; `changes` replace options. `hide` leaves
    out what a file must not hold."""
    words = ["keyhole", str(context.info_name)]
    for parameter in context.command.params:
        name = str(parameter.name)
        value = changes.get(name, context.params.get(name))
        if parameter.param_type_name == "argument":
            words.append(without_secrets(str(value)) if hide else str(value))
        elif value is not None and value != parameter.get_default(context):
            words += _option(parameter, value)
    return shlex.join(words)


def _option(parameter: Any, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [parameter.opts[0] if value else parameter.secondary_opts[0]]
    return [max(parameter.opts, key=len), str(value)]


def without_secrets(target: str) -> str:
    """An address without the user's name and password: the command is written into reports."""
    if not target.startswith(("http://", "https://")):
        return target
    parts = urlsplit(target)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
