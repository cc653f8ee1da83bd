"""`keyhole bench`: against the baselines a user would otherwise pick."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.options import Json, Seed

if TYPE_CHECKING:
    from keyhole.bench import Row


def bench(
    suite: Annotated[
        str | None, typer.Argument(help="A suite, or `all`; without one, a layer of this size.")
    ] = None,
    width: Annotated[int, typer.Option(min=2, help="Width of the hidden layer.")] = 12,
    heads: Annotated[int, typer.Option(min=1, help="Its heads.")] = 2,
    seconds: Annotated[float, typer.Option(help="Time that each student may take.")] = 5.0,
    seeds: Annotated[int, typer.Option(min=1, help="Boxes of each case of a suite.")] = 3,
    quick: Annotated[
        bool, typer.Option("--quick", help="The smallest case of a suite, one box.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for SUITE.json and SUITE.md of a suite.")
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Hides models and recovers them: Keyhole, and the usual alternatives on the same boxes.

    Suites: single-head, low-rank, noise, labels, multi-head, layers, mlp, block, stack, tokens,
    examples.
    """
    if suite is None:
        compare_layer(width, heads, seconds, seed, as_json)
        return
    from keyhole.bench import SUITES, run_suite
    from keyhole.bench.record import make_record, to_json, write_record

    count = 1 if quick else seeds
    for name in SUITES if suite == "all" else (suite,):
        rows, growth = run_suite(
            name,
            quick=quick,
            seeds=seeds,
            first=seed,
            seconds=seconds,
            told=None if as_json else say,
        )
        title, drawn = SUITES[name].title, list(range(seed, seed + count))
        record = make_record(name, title, rows, growth, drawn, seconds)
        if out is not None:
            write_record(record, out)
        if as_json:
            typer.echo(to_json(record), nl=False)
        else:
            show(title, rows)


def compare_layer(width: int, heads: int, seconds: float, seed: int, as_json: bool) -> None:
    """One layer of the given size, one box."""
    from keyhole.bench import Size, run_case
    from keyhole.bench.cases import attention_case
    from keyhole.learners.auto import Auto
    from keyhole.results import plain

    size = Size(width, heads)
    case = attention_case(f"d = {width}, H = {heads}", Auto(), width=width, heads=heads)
    rows = run_case(case, first=seed, seconds=seconds, told=None if as_json else say)
    if as_json:
        record = {"width": width, "heads": heads, "unknowns": size.unknowns, "seed": seed}
        typer.echo(json.dumps({**record, "methods": [plain(vars(row)) for row in rows]}))
        return
    what = "One head" if heads == 1 else f"{heads} heads"
    show(f"{what} of width {width}: {size.unknowns:,} unknowns", rows)


def say(method: str) -> None:
    typer.echo(f"{method} …", err=True)


def show(title: str, rows: "list[Row]") -> None:
    from rich.console import Console

    console = Console()
    console.print(title, highlight=False)
    console.print(table(rows))
    for line in sentences(rows):
        console.print(line, style="dim", markup=False, highlight=False)


def table(rows: "list[Row]") -> Any:
    from rich.table import Table

    grid = Table(box=None, padding=(0, 1), header_style="dim")
    grid.add_column("case")
    grid.add_column("method", overflow="fold", min_width=14)
    for name in ("queries", "/ floor", "parameters", "answers", "time", "solved"):
        grid.add_column(name, justify="right")
    grid.add_column("ended")
    for row in rows:
        numbers = (row.parameters, row.answers)
        errors = ("–" if number is None else f"{number:.0e}" for number in numbers)
        grid.add_row(
            row.case,
            row.method,
            f"{row.queries:,.0f}",
            f"{row.queries / row.floor:.2f}" if row.floor else "–",
            *errors,
            "–" if row.seconds is None else f"{row.seconds:.1f} s",
            "–" if row.solved is None else f"{row.solved} of {row.seeds}",
            row.ended.replace("_", " ").lower(),
        )
    return grid


def sentences(rows: "list[Row]") -> list[str]:
    """What was compared with what."""
    lines = [
        "Relative errors of the worst block of parameters, and of answers to fresh sequences (root "
        "mean square). The baselines, least squares with SciPy and students trained with PyTorch, "
        "are told every size and get as many answers, to random queries.",
    ]
    if not any("student" in row.method for row in rows):
        lines.append("With PyTorch, students take part too: pip install 'keyhole-ml[torch]'.")
    return lines
