"""A box behind the Open Inference Protocol v2 (KServe, Triton, MLServer, `keyhole serve`).

Width, number format and names come from the endpoint's metadata; tensors travel in the binary
extension where the endpoint offers it, else as JSON (which keeps every bit of a float64 too).
Every request carries an id made of its queries; an answer with another id is another's answer.
"""

import json
import re
import threading
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, KeyholeError, OracleError
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.http.client import Access, Answer, Endpoint, Forbidden, Unreachable
from keyhole.oracles.http.retry import RetryPolicy, Transient
from keyhole.oracles.http.tensors import DATATYPES, HEADER_LENGTH, Malformed, Tensor, decode, encode
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.parts import Parted
from keyhole.text import clean

BINARY_EXTENSION = "binary_tensor_data"
MODEL_PATH = re.compile(r"(.*?)/v2/models/([^/]+)(?:/versions/([^/]+))?(?:/infer)?/?$")
OPENING = RetryPolicy(attempts=4)  # metadata: a wrong address should not take minutes to show
DEFAULT_INPUT = "tokens"  # where an endpoint's metadata names no input
FLOATS = ("FP16", "FP32", "FP64")

Encoding = Literal["auto", "binary", "json"]


@dataclass(frozen=True)
class Metadata:
    """What the endpoint says about its model."""

    path: str
    input: str
    output: str | None  # None: the only one
    datatype: str
    width: int | None
    max_length: int | None
    identity: str
    binary: bool


class OpenInferenceOracle(Parted):
    """Asks an endpoint that speaks the protocol."""

    def __init__(
        self, endpoint: Endpoint, metadata: Metadata, spec: Spec, batch: int | None = None
    ) -> None:
        self.endpoint, self.metadata, self.spec = endpoint, metadata, spec
        self.batch, self.concurrency = polite(batch, endpoint.access), endpoint.access.concurrency

    @property
    def traffic(self) -> Any:
        return self.endpoint.traffic

    def answer(self, queries: QueryBatch, stop: threading.Event) -> Array:
        meta, name = self.metadata, queries.digest().hex()
        tokens = queries.shared_tokens().astype(DATATYPES[meta.datatype], copy=False)
        head: dict[str, Any] = {"id": name}
        if meta.output is not None:
            head["outputs"] = [{"name": meta.output, "parameters": {"binary_data": meta.binary}}]
        elif meta.binary:
            head["parameters"] = {"binary_data_output": True}
        body, split = encode(head, "inputs", Tensor(meta.input, tokens), meta.binary)
        headers = {"Content-Type": "application/json"}
        if meta.binary:
            headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(split)}

        def read(answer: Answer) -> Array:
            return self._read(answer, name, len(queries))

        answers: Array = self.endpoint.ask(
            "POST",
            f"{meta.path}/infer",
            content=body,
            headers=headers,
            queries=len(queries),
            read=read,
            stop=stop,
        )
        return answers

    def _read(self, answer: Answer, name: str, count: int) -> Array:
        try:
            message, tensors = decode(answer.body, answer.headers.get(HEADER_LENGTH), "outputs")
        except Malformed as error:
            raise Transient(f"{self.endpoint.identity}: half an answer: {error}") from error
        if message.get("id", name) != name:
            raise Transient(f"{self.endpoint.identity} gave the answer to another request")
        wanted = self.metadata.output
        chosen = [t for t in tensors if wanted is None or t.name == wanted]
        if len(chosen) != 1:
            names = ", ".join(t.name for t in tensors)
            raise OracleError(
                f"{self.endpoint.identity} answered with the outputs {names or '(none)'}; choose "
                "one of them with output= (--output)"
            )
        return sound(last_position(chosen[0].array), count, self.endpoint.identity)

    def close(self) -> None:
        self.endpoint.close()


def polite(batch: int | None, access: Access) -> int | None:
    """Parts of at most one second's worth of queries, where a rate is to be kept; parts at all,
    where several are to be on their way."""
    if batch is None and access.concurrency > 1:
        batch = 64  # queries of a part, where several are on their way at a time
    if access.rate is None:
        return batch
    most = max(1, int(access.rate))
    return most if batch is None else min(batch, most)


