"""The `keyhole` command and how it ends: exit codes, one readable sentence per error."""

import json
import sys
import traceback
from enum import IntEnum
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from keyhole import __version__
from keyhole.errors import BudgetExhausted, Interrupted, KeyholeError, OracleError
from keyhole.text import clean


class Exit(IntEnum):
    """How a command ended, for scripts."""

    OK = 0  # recovered, agrees
    DIFFERS = 1  # rejected, differs
    USAGE = 2
    ORACLE = 3  # the box failed
    BUDGET = 4
    UNSUPPORTED = 5  # recognised, and there is no learner for it
    FAULT = 70  # of Keyhole's own
    STOPPED = 130  # by Ctrl-C


class Commands(TyperGroup):
    """The commands: with --json an error is an object on stdout too, as a result is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without a word, the list of commands; typer's own way to say it prints nothing."""
        if not args and not ctx.resilient_parsing:  # which completion asks for
            typer.echo(ctx.get_help())
            raise typer.Exit(Exit.USAGE)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except KeyboardInterrupt as pressed:  # typer would leave without a word
            stopped = Interrupted("stopped")
            _as_json(stopped)
            raise stopped from pressed
        except Exception as error:
            _as_json(error)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The list of commands in plain text: to load what draws the help of a command would take
        as long as everything else."""
        super(TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each with the whole first sentence of its help."""
        rows = [
            (name, " ".join((command.help or "").partition("\n\n")[0].split()))
            for name, command in self.commands.items()
            if not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="keyhole",
    cls=Commands,
    help="Recovers attention models through their answers alone.",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with: keyhole demo. For models you own or are authorised to test.",
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


def exit_code(error: BaseException) -> int:
    if isinstance(error, BudgetExhausted):
        return Exit.BUDGET
    if isinstance(error, OracleError):
        return Exit.ORACLE
    if isinstance(error, Interrupted):
        return Exit.STOPPED
    if isinstance(error, (KeyholeError, OSError, MemoryError)):
        return Exit.USAGE
    return int(getattr(error, "exit_code", Exit.FAULT))  # typer's own errors tell


def sentence(error: BaseException) -> str:
    """What happened, and what to do where the system's own words do not say it."""
    if isinstance(error, MemoryError):
        return "out of memory: ask fewer queries at a time (--batch), or use a larger machine"
    if isinstance(error, OSError) and error.filename is not None:
        place = f"{error.filename} cannot be read or written ({error.strerror})"
        return clean(f"{place}: check the name, or name another place")
    return clean(str(getattr(error, "format_message", error.__str__)()))


def error_record(error: BaseException) -> dict[str, Any]:
    """An error as it stands on stdout with --json."""
    code = exit_code(error)
    return {"error": type(error).__name__, "message": sentence(error), "exit_code": code}


def _as_json(error: BaseException) -> None:
    if "--json" in sys.argv:
        typer.echo(json.dumps(error_record(error)))


def main() -> None:
    """Runs the command; a KeyholeError becomes one sentence on stderr and an exit code."""
    try:
        from keyhole.cli import commands  # noqa: F401 - registers the commands

        sys.path.insert(0, "")  # package.module:attribute may live where the user stands
        app()
    except KeyboardInterrupt:
        typer.echo("keyhole: stopped", err=True)
        raise SystemExit(Exit.STOPPED) from None
    except (KeyholeError, OSError, MemoryError) as error:
        typer.echo(f"keyhole: {sentence(error)}", err=True)
        raise SystemExit(exit_code(error)) from error
    except Exception as error:
        typer.echo(clean("".join(traceback.format_exception(error))), err=True)
        typer.echo(
            f"keyhole: this is a fault of Keyhole {__version__}, not of your box: please report "
            "the lines above",
            err=True,
        )
        raise SystemExit(Exit.FAULT) from error
