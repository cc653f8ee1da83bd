"""`keyhole audit`: how exposed is my model?"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.ending import check_file, kept, leave, tell

if TYPE_CHECKING:
    from keyhole.models.attention import Attention


def audit(
    model: Annotated[
        str,
        typer.Argument(
            help="A model you own: a saved keyhole model, a run's folder, or "
            "`package.module:attribute` (imports that code).",
            show_default=False,
        ),
    ],
    protections: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated: float64, float32, bfloat16, decimals:4, noise:1e-3, label."
        ),
    ] = None,
    multiples: Annotated[
        str, typer.Option(help="Queries to allow, in units of the unknowns, comma-separated.")
    ] = "1,4,16",
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions of each attack.")] = 1,
    max_norm: Annotated[
        float | None,
        typer.Option(help="Largest token norm accepted (default: the model's natural length)."),
    ] = None,
    unbounded: Annotated[
        bool, typer.Option(help="Show tokens of any size beside bounded ones.")
    ] = True,
    workers: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    scheduler: Annotated[
        str | None, typer.Option(help="Address of a Dask scheduler, tcp://host:8786.")
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Keep finished cells here; run again to continue a stopped audit."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the plot here (.png, .svg or .pdf).")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same figures.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """How exposed is MODEL: error of a stolen copy against queries, for each output precision."""
    from keyhole.audit.cells import Plan
    from keyhole.audit.picture import checked_plot, draw, show
    from keyhole.audit.protections import DEFAULT
    from keyhole.audit.summary import to_json
    from keyhole.audit.sweep import run_audit

    owned = owned_model(model)
    if plot is not None:
        checked_plot(plot)
        check_file("--plot", plot)
    plan = Plan(
        protections=DEFAULT if protections is None else words(protections),
        multiples=numbers(multiples),
        repeats=repeats,
        max_norm=max_norm,
        unbounded=unbounded,
        seed=seed,
    )
    with _shown(not as_json) as progress:
        found = run_audit(
            owned, plan, store=store, workers=workers, scheduler=scheduler, progress=progress
        )
    failed = None if plot is None else kept("--plot", plot, lambda: draw(found, plot))
    if as_json:
        tell(to_json(found), failed)
        leave(failed)
        return
    from rich.console import Console

    console = Console()
    console.print(show(found))
    leave(failed)
    if plot is not None:
        console.print(f"plot: {plot}", markup=False, highlight=False)


def owned_model(target: str) -> "Attention":
    """The model to audit. Its parameters must be known: they are what the attack is judged by."""
    from importlib import import_module

    from keyhole.errors import InvalidArgument
    from keyhole.models.attention import Attention
    from keyhole.results import Recovery, load

    module, colon, attribute = target.partition(":")
    value: Any
    if colon and not Path(target).exists():
        try:
            value = import_module(module)
            for name in attribute.split("."):
                value = getattr(value, name)
        except (ImportError, AttributeError) as error:
            raise InvalidArgument(f"cannot import {target}: {error}") from error
    else:
        value = load(target)
        value = value.model if isinstance(value, Recovery) else value
    if not isinstance(value, Attention):
        raise InvalidArgument(
            f"an audit compares with the true parameters, so it needs a keyhole.Attention; "
            f"{target} is a {type(value).__name__}"
        )
    return value


def words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def numbers(text: str) -> tuple[int, ...]:
    from keyhole.errors import InvalidArgument

    try:
        return tuple(sorted({int(part) for part in words(text)}))
    except ValueError as error:
        raise InvalidArgument(f"multiples must be whole numbers, got {text!r}") from error


@contextlib.contextmanager
def _shown(enabled: bool) -> Iterator[Callable[[Any], None] | None]:
    """Progress on stderr: a bar in a terminal, a line per cell elsewhere, silence for --json."""
    if not enabled:
        yield None
        return
    if not sys.stderr.isatty():

        def line(step: Any) -> None:
            sys.stderr.write(f"{step.done} of {step.total} cells: {step.cell}\n")

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("[bold]{task.description:<28}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def update(step: Any) -> None:
            bar.update(task, description=step.cell, completed=step.done, total=step.total)

        yield update
