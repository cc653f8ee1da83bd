"""`keyhole audit`: how exposed is my model?"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.ending import check_file, kept, leave, tell
from keyhole.cli.options import (
    LANGUAGE,
    Json,
    LanguageModel,
    MaxLength,
    Price,
    Report,
    Scheduler,
    Seed,
    Tokens,
)
from keyhole.cli.target import open_named_language_model

if TYPE_CHECKING:
    from keyhole.models.attention import Attention


def audit(
    model: Annotated[
        str,
        typer.Argument(
            help="A model you own: a saved keyhole model, a run's folder, `hf:FOLDER#part`, "
            "`gguf:FILE#part`, `package.module:attribute` (imports that code; a torch module's "
            "weights are read), or the address of a language model.",
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
    scheduler: Scheduler = None,
    store: Annotated[
        Path | None,
        typer.Option(help="Keep finished cells here; run again to continue a stopped audit."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write the plot here (.png, .svg or .pdf).")
    ] = None,
    language_model: LanguageModel = None,
    tokens: Tokens = None,
    max_length: MaxLength = None,
    price: Price = None,
    most: Annotated[
        int,
        typer.Option(
            min=1000,
            help="Most questions of one attack; dearer ones are computed.",
            rich_help_panel=LANGUAGE,
        ),
    ] = 20_000,
    report: Report = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """How exposed is MODEL: error of a stolen copy against queries, for each output precision.

    A language model (an address, --language-model) is audited behind six interfaces."""
    from keyhole.audit.cells import Plan
    from keyhole.audit.picture import checked_plot, draw, show
    from keyhole.audit.protections import DEFAULT
    from keyhole.audit.summary import to_json
    from keyhole.audit.sweep import run_audit

    if language_model or tokens is not None or model.lower().startswith(("http://", "https://")):
        audit_language(model, tokens, max_length, price or 0.0, most, report, seed, as_json)
        return
    owned = owned_model(model)
    if plot is not None:
        checked_plot(plot)
        check_file("--plot", plot)
    if report is not None:
        check_file("--report", report)
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
    if report is not None and failed is None:
        from keyhole.audit.page import write_audit

        place = report
        failed = kept("--report", place, lambda: write_audit(found, place))
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


def audit_language(
    target: str,
    tokens: int | None,
    max_length: int | None,
    price: float,
    most: int,
    report: Path | None,
    seed: int,
    as_json: bool,
) -> None:
    """A language model: one at hand behind six interfaces, or an endpoint as it is."""
    from rich.console import Console

    from keyhole.audit.language_model import audit_language_model
    from keyhole.audit.language_model_page import show, write_page
    from keyhole.oracles.language_model.function import TokenFunction

    if report is not None:
        check_file("--report", report)

    def progress(step: str) -> None:
        if not as_json:
            sys.stderr.write(f"{step}\n")

    with open_named_language_model(target, tokens, max_length, None, {}) as box:
        logits = box.function if isinstance(box, TokenFunction) else None
        found = audit_language_model(
            box, logits=logits, price=price, most=most, seed=seed, progress=progress
        )
    failed = None if report is None else kept("--report", report, lambda: write_page(found, report))
    if as_json:
        tell(found.to_json(), failed)
    else:
        Console().print(show(found))
    leave(failed)


def owned_model(target: str) -> "Attention":
    """The model to audit. Its parameters must be known: they are what the attack is judged by."""
    from keyhole.errors import InvalidArgument
    from keyhole.models.attention import Attention
    from keyhole.models.export import from_hf, from_torch
    from keyhole.oracles.open import load_named
    from keyhole.oracles.torch import is_module
    from keyhole.results import load
    from keyhole.targets import split_gguf

    value: Any
    if target.startswith("hf:"):
        from keyhole.oracles.hugging_face import load_folder

        folder, _, part = target.removeprefix("hf:").partition("#")
        value = from_hf(load_folder(folder), part or 0)
    elif ":" in target or split_gguf(target) is not None:
        value = load_named(target)
        value = from_torch(value) if is_module(value) else value
    else:
        value = load(target)
        value = getattr(value, "model", value)
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
