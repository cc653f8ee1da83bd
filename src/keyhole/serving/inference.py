"""What a request asks and what the reply says, without any HTTP: the protocol's server side."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import DomainError, InvalidArgument, OracleError
from keyhole.oracles.base import Oracle
from keyhole.oracles.http.tensors import (
    HEADER_LENGTH,
    Malformed,
    Tensor,
    datatype_of,
    decode,
    encode,
    json_part,
)
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.validate import Validator

INPUT, OUTPUT = "tokens", "answers"
ACCEPTED = ("FP16", "FP32", "FP64")


class Refused(Exception):
    """A request that gets an error status and a sentence."""

    def __init__(self, status: int, message: str, headers: tuple[tuple[str, str], ...] = ()):
        super().__init__(message)
        self.status, self.headers = status, headers


@dataclass(frozen=True)
class Limits:
    """What one request may ask for."""

    body: int = 64 * 2**20  # bytes
    batch: int = 4096  # queries
    length: int = 4096  # tokens of a sequence
    json: int = 8 * 2**20  # bytes of JSON: while it is read, nothing else goes on


@dataclass(frozen=True, eq=False)
class Reply:
    """The body of a good answer."""

    body: bytes
    headers: tuple[tuple[str, str], ...]


class _Given(QueryBatch):
    """Queries whose tokens lie there already, one after the other."""

    def tokens(self) -> Array:
        table: Array = self.bank.table  # type: ignore[attr-defined]
        return table.reshape(len(self), self.length, self.width)


class Inference:
    """Answers inference requests from an oracle."""

    def __init__(self, oracle: Oracle, name: str, limits: Limits, dtype: Any = np.float64) -> None:
        self.oracle, self.name, self.limits = Validator(oracle), name, limits
        self.datatype = datatype_of(np.dtype(dtype))

    def metadata(self) -> dict[str, Any]:
        spec = self.oracle.spec
        answer = [-1] if spec.outputs is None else [-1, spec.outputs]
        return {
            "name": self.name,
            "versions": ["1"],
            "platform": "keyhole",
            "inputs": [{"name": INPUT, "datatype": self.datatype, "shape": [-1, -1, spec.width]}],
            "outputs": [{"name": OUTPUT, "datatype": self.datatype, "shape": answer}],
        }

    def infer(self, body: bytes | bytearray, header_length: str | None) -> Reply:
        """The reply to a request's body; Refused if there is something wrong with it."""
        try:
            if json_part(body, header_length) > self.limits.json:
                raise Refused(
                    413,
                    f"a request may have {self.limits.json} bytes of JSON: send fewer queries at a "
                    "time, or numbers in the binary extension",
                )
            message, tensors = decode(body, header_length, "inputs")
            binary = _wants_binary(message)
            name = message.get("id", "")
            if not isinstance(name, str):
                raise Malformed('"id" must be a string')
            tokens = self._tokens(tensors)
        except Malformed as error:
            raise Refused(400, str(error)) from error
        answers = self._answers(tokens)
        head = {"model_name": self.name, "model_version": "1", "id": name}
        reply, split = encode(head, "outputs", Tensor(OUTPUT, answers), binary)
        if not binary:
            return Reply(reply, (("content-type", "application/json"),))
        return Reply(
            reply,
            (("content-type", "application/octet-stream"), (HEADER_LENGTH.lower(), str(split))),
        )

    def _tokens(self, tensors: list[Tensor]) -> Array:
        width, limits = self.oracle.spec.width, self.limits
        if len(tensors) != 1 or tensors[0].name != INPUT:
            raise Malformed(f'exactly one input is needed, "{INPUT}"')
        tensor = tensors[0]
        if tensor.datatype not in ACCEPTED:
            raise Malformed(f"{INPUT} must be {', '.join(ACCEPTED)}, got {tensor.datatype}")
        shape = tensor.array.shape
        if len(shape) != 3 or shape[2] != width or 0 in shape:
            raise Malformed(f"{INPUT} must have shape [batch, length, {width}], got {list(shape)}")
        if shape[0] > limits.batch:
            raise Refused(413, f"at most {limits.batch} queries in a request, got {shape[0]}")
        if shape[1] > limits.length:
            raise Refused(413, f"sequences of at most {limits.length} tokens, got {shape[1]}")
        return np.require(tensor.array, np.float64, ("ALIGNED",))

    def _answers(self, tokens: Array) -> Array:
        try:
            with np.errstate(all="ignore"):  # what overflows is refused below, in words
                return self.oracle.ask(_Given.of(tokens, "inference"))
        except (DomainError, InvalidArgument) as error:
            raise Refused(400, str(error)) from error
        except OracleError as error:
            if not np.isfinite(tokens).all():
                raise Refused(400, f"{INPUT} holds NaN or infinity") from error
            raise Refused(422, f"the model has no answer to this: {error}") from error


def _wants_binary(message: dict[str, Any]) -> bool:
    """Whether the output is wanted in the binary extension: said of it, or of all outputs."""
    parameters, outputs = message.get("parameters") or {}, message.get("outputs") or []
    if not isinstance(parameters, dict) or not isinstance(outputs, list):
        raise Malformed('"parameters" must be an object and "outputs" a list')
    wanted = bool(parameters.get("binary_data_output", False))
    for output in outputs:
        if not isinstance(output, dict) or output.get("name") != OUTPUT:
            raise Malformed(f'the only output is "{OUTPUT}"')
        own = output.get("parameters") or {}
        if not isinstance(own, dict):
            raise Malformed('"parameters" must be an object')
        wanted = bool(own.get("binary_data", wanted))
    return wanted
