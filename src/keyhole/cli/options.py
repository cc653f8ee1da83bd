"""Options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from keyhole.oracles.base import Oracle

Target = Annotated[
    str,
    typer.Argument(
        help="`package.module:attribute` (imports that code), a `.onnx` file, an `http(s)://` "
        "endpoint, or a saved keyhole model.",
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


def opened(
    target: str, width: int | None, max_length: int | None, max_norm: float | None
) -> "Oracle":
    from keyhole.oracles.open import open_oracle

    return open_oracle(target, width, max_length, max_norm)
