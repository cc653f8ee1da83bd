"""TARGET and everything that can be said about it, in one place for all commands that ask a box.

A command is decorated with `asks_a_box` and takes one argument `box`; on the command line that is
TARGET with the options below, each of which is an option of `open_oracle` (docs/boxes.md).
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from keyhole.cli.options import MaxLength, MaxNorm, Width

if TYPE_CHECKING:
    from keyhole.oracles.base import Oracle

ACCEPTS, HTTP, NAMES = "What the box accepts", "HTTP endpoints", "Inside files and endpoints"
MANY = "Many queries, many machines"
# names on the command line that open_oracle calls differently, or that are not its options
OTHERWISE = {"model_name": "model", "scheduler": "cluster"}
OWN = ("target", "replicas", "width", "max_length", "max_norm", "vocabulary", "request")


@dataclass(frozen=True)
class Box:
    """What the command line says about a box."""

    target: Annotated[
        str | None,
        typer.Argument(
            help="`package.module:attribute` (imports that code), a `.onnx` file, an `http(s)://` "
            "endpoint, or a saved keyhole model.",
            show_default=False,
        ),
    ] = None
    width: Width = None
    max_length: MaxLength = None
    max_norm: MaxNorm = None
    low: Annotated[
        float | None, typer.Option(help="Smallest entry of a token.", rich_help_panel=ACCEPTS)
    ] = None
    high: Annotated[
        float | None, typer.Option(help="Largest entry of a token.", rich_help_panel=ACCEPTS)
    ] = None
    vocabulary: Annotated[
        Path | None,
        typer.Option(help="Only these tokens: a .npy file.", rich_help_panel=ACCEPTS),
    ] = None
    replicas: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="TARGET",
            help="A replica of the same box; repeat it for more.",
            rich_help_panel=MANY,
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Most queries at a time.", rich_help_panel=MANY),
    ] = None
    scheduler: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Ask through a Dask cluster, as in tcp://host:8786.",
            rich_help_panel=MANY,
        ),
    ] = None
    rate: Annotated[
        float | None, typer.Option(help="Queries per second, at most.", rich_help_panel=HTTP)
    ] = None
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Requests at a time.", rich_help_panel=HTTP)
    ] = None
    timeout: Annotated[
        float | None, typer.Option(help="Seconds for one request.", rich_help_panel=HTTP)
    ] = None
    token_env: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Environment variable that holds the token, if not KEYHOLE_TOKEN.",
            rich_help_panel=HTTP,
        ),
    ] = None
    plain_token: Annotated[
        bool | None,
        typer.Option(
            "--plain-token",
            help="Let the token travel unencrypted to another machine.",
            rich_help_panel=HTTP,
        ),
    ] = None
    request: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='For an endpoint with a JSON of its own: the message, with "$tokens" where a '
            'batch of sequences goes or "$sequence" for one; @FILE reads it from a file.',
            rich_help_panel=HTTP,
        ),
    ] = None
    answer: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Where the numbers are in its reply, as in result.0.scores.",
            rich_help_panel=HTTP,
        ),
    ] = None
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="NAME", help="Of several at an endpoint.", rich_help_panel=NAMES
        ),
    ] = None
    input: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which input takes the tokens.", rich_help_panel=NAMES),
    ] = None
    output: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Which output answers.", rich_help_panel=NAMES),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(
            help="State dict or safetensors file to load into a torch module.",
            rich_help_panel=NAMES,
        ),
    ] = None

    def opened(self, width: int | None = None) -> "Oracle":
        """The oracle; `width` where the command knows it from elsewhere."""
        from keyhole.oracles.open import open_oracle

        targets = [*([] if self.target is None else [self.target]), *(self.replicas or [])]
        if not targets:
            raise typer.BadParameter("name the box: TARGET, or --target", param_hint="TARGET")
        options = {
            OTHERWISE.get(field.name, field.name): getattr(self, field.name)
            for field in fields(self)
            if field.name not in OWN and getattr(self, field.name) is not None
        }
        if self.vocabulary is not None:
            options["vocabulary"] = read_vocabulary(self.vocabulary)
        if self.request is not None:
            options["request"] = read_request(self.request)
        return open_oracle(
            targets[0] if len(targets) == 1 else targets,
            self.width or width,
            self.max_length,
            self.max_norm,
            **options,
        )


def read_request(text: str) -> str:
    """The message itself, or what is in the file behind the @."""
    return Path(text[1:]).read_text() if text.startswith("@") else text


def read_vocabulary(path: Path) -> Any:
    """The tokens in a .npy file, which can hold numbers and nothing else."""
    import numpy as np

    from keyhole.errors import FileFormatError

    try:
        return np.load(path, allow_pickle=False)
    except OSError:
        raise
    except Exception as error:  # a damaged file may break its reader anywhere
        raise FileFormatError(f"{path} is not a .npy file with an array of numbers") from error


def asks_a_box(command: Callable[..., None]) -> Callable[..., None]:
    """The command with its argument `box` spread out into TARGET and the options of a box."""
    own = inspect.signature(command).parameters
    hints = get_type_hints(Box, include_extras=True)
    spread = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(Box)
    ]
    parameters: list[inspect.Parameter] = []
    for name, parameter in own.items():
        if name == "box":
            parameters += spread
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def spread_out(**given: Any) -> None:
        told = {field.name: given.pop(field.name) for field in fields(Box)}
        command(box=Box(**told), **given)

    spread_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return spread_out
