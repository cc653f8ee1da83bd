"""TARGET and everything that can be said about it, in one place for all commands that ask a box.

A command is decorated with `asks_a_box` and takes one argument `box`; on the command line that is
TARGET with the options below, each of which is an option of `open_oracle` (docs/guide/boxes.md).
"""

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from keyhole.cli.options import (
    Adapter,
    AnswerPath,
    Batch,
    Concurrency,
    Device,
    Dtype,
    Header,
    High,
    Input,
    LanguageModel,
    Low,
    MaxLength,
    MaxNorm,
    ModelName,
    Output,
    PlainToken,
    Rate,
    Replicas,
    Request,
    Scheduler,
    Timeout,
    TokenEnv,
    Tokens,
    Top,
    Vocabulary,
    Weights,
    Width,
)

if TYPE_CHECKING:
    from keyhole.oracles.base import Oracle

# names on the command line that open_oracle calls differently, or that are not its options
OTHERWISE = {"model_name": "model", "scheduler": "cluster"}
SPOKEN = ("/v1", "/completions", "/completion", "/chat/completions")  # ends of addresses
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
    low: Low = None
    high: High = None
    vocabulary: Vocabulary = None
    replicas: Replicas = None
    batch: Batch = None
    scheduler: Scheduler = None
    rate: Rate = None
    concurrency: Concurrency = None
    timeout: Timeout = None
    token_env: TokenEnv = None
    plain_token: PlainToken = None
    header: Header = None
    request: Request = None
    answer: AnswerPath = None
    model_name: ModelName = None
    input: Input = None
    output: Output = None
    tokens: Tokens = None
    language_model: LanguageModel = None
    top: Top = None
    weights: Weights = None
    dtype: Dtype = None
    device: Device = None
    adapter: Adapter = None

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
        if self.request is None:
            refuse_language_models(targets)
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


def refuse_language_models(targets: list[str]) -> None:
    """Raises where an address is that of an API of language models, with the option that is
    missing."""
    from keyhole.errors import InvalidArgument

    for target in targets:
        path = re.sub(r"[?#].*", "", target).rstrip("/").lower()
        if re.match(r"https?://", path) and path.endswith(SPOKEN):
            raise InvalidArgument(
                f"{path} looks like the API of a language model: add --language-model (it is then "
                "asked with the numbers of tokens), or --request where it takes vectors in a JSON "
                "of its own"
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
