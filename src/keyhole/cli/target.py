"""TARGET and everything that can be said about it, in one place for all commands that ask a box.

A command is decorated with `asks_a_box` and takes one argument `box`; on the command line that is
TARGET with the options below, each of which is an option of `open_oracle` (docs/guide/boxes.md).
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
LANGUAGE = "Language models"
MANY = "Many queries, many machines"
# names on the command line that open_oracle calls differently, or that are not its options
OTHERWISE = {"model_name": "model", "scheduler": "cluster"}
OWN = ("target", "replicas", "width", "max_length", "max_norm", "vocabulary", "request", "header")
LANGUAGE_ONLY = ("tokens", "language_model", "top")


@dataclass(frozen=True)
class Box:
    """What the command line says about a box."""

    target: Annotated[
        str | None,
        typer.Argument(
            help="`package.module:attribute` (imports that code), `hf:FOLDER#part` (a local "
            "transformers model), `gguf:FILE#part`, a `.onnx` file, an `http(s)://` endpoint, or "
            "a saved keyhole model.",
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
    header: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ENV",
            help="A header of every request, its value in the environment variable ENV; repeat it "
            "for more.",
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
            help="Where the numbers are in its reply, as in result.0.scores or "
            "predictions.*.score (* takes every entry).",
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
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            help="A language model: queries are numbers of N tokens. `--language-model` where it "
            "tells N itself.",
            rich_help_panel=LANGUAGE,
        ),
    ] = None
    language_model: Annotated[
        bool | None,
        typer.Option(
            "--language-model",
            help="TARGET takes the numbers of tokens: a callable, or a server with OpenAI's API "
            "or llama.cpp's own.",
            rich_help_panel=LANGUAGE,
        ),
    ] = None
    top: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Most log-probabilities to ask a server for.",
            rich_help_panel=LANGUAGE,
        ),
    ] = None
    weights: Annotated[
        Path | None,
        typer.Option(
            help="State dict or safetensors file to load into a torch module.",
            rich_help_panel=NAMES,
        ),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="Number format a torch module computes in, as in float64.",
            rich_help_panel=NAMES,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where a torch module computes, as in cuda:0.",
            rich_help_panel=NAMES,
        ),
    ] = None

    adapter: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How to call a torch module: `package.module:function` of module and tokens.",
            rich_help_panel=NAMES,
        ),
    ] = None

    def check(self) -> None:
        """Raises where a name cannot be right, before anything heavy is imported."""
        from keyhole.targets import check_format, check_target

        for name in (self.target, *(self.replicas or []), self.adapter):
            if name is not None:
                check_target(name)
        if self.dtype is not None:
            check_format(self.dtype.removeprefix("torch."))

    @property
    def speaks(self) -> bool:
        """Whether the target is said to be a language model."""
        return bool(self.language_model) or self.tokens is not None

    def _opened_language_model(self, targets: list[str], journal: Path | None) -> "Oracle":
        from keyhole.errors import InvalidArgument

        if len(targets) > 1:
            raise InvalidArgument("replicas of a language model are not supported: name one target")
        vectors = ("width", "max_norm", "low", "high", "vocabulary", "request", "answer", "input")
        more = ("output", "weights", "scheduler", "batch")
        strange = [name for name in (*vectors, *more) if getattr(self, name) is not None]
        if strange:
            raise InvalidArgument(
                f"a language model has no {', '.join('--' + name for name in strange)}"
            )
        names = ("rate", "concurrency", "timeout", "token_env", "plain_token", "top")
        options = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.header:
            options["headers"] = read_headers(self.header)
        if journal is not None and targets[0].lower().startswith(("http://", "https://")):
            options["journal"] = journal
        return open_named_language_model(
            targets[0], self.tokens, self.max_length, self.model_name, options
        )

    def opened(self, width: int | None = None, journal: Path | None = None) -> "Oracle":
        """The oracle; `width` where the command knows it from elsewhere, and the `journal` of the
        run, beside which a language model's server keeps what it told about itself."""
        from keyhole.oracles.open import open_oracle

        targets = [*([] if self.target is None else [self.target]), *(self.replicas or [])]
        if not targets:
            raise typer.BadParameter("name the box: TARGET, or --target", param_hint="TARGET")
        if self.speaks:
            return self._opened_language_model(targets, journal)
        options = {
            OTHERWISE.get(field.name, field.name): getattr(self, field.name)
            for field in fields(self)
            if field.name not in (*OWN, *LANGUAGE_ONLY) and getattr(self, field.name) is not None
        }
        if self.vocabulary is not None:
            options["vocabulary"] = read_vocabulary(self.vocabulary)
        if self.request is not None:
            options["request"] = read_request(self.request)
        if self.header:
            options["headers"] = read_headers(self.header)
        return open_oracle(
            targets[0] if len(targets) == 1 else targets,
            self.width or width,
            self.max_length,
            self.max_norm,
            **options,
        )


def open_named_language_model(
    target: str,
    tokens: int | None,
    max_length: int | None,
    model: str | None,
    options: dict[str, Any],
) -> "Oracle":
    """The language model behind an address or `package.module:attribute`."""
    from keyhole.oracles.language_model.open import open_language_model
    from keyhole.oracles.open import load_named

    named: Any = target
    if not target.lower().startswith(("http://", "https://")):
        named = load_named(target)
    return open_language_model(
        named, vocabulary=tokens, max_length=max_length, model=model, **options
    )


def read_headers(given: list[str]) -> dict[str, str]:
    """Names of headers with the environment variables that hold their values."""
    pairs = [text.partition("=") for text in given]
    wrong = [text for text, (name, _, variable) in zip(given, pairs, strict=True)
             if not name or not variable]  # fmt: skip
    if wrong:
        raise typer.BadParameter(
            f"NAME=ENV, where the environment variable ENV holds the value, got {wrong[0]!r}",
            param_hint="--header",
        )
    return {name: variable for name, _, variable in pairs}


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
        box = Box(**told)
        box.check()
        command(box=box, **given)

    spread_out.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return spread_out
