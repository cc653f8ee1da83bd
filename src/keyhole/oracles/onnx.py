"""An ONNX file as an oracle, run by onnxruntime on the CPU.

Dynamic batch and length are used as they are; a file with a fixed batch is asked that many
queries at a time (filled up with copies), one at a time if that is what it takes.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import FileFormatError, InvalidArgument, OracleError
from keyhole.extras import need
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

FLOATS = {
    "tensor(float16)": np.float16,
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
}


@dataclass(frozen=True)
class Ports:
    """Which input is asked, which output answers, and what the file fixes."""

    input: str
    output: str
    dtype: Any
    batch: int | None  # None: dynamic
    length: int | None
    width: int | None


class OnnxOracle(Oracle):
    """Asks a session. Travels to other processes as the path, never as the session."""

    def __init__(self, path: Path, ports: Ports, spec: Spec, session: Any = None) -> None:
        self.path, self.ports, self.spec = path, ports, spec
        self._session = session or open_session(path)

    def __reduce__(self) -> Any:
        return OnnxOracle, (self.path, self.ports, self.spec)

    def ask(self, queries: QueryBatch) -> Array:
        ports = self.ports
        if ports.length is not None and queries.length != ports.length:
            raise OracleError(
                f"{self.path} takes sequences of {ports.length} tokens and no others; export it "
                "with a dynamic length"
            )
        tokens = queries.tokens().astype(ports.dtype)
        if ports.batch is None:
            return self._run(tokens)
        parts = [
            self._fixed(tokens[k : k + ports.batch]) for k in range(0, len(tokens), ports.batch)
        ]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _fixed(self, tokens: Array) -> Array:
        missing = (self.ports.batch or 1) - len(tokens)
        padded = np.concatenate([tokens, np.repeat(tokens[:1], missing, axis=0)])
        return self._run(padded)[: len(tokens)]

    def _run(self, tokens: Array) -> Array:
        try:
            (answers,) = self._session.run([self.ports.output], {self.ports.input: tokens})
        except Exception as error:  # onnxruntime's exceptions share no base of their own
            raise OracleError(
                f"{self.path} failed on tokens of shape {tokens.shape}: {str(error)[:500]}"
            ) from error
        array: Array = np.asarray(answers)
        return array[:, -1, :] if array.ndim == 3 and len(array) == len(tokens) else array


def open_onnx(
    path: str | Path,
    width: int | None,
    domain: Domain,
    precision: NoiseModel | None,
    *,
    input: str | None = None,
    output: str | None = None,
) -> OnnxOracle:
    """The model in a `.onnx` file as a box."""
    path = Path(path).resolve()
    session = open_session(path)
    ports = _ports(session, path, input, output)
    if width is not None and ports.width not in (None, width):
        raise InvalidArgument(f"{path} has width {ports.width}, not {width}")
    width = width or ports.width
    if width is None:
        raise InvalidArgument(f"{path} does not tell its width: pass width= (--width)")
    if ports.length is not None and domain.max_length is None:
        domain = Domain(ports.length, domain.max_norm, domain.low, domain.high, domain.vocabulary)
    name = f"{path.name}:{hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()}"
    return OnnxOracle(path, ports, Spec(width, None, domain, precision, name), session)


def open_session(path: Path) -> Any:
    runtime = need("onnxruntime", "onnx", "an ONNX file")
    if not path.is_file():
        raise FileFormatError(f"{path} does not exist or is not a file")
    options = runtime.SessionOptions()
    options.log_severity_level = 3  # errors: warnings about optimisations concern no user
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base of their own
        raise FileFormatError(
            f"{path} cannot be read as ONNX ({str(error)[:300]}); it is damaged, another kind of "
            "file, or newer than the installed onnxruntime"
        ) from error


def _ports(session: Any, path: Path, input: str | None, output: str | None) -> Ports:
    asked = _chosen(session.get_inputs(), input, path, "input")
    others = [port.name for port in session.get_inputs() if port.name != asked.name]
    if others:
        raise InvalidArgument(
            f"{path} needs the inputs {', '.join([asked.name, *others])} together; export it with "
            "the others fixed, or put a function around it"
        )
    if asked.type not in FLOATS:
        kind = "token numbers" if "int" in asked.type else asked.type
        raise FileFormatError(
            f"{path} takes {kind} ({asked.name}: {asked.type}), not vectors: it is not a sequence "
            "model on vectors. Export the part after the embedding"
        )
    shape = list(asked.shape)
    if len(shape) != 3:
        raise FileFormatError(
            f"{path} is not a sequence model: input {asked.name} has shape {shape}, expected "
            "(batch, length, width)"
        )
    answer = _chosen(session.get_outputs(), output, path, "output")
    fixed = [n if isinstance(n, int) and n > 0 else None for n in shape]
    return Ports(asked.name, answer.name, FLOATS[asked.type], *fixed)


def _chosen(ports: list[Any], wanted: str | None, path: Path, kind: str) -> Any:
    names = [port.name for port in ports]
    if wanted is None and len(ports) == 1:
        return ports[0]
    if wanted not in names:
        raise InvalidArgument(
            f"{path} has the {kind}s {', '.join(names) or '(none)'}; choose one with {kind}= "
            f"(--{kind})"
        )
    return ports[names.index(wanted)]
