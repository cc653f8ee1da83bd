"""The `keyhole` command and how it ends: exit codes, one readable sentence per error."""

import sys
from typing import Annotated

import typer

from keyhole import __version__
from keyhole.errors import BudgetExhausted, Interrupted, KeyholeError, OracleError

OK, DIFFERS, USAGE, ORACLE, BUDGET, STOPPED = 0, 1, 2, 3, 4, 130

app = typer.Typer(
    name="keyhole",
    help="Recovers attention models through their answers alone.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `keyhole demo`. For models you own or are authorised to test.",
)


def _version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"keyhole {__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def exit_code(error: KeyholeError) -> int:
    if isinstance(error, BudgetExhausted):
        return BUDGET
    if isinstance(error, OracleError):
        return ORACLE
    return STOPPED if isinstance(error, Interrupted) else USAGE


def main() -> None:
    """Runs the command; a KeyholeError becomes one sentence on stderr and an exit code."""
    from keyhole.cli import commands  # noqa: F401 - registers the commands

    sys.path.insert(0, "")  # package.module:attribute may live where the user stands
    try:
        app()
    except KeyholeError as error:
        typer.echo(f"keyhole: {error}", err=True)
        raise SystemExit(exit_code(error)) from error
    except KeyboardInterrupt:
        typer.echo("keyhole: stopped", err=True)
        raise SystemExit(STOPPED) from None
    except OSError as error:
        typer.echo(f"keyhole: {error}", err=True)
        raise SystemExit(USAGE) from error
