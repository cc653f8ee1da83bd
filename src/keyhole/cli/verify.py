"""`keyhole verify`: is the box behind TARGET what REFERENCE is?"""

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.ending import check_file
from keyhole.cli.main import Exit
from keyhole.cli.options import Json, Report
from keyhole.cli.target import Box, asks_a_box
from keyhole.cli.two_boxes import Dialect, Pair, Reference, open_pair, read_seed

FRESH = "Fresh queries: 59 leave at most 5% open, 299 at most 1%."


def explain_and_leave(wanted: bool) -> bool:
    """Says which queries are called ordinary, where that is wanted."""
    if wanted:
        from keyhole.verification.challenge_queries import explain_distribution

        typer.echo(explain_distribution())
        raise typer.Exit()
    return wanted


@asks_a_box
def verify(
    *,
    reference: Reference = None,
    box: Box,
    queries: Annotated[int | None, typer.Option("--fresh", "--queries", help=FRESH)] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="List the ordinary queries that a verdict speaks of, and end.",
            is_eager=True,
            callback=explain_and_leave,
        ),
    ] = False,
    seed: Annotated[
        str,
        typer.Option(
            metavar="NUMBER|random",
            help="The same seed asks the same queries; with random, a new one that is told.",
        ),
    ] = "0",
    evidence: Annotated[
        Path | None,
        typer.Option(
            help="Write queries, answers, seed and digests here. Without REFERENCE and TARGET: "
            "check such a file, asking nobody."
        ),
    ] = None,
    dialect: Dialect = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write SARIF here.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="Write a summary for a pull request here.")
    ] = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Is the box behind TARGET what REFERENCE is? Compares their answers to fresh queries."""
    if reference is None:
        if evidence is None:
            raise typer.BadParameter("name what TARGET should be", param_hint="REFERENCE")
        check_evidence_file(evidence, as_json)
    for option, path in (
        ("--junit", junit),
        ("--sarif", sarif),
        ("--markdown", markdown),
        ("--report", report),
        ("--evidence", evidence),
    ):
        if path is not None:
            check_file(option, path)
    number = read_seed(seed)
    assert reference is not None
    with contextlib.ExitStack() as stack:
        pair = open_pair(box, reference, dialect, stack)
        facts: dict[str, Any] = {
            **pair.describe(),
            "seed": number,
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        verdict = compare_pair(pair, queries, number, evidence)
    write_verdict(verdict, facts, junit, sarif, markdown, report)
    show_verdict(verdict, facts, as_json)
    raise typer.Exit(Exit.OK if verdict.agrees else Exit.DIFFERS)


def compare_pair(pair: Pair, queries: int | None, seed: int, evidence: Path | None) -> Any:
    """The verdict; with `evidence`, written down so that others can check it."""
    from keyhole.errors import InvalidArgument
    from keyhole.oracles.base import Oracle
    from keyhole.oracles.wrappers.validate import Validator
    from keyhole.verification.dispatch import is_language_pair, verify_target
    from keyhole.verification.signature import speak_with_evidence, verify_with_evidence
    from keyhole.verification.verify import verify as compare

    if evidence is not None:
        if pair.claimed is not None:
            raise InvalidArgument(
                "--evidence is written for boxes that are compared with a target or a signature: "
                "sign the reference first (keyhole sign), and verify against the signature"
            )
        spoken = is_language_pair(pair.box, pair.reference)
        write = speak_with_evidence if spoken else verify_with_evidence
        return write(pair.box, pair.reference, evidence, queries=queries, seed=seed, **pair.options)
    other = None
    if pair.claimed is None:
        other = verify_target(pair.box, pair.reference, queries, seed, **pair.options)
    if other is not None:
        return other
    box = Validator(pair.box) if isinstance(pair.box, Oracle) else pair.box
    return compare(box, pair.reference, queries=queries, seed=seed)


def write_verdict(
    verdict: Any,
    facts: dict[str, Any],
    junit: Path | None,
    sarif: Path | None,
    markdown: Path | None,
    report: Path | None,
) -> None:
    """The verdict in the forms that were asked for."""
    from keyhole.models.files import replacing
    from keyhole.report import continuous

    for path, write in (
        (junit, continuous.to_junit),
        (sarif, continuous.to_sarif),
        (markdown, continuous.to_markdown),
    ):
        if path is not None:
            with replacing(path) as temporary:
                temporary.write_text(write(verdict, facts), "utf-8")
    if report is not None:
        from keyhole.report.builder import write_page

        write_page(continuous.to_page(verdict, facts), report)


def show_verdict(verdict: Any, facts: dict[str, Any], as_json: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from keyhole.report import continuous
    from keyhole.report.terminal import counterexample

    if as_json:
        typer.echo(json.dumps(continuous.to_record(verdict, facts)))
        return
    console = Console()
    word = Text(verdict.word, style="green" if verdict.agrees else "red")
    console.print(Text.assemble("The box ", word, f". {verdict.bound}"))
    if verdict.counterexample is not None:
        console.print(counterexample(verdict.counterexample))


def check_evidence_file(path: Path, as_json: bool) -> None:
    """Checks a verdict from its file alone, and leaves: 0 sound, 1 not."""
    from keyhole.results import plain
    from keyhole.verification.signature import check_evidence

    found = check_evidence(path)
    if as_json:
        record = {"sound": found.sound, "reasons": list(found.reasons), "sha256": found.digest}
        typer.echo(json.dumps({**record, "verdict": plain(vars(found.verdict))}))
    else:
        typer.echo(f"{found} (sha256 {found.digest})")
    raise typer.Exit(Exit.OK if found.sound else Exit.DIFFERS)
