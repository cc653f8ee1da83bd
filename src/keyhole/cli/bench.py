"""`keyhole bench`: against the baselines a user would otherwise pick."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.options import Json, Seed

if TYPE_CHECKING:
    from keyhole.bench import Row


def bench(
    width: Annotated[int, typer.Option(min=2, help="Width of the hidden model.")] = 12,
    heads: Annotated[int, typer.Option(min=1, help="Its heads.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time that each baseline may take.")] = 5.0,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Hides a random model and recovers it: Keyhole, and the usual alternatives."""
    from keyhole.bench import Size, run_bench
    from keyhole.results import plain

    size = Size(width, heads)
    rows = run_bench(size, seconds=seconds, seed=seed, told=None if as_json else say)
    if as_json:
        record = {"width": width, "heads": heads, "unknowns": size.unknowns, "seed": seed}
        typer.echo(json.dumps({**record, "methods": [plain(vars(row)) for row in rows]}))
        return
    from rich.console import Console

    console = Console()
    what = "One head" if heads == 1 else f"{heads} heads"
    console.print(f"{what} of width {width}: {size.unknowns:,} unknowns", highlight=False)
    console.print(table(rows))
    for line in sentences(rows):
        console.print(line, style="dim", markup=False, highlight=False)


def say(method: str) -> None:
    typer.echo(f"{method} …", err=True)


def table(rows: "list[Row]") -> Any:
    from rich.table import Table

    grid = Table(box=None, padding=(0, 2), header_style="dim")
    grid.add_column("method")
    for name in ("queries", "parameters", "answers", "time"):
        grid.add_column(name, justify="right")
    grid.add_column("ended")
    for row in rows:
        errors = (f"{row.parameters:.0e}", f"{row.answers:.0e}")
        ended = row.ended.replace("_", " ").lower()
        grid.add_row(row.method, f"{row.queries:,}", *errors, f"{row.seconds:.1f} s", ended)
    return grid


def sentences(rows: "list[Row]") -> list[str]:
    """What was compared with what."""
    lines = [
        "Relative errors of the worst block of parameters, and of answers to fresh sequences (root "
        "mean square). The baselines, least squares with SciPy and students trained with PyTorch, "
        "are told the number of heads and get as many answers, to random queries.",
    ]
    if not any("student" in row.method for row in rows):
        lines.append("With PyTorch, students take part too: pip install 'keyhole[torch]'.")
    return lines
