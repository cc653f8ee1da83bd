"""`keyhole watch`: one night of a watch over a box."""

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.ending import check_file
from keyhole.cli.main import Exit
from keyhole.cli.options import Json, Report
from keyhole.cli.target import Box, asks_a_box
from keyhole.cli.two_boxes import Dialect, Reference, open_pair


@asks_a_box
def watch(
    *,
    reference: Reference = None,
    box: Box,
    state: Annotated[
        Path, typer.Option(help="Keeps the watch between two nights; made on the first.")
    ] = Path("watch.json"),
    queries: Annotated[int, typer.Option(min=1, help="Fresh queries of this night.")] = 30,
    alpha: Annotated[
        float, typer.Option(help="Probability that an alarm is ever raised though nothing changed.")
    ] = 0.01,
    benign: Annotated[
        float,
        typer.Option(help="Share of answers that may be beyond tolerance though nothing changed."),
    ] = 1e-3,
    independent: Annotated[
        bool,
        typer.Option(
            "--independent",
            help="Benign failures never come in bad nights: changes are found sooner.",
        ),
    ] = False,
    rearm: Annotated[
        bool, typer.Option("--rearm", help="Begin anew, after an alarm was looked into.")
    ] = False,
    dialect: Dialect = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Is TARGET still what REFERENCE is? One call a night; an alarm may be relied on whatever the
    number of nights."""
    from keyhole.models.files import replacing
    from keyhole.report.watch_page import to_junit, to_record, write_watch_page
    from keyhole.verification.watching import watch as run

    if reference is None:
        raise typer.BadParameter("name what TARGET should be", param_hint="REFERENCE")
    for option, path in (("--state", state), ("--junit", junit), ("--report", report)):
        if path is not None:
            check_file(option, path)
    with contextlib.ExitStack() as stack:
        pair = open_pair(box, reference, dialect, stack)
        facts: dict[str, Any] = pair.describe()
        night = run(
            pair.box,
            pair.reference,
            state,
            queries=queries,
            alpha=alpha,
            benign=benign,
            independent=independent,
            rearm=rearm,
            **pair.options,
        )
    if junit is not None:
        with replacing(junit) as temporary:
            temporary.write_text(to_junit(night, facts), "utf-8")
    if report is not None:
        write_watch_page(night, facts, report)
    typer.echo(json.dumps(to_record(night, facts)) if as_json else str(night))
    raise typer.Exit(Exit.DIFFERS if night.alarm else Exit.OK)
