"""How a run ends on the command line: shown, saved, and left with the exit code of its outcome."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from keyhole.cli.main import Exit, error_record, exit_code
from keyhole.cli.options import typed
from keyhole.errors import InvalidArgument

if TYPE_CHECKING:
    from keyhole.results import Recovery


def check_places(out: Path | None, report: Path | None) -> None:
    """Raises, before anything is paid for, where a result could not be kept."""
    if out is not None:
        check_folder("--out", out)
    if report is not None:
        check_file("--report", report)


def check_file(option: str, path: Path) -> None:
    if path.is_dir():
        raise InvalidArgument(f"{path} is a folder; {option} names a file in it")
    check_folder(option, path.parent)


def check_folder(option: str, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InvalidArgument(
            f"nothing can be written in {folder} ({error.strerror}): name another place with "
            f"{option}. Nothing was begun"
        ) from error


def finish(
    recovery: "Recovery",
    as_json: bool,
    out: Path | None,
    report: Path | None,
) -> None:
    """Shows, saves, and leaves with the exit code of the outcome. What cannot be saved is shown
    all the same."""
    from rich.console import Console

    recovery = replace(recovery, run={**recovery.run, "command": typed()})
    places: list[str] = []
    failed = None
    if out is not None:
        failed = kept("--out", out, lambda: recovery.save(out))
        places.append(f"saved in {out}; load it with keyhole.load({str(out)!r})")
    if report is not None and failed is None:
        from keyhole.report.html import write_report

        failed = kept("--report", report, lambda: write_report(recovery, report, out))
        places.append(f"report: {report}")
    if as_json:
        tell(recovery.to_json(), failed)
    else:
        from keyhole.report.terminal import show

        console = Console()
        console.print(show(recovery, colour=console.color_system is not None))
        for line in places if failed is None else places[:-1]:
            console.print(line, markup=False, highlight=False)  # a path may look like markup
    leave(failed)
    raise typer.Exit(outcome_code(recovery))


def kept(option: str, place: Path, write: Callable[[], Any]) -> InvalidArgument | None:
    """Writes a result; what went wrong is told after the result was shown."""
    try:
        write()
    except OSError as error:
        return InvalidArgument(
            f"{place} could not be written ({error.strerror or error}): make room, or name another "
            f"place with {option}, and run again"
        )
    return None


def tell(record: dict[str, Any], failed: InvalidArgument | None) -> None:
    """The one object of --json."""
    typer.echo(json.dumps(record if failed is None else record | error_record(failed)))


def leave(failed: InvalidArgument | None) -> None:
    if failed is not None:
        typer.echo(f"keyhole: {failed}", err=True)
        raise typer.Exit(exit_code(failed))


def outcome_code(recovery: "Recovery") -> int:
    from keyhole.results import Outcome

    unasked = recovery.verdict is None
    codes = {
        Outcome.RECOVERED: Exit.OK,
        # as asked with --no-verify; no query was left for it; noise hides what it would tell
        Outcome.UNVERIFIED: Exit.OK
        if not recovery.reason
        else Exit.BUDGET
        if unasked
        else Exit.DIFFERS,
        Outcome.ORACLE_FAILED: Exit.ORACLE,
        Outcome.BUDGET_EXHAUSTED: Exit.BUDGET,
        Outcome.UNSUPPORTED: Exit.UNSUPPORTED,
        Outcome.INTERRUPTED: Exit.STOPPED,
    }
    return codes.get(recovery.outcome, Exit.DIFFERS)


def how_to_resume(recovery: "Recovery", journal: Path | None) -> str | None:
    """After a run that was stopped, or whose box failed: where its answers are, what continues."""
    stopped = recovery.outcome.name == "INTERRUPTED"
    if not stopped and (recovery.outcome.name != "ORACLE_FAILED" or journal is None):
        return None
    ending = "stopped" if stopped else "the box failed"
    after = f"keyhole: {ending} after {recovery.ledger.paid:,} queries"
    if journal is None:
        again = typed("--journal", "run.journal", hide=False)
        return f"{after}, which were not kept. A run with a journal can be continued:\n  {again}"
    return f"{after}, kept in {journal}. Continue with:\n  {typed(hide=False)}"