def last_position(answers: Array) -> Array:
    """(n, length, outputs) is a sequence of answers: the last is the one that is asked for."""
    return answers[:, -1, :] if answers.ndim == 3 and answers.shape[1] else answers


def sound(answers: Array, count: int, who: str) -> Array:
    """The answers, or a Transient where asking again may help."""
    if answers.ndim == 0 or answers.shape[0] != count:
        got = answers.shape[0] if answers.ndim else 1
        raise Transient(f"{who} gave {got} answers to {count} queries")
    if answers.dtype.kind == "f" and not np.isfinite(answers).all():
        raise Transient(f"{who} gave an answer that is not a finite number")
    return answers.astype(answers.dtype.newbyteorder("="))


def open_inference(
    url: str,
    width: int | None,
    domain: Domain,
    precision: NoiseModel | None,
    *,
    access: Access | None = None,
    model: str | None = None,
    version: str | None = None,
    input: str | None = None,
    output: str | None = None,
    datatype: str | None = None,
    encoding: Encoding = "auto",
    batch: int | None = None,
) -> OpenInferenceOracle:
    """The box at `url`: `http(s)://host[:port]` or `…/v2/models/NAME[/versions/N]`."""
    if encoding not in ("auto", "binary", "json"):
        raise InvalidArgument(f"encoding must be auto, binary or json, got {encoding!r}")
    if datatype is not None and datatype not in FLOATS:
        raise InvalidArgument(f"datatype must be one of {', '.join(FLOATS)}, got {datatype!r}")
    if urlsplit(url).query:
        raise InvalidArgument("the protocol's URLs have no query; leave out what follows the '?'")
    endpoint = Endpoint(url, access or Access())
    try:
        path = _model_path(endpoint, model, version)
        metadata = _metadata(endpoint, path, input, output, datatype, encoding)
        if width is None:
            width = metadata.width
        if width is None:
            raise InvalidArgument(f"{metadata.identity} does not tell its width: pass width=")
        if metadata.width not in (None, width):
            raise InvalidArgument(
                f"{metadata.identity} says its width is {metadata.width}, not {width}"
            )
        if domain.max_length is None and metadata.max_length is not None:
            domain = Domain(
                metadata.max_length, domain.max_norm, domain.low, domain.high, domain.vocabulary
            )
        spec = Spec(width, None, domain, precision, metadata.identity)
    except BaseException as error:
        endpoint.close()
        if isinstance(error, (KeyholeError, MemoryError)) or not isinstance(error, Exception):
            raise
        raise OracleError(  # what an endpoint says about itself may be anything
            f"{endpoint.identity} describes itself in an unknown way ({error})"
        ) from error
    return OpenInferenceOracle(endpoint, metadata, spec, batch)


def _fetch(endpoint: Endpoint, method: str, path: str, content: bytes = b"") -> Any:
    def read(answer: Answer) -> Any:
        try:
            return json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise Transient(f"{endpoint.identity} does not speak JSON at {path}") from error

    return endpoint.ask(method, path, content=content, read=read, patience=OPENING)


def _model_path(endpoint: Endpoint, model: str | None, version: str | None) -> str:
    parts = urlsplit(endpoint.url)
    match = MODEL_PATH.match(parts.path)
    base = parts.path.rstrip("/").removesuffix("/v2")
    if match:
        base, named, named_version = match.groups()
        if model is not None and quote(model, safe="") != named:
            raise InvalidArgument(f"the URL names the model {named}, not {model}")
        model, version = named, version or named_version
    else:
        model = quote(model or _only_model(endpoint, base), safe="")
    path = f"{base}/v2/models/{model}"
    return path if version is None else f"{path}/versions/{quote(version, safe='')}"


def _only_model(endpoint: Endpoint, base: str) -> str:
    """The model's name where the endpoint has just one (an extension that most servers have)."""
    try:
        listed = _fetch(endpoint, "POST", f"{base}/v2/repository/index", b"{}")
        names = [str(entry["name"]) for entry in listed]
    except Forbidden:
        raise
    except (OracleError, KeyError, TypeError) as error:
        if isinstance(error.__cause__, Unreachable):
            raise
        raise OracleError(
            f"{endpoint.identity} does not list its models ({error}): name one, as in "
            "https://host/v2/models/NAME. An endpoint with a JSON of its own is asked with "
            "request= and answer= (--request, --answer)"
        ) from error
    if len(names) == 1:
        return names[0]
    raise InvalidArgument(
        f"{endpoint.identity} has the models {', '.join(names) or '(none)'}: name one, as in "
        "https://host/v2/models/NAME"
    )


