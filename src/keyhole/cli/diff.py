"""`keyhole diff`: two sets of weights, part by part."""

import json
from typing import Annotated

import typer

from keyhole.cli.main import Exit
from keyhole.cli.options import Json


def diff(
    a: Annotated[str, typer.Argument(help="`hf:FOLDER`, a saved keyhole model or run.")],
    b: Annotated[str, typer.Argument(help="Another one of the same shape.")],
    as_json: Json = False,
) -> None:
    """Says whether two sets of weights are the same function, and which parts moved if not."""
    from keyhole.diagnosis.difference import diff as compare

    found = compare(a, b)
    if as_json:
        typer.echo(json.dumps(found.to_record()))
    else:
        typer.echo(str(found))
        for part in found.parts[:20]:
            typer.echo(f"  {part}")
    raise typer.Exit(Exit.OK if found.same else Exit.DIFFERS)
