"""The options that only some kinds of boxes have, by name and type.

`open_oracle` and `open_language_model` take them as keywords, and editors and type checkers know
them from here. Which kind of box has which is written in docs/guide/boxes.md, and is checked when
a box is opened.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from keyhole.oracles.http.retry import RetryPolicy


class EndpointOptions(TypedDict, total=False):
    """How an HTTP endpoint is used."""

    token_env: str  # environment variable that holds the token
    plain_token: bool  # whether the token may travel unencrypted to another machine
    timeout: float  # seconds for one exchange
    rate: float | None  # queries per second, at most
    concurrency: int  # exchanges at a time
    patience: "RetryPolicy"
    headers: Mapping[str, str]  # further headers: names of the variables that hold their values


class BoxOptions(EndpointOptions, total=False):
    """What a box may be told when it is opened, beside its domain."""

    # torch modules, transformers models, GGUF files
    adapter: Callable[[Any, Any], Any] | str | None  # how the module is called
    dtype: Any  # number format to compute in
    device: Any  # where to compute
    weights: str | Path | None  # state dict or safetensors file to load first
    # inputs and outputs of ONNX files and endpoints, by name
    input: str | None
    output: str | None
    # endpoints of the Open Inference Protocol
    model: str | None
    version: str | None
    datatype: str | None
    encoding: str
    # endpoints with a JSON of their own
    request: Any
    answer: str


class LanguageModelOptions(EndpointOptions, total=False):
    """What the server of a language model may be told when it is opened."""

    top: int  # most log-probabilities to ask for
    names: list[str]  # the text of every token
    journal: str | Path  # of the run; what is asked to find out what a server does is kept beside
