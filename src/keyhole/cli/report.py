"""`keyhole report`: the report of a saved run, again."""

import json
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.ending import check_file
from keyhole.cli.options import Json

NAME = "report.html"  # in the folder of the run, unless told otherwise


def report(
    run: Annotated[Path, typer.Argument(help="The folder of a saved run (--out of recover).")],
    out: Annotated[Path | None, typer.Option(help=f"Write it here.  [default: RUN/{NAME}]")] = None,
    as_json: Json = False,
) -> None:
    """Rebuilds the HTML report of a saved run: one file that needs nothing else."""
    from keyhole.errors import InvalidArgument
    from keyhole.report.html import write_report
    from keyhole.results import Recovery, load

    loaded = load(run)
    if not isinstance(loaded, Recovery):
        raise InvalidArgument(
            f"{run} is a model; a report needs the folder of a run, with its verdict and ledger"
        )
    place = run / NAME if out is None else out
    check_file("--out", place)
    path = write_report(loaded, place, run)
    size = path.stat().st_size
    if as_json:
        typer.echo(json.dumps({"report": str(path), "bytes": size}))
    else:
        typer.echo(f"{path} ({size / 1e6:.2g} MB): open it in a browser")