def _metadata(
    endpoint: Endpoint,
    path: str,
    input: str | None,
    output: str | None,
    datatype: str | None,
    encoding: Encoding,
) -> Metadata:
    identity = clean(f"{origin_of(endpoint.url)}{path}")
    chosen, outputs = _describe(_fetch(endpoint, "GET", path), input, identity)
    shape = chosen["shape"]
    _check_shape(shape, chosen["name"], identity)
    kind = datatype or chosen.get("datatype", "FP64")
    if kind not in FLOATS:
        raise OracleError(
            f"input {chosen['name']} of {identity} takes {kind}, not vectors of floating numbers"
        )
    only = _output(outputs, output, identity)
    binary = encoding == "binary" or (encoding == "auto" and _speaks_binary(endpoint, path))
    if kind == "FP16" and not binary:
        raise OracleError(f"{identity} takes FP16, which JSON cannot carry")
    positive = [n if n > 0 else None for n in shape] or [None, None, None]
    name = str(chosen["name"])
    return Metadata(path, name, only, kind, positive[2], positive[1], identity, binary)


def _describe(told: Any, input: str | None, identity: str) -> tuple[dict[str, Any], list[str]]:
    """The input to be asked, its shape as whole numbers, and the names of the outputs."""
    try:
        inputs = [dict(entry) for entry in told.get("inputs") or []]
        outputs = [str(entry["name"]) for entry in told.get("outputs") or []]
        chosen = _input(inputs, input, identity)
        return {**chosen, "shape": [int(n) for n in chosen.get("shape", [])]}, outputs
    except InvalidArgument:
        raise
    except (TypeError, KeyError, ValueError, AttributeError, OverflowError) as error:
        raise OracleError(
            f"{identity} describes itself in an unknown way ({error}). An endpoint with a JSON of "
            "its own is asked with request= and answer= (--request, --answer)"
        ) from error


def _check_shape(shape: list[int], name: Any, identity: str) -> None:
    max_side = 2**20  # width or length that an endpoint may claim: a token of 8 MB
    if any(n > max_side for n in shape):
        raise OracleError(
            f"{identity} says that its input has shape {shape}: no model has a side of more than "
            f"{max_side}"
        )
    if shape and len(shape) != 3:
        raise OracleError(
            f"input {name} of {identity} has shape {shape}; a sequence model takes "
            "(batch, length, width)"
        )


def _output(outputs: list[str], wanted: str | None, identity: str) -> str | None:
    """The output that is asked for, or the only one; None where none is named."""
    if wanted is not None and outputs and wanted not in outputs:
        raise InvalidArgument(f"{identity} has the outputs {', '.join(outputs)}, not {wanted}")
    if wanted is None and len(outputs) > 1:
        raise InvalidArgument(
            f"{identity} has the outputs {', '.join(outputs)}; choose one with output= (--output)"
        )
    return wanted or (outputs[0] if outputs else None)


def origin_of(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _input(inputs: list[dict[str, Any]], wanted: str | None, identity: str) -> dict[str, Any]:
    if not inputs:
        return {"name": wanted or DEFAULT_INPUT}
    names = [str(entry["name"]) for entry in inputs]
    if wanted is None and len(inputs) == 1:
        return inputs[0]
    if wanted not in names:
        raise InvalidArgument(
            f"{identity} has the inputs {', '.join(names)}; choose one with input= (--input)"
        )
    if len(inputs) > 1:
        raise InvalidArgument(
            f"{identity} needs the inputs {', '.join(names)} together; put a function around it"
        )
    return inputs[names.index(wanted)]


def _speaks_binary(endpoint: Endpoint, path: str) -> bool:
    base = path.split("/v2/models/")[0]
    try:
        return BINARY_EXTENSION in (_fetch(endpoint, "GET", f"{base}/v2").get("extensions") or [])
    except (OracleError, AttributeError, TypeError):
        return False  # JSON is what every endpoint of the protocol speaks
