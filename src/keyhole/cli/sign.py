"""`keyhole sign`: a signature of what a box answers."""

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.ending import check_file
from keyhole.cli.options import Json
from keyhole.cli.target import Box, asks_a_box
from keyhole.cli.two_boxes import Dialect, collect_options, is_address, read_seed


@asks_a_box
def sign(
    box: Box,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("model.keyhole"),
    queries: Annotated[int, typer.Option(min=1, help="How many are asked.")] = 59,
    seed: Annotated[
        str,
        typer.Option(
            metavar="NUMBER|random", help="Draws the queries; the file holds it, and proves it."
        ),
    ] = "random",
    dialect: Dialect = None,
    as_json: Json = False,
) -> None:
    """Signs the behaviour of TARGET: queries, answers and noise, in a file that `keyhole verify`
    and `keyhole watch` take as REFERENCE."""
    from keyhole.verification.signature import sign as write

    if box.target is None:
        raise typer.BadParameter("name the box: TARGET", param_hint="TARGET")
    check_file("--out", out)
    number = read_seed(seed)
    with contextlib.ExitStack() as stack:
        target, options = open_signed(box, dialect, stack)
        signature = write(target, out, queries=queries, seed=number, **options)
    if as_json:
        record = {
            "file": str(out),
            "sha256": signature.digest,
            "box": signature.identity,
            "queries": len(signature.answers),
            "kind": signature.plan.kind,
            "seed": number,
            "number_format": signature.noise.format,
            "repeatable": signature.noise.repeatable,
            "made": signature.made,
        }
        typer.echo(json.dumps(record))
        return
    typer.echo(
        f"{out}: {len(signature.answers)} queries ({signature.plan.kind}) and the answers of "
        f"{signature.identity}.\nsha256 {signature.digest}: publish it, and nobody can change the "
        "file unnoticed."
    )


def open_signed(
    box: Box, dialect: str | None, stack: contextlib.ExitStack
) -> tuple[Any, dict[str, Any]]:
    """The box to sign, with the options of an endpoint of rows."""
    from keyhole.verification.dispatch import serves_rows
    from keyhole.verification.reference import takes_vectors

    target = box.target
    assert target is not None
    if box.language_model or (box.tokens is not None and not is_address(target)):
        return stack.enter_context(box.opened()), {}
    options = collect_options(box, dialect, spoken=False)
    rows = serves_rows(target) or (box.width is None and not takes_vectors(target, None, options))
    if rows:
        return target, options
    return stack.enter_context(box.opened()), {}
