"""Puts a box behind the Open Inference Protocol: modes, token, and the server's life."""

import contextlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.oracles.base import Oracle
from keyhole.oracles.http.client import loopback
from keyhole.oracles.open import open_oracle
from keyhole.oracles.wrappers.degrade import BITS, Labels, Noisy, Rounded
from keyhole.oracles.wrappers.validate import Validator
from keyhole.serving.app import App
from keyhole.serving.connections import HEAD_SECONDS, guarded_protocol
from keyhole.serving.inference import Inference, Limits

TOKEN_VARIABLE = "KEYHOLE_SERVE_TOKEN"
NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")


@dataclass(frozen=True)
class Blur:
    """What the server does to the answers before they leave: exercises in saying less."""

    decimals: int | None = None
    bits: int | None = None
    noise: float = 0.0
    labels: bool = False
    seed: int = 0

    def around(self, box: Oracle) -> Oracle:
        if self.noise:
            box = Noisy(box, additive=self.noise, seed=self.seed)
        if self.decimals is not None or self.bits is not None:
            box = Rounded(box, self.decimals, self.bits)
        return (
            Labels(Validator(box), BITS) if self.labels else box
        )  # what is no number has no label


@dataclass(frozen=True)
class Bind:
    """Where the server listens, and who may come in."""

    host: str = "127.0.0.1"
    port: int = 8000
    token_env: str = TOKEN_VARIABLE
    public: bool = False  # whether other machines may come in without a token

    def token(self) -> str | None:
        token = os.environ.get(self.token_env) or None
        if token is None and not self.public and not loopback(self.host):
            raise InvalidArgument(
                f"listening on {self.host} opens the model to other machines: put a token into "
                f"{self.token_env}, or pass public=True (--public)"
            )
        return token

    def listening(self, six: bool) -> socket.socket:
        family = socket.AF_INET6 if six else socket.AF_INET
        try:
            return socket.create_server((self.host, self.port), family=family)
        except OSError as error:
            raise InvalidArgument(
                f"cannot listen on {self.host}, port {self.port} ({error.strerror}): choose "
                "another with port= or host= (--port, --host); port 0 is any that is free"
            ) from error


@dataclass(frozen=True, eq=False)
class Service:
    """A box ready to be served."""

    box: Oracle
    name: str = "model"
    blur: Blur = field(default_factory=Blur)
    limits: Limits = field(default_factory=Limits)
    dtype: Any = np.float64

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise InvalidArgument("a model's name holds letters, digits, '.', '_' and '-'")

    def app(self, token: str | None = None) -> App:
        box = self.blur.around(self.box)
        keep_memory()
        return App(Inference(box, self.name, self.limits, self.dtype), token)


def service(target: Any, name: str | None = None, **options: Any) -> Service:
    """A service for anything `open_oracle` opens. Options of the service are taken out first."""
    own = {key: options.pop(key) for key in ("blur", "limits") if key in options}
    if name is None:
        stem = Path(target).stem if isinstance(target, (str, Path)) else type(target).__name__
        name = re.sub(r"[^A-Za-z0-9._-]", "-", stem)[:100] or "model"
    box = open_oracle(target, **options)
    return Service(box, name, dtype=answer_dtype(box), **own)


def answer_dtype(box: Oracle) -> Any:
    """The number format tokens are wanted in: the box's own."""
    import sys

    torch = sys.modules.get("torch")
    wanted = getattr(box, "dtype", None)
    if torch is not None and isinstance(wanted, torch.dtype):
        return {torch.float64: np.float64, torch.float16: np.float16}.get(wanted, np.float32)
    ports = getattr(box, "ports", None)
    if ports is not None:
        return ports.dtype
    model = getattr(getattr(box, "function", None), "dtype", None)
    return model if model in (np.float16, np.float32) else np.float64


def keep_memory() -> None:
    """Bodies come and go by the megabyte. Unless told otherwise, glibc returns their memory to the
    system after every request and pays for it again, page by page, with more time than the rest of
    a request takes. Freeing one large block raises its thresholds; with another allocator, or with
    thresholds set in the environment, nothing happens."""
    kept = 31 * 2**20  # bytes; freeing a block of up to 32 MiB teaches glibc to keep as much
    bytearray(kept)


def run(service: Service, bind: Bind, told: Callable[[str], None] | None = None) -> None:
    """Serves until interrupted. `told` hears the model's address once connections are taken."""
    server, six = make_server(service.app(bind.token())), ":" in bind.host
    with bind.listening(six) as listening, contextlib.suppress(KeyboardInterrupt):
        if told is not None:
            host, port = f"[{bind.host}]" if six else bind.host, listening.getsockname()[1]
            told(f"http://{host}:{port}/v2/models/{service.name}")
        server.run(sockets=[listening])


def make_server(app: App) -> Any:
    """The program that takes connections; how many requests it works on is the application's
    business, so that health is told whatever else goes on."""
    uvicorn = need("uvicorn", "serve", "serving a model")
    config = uvicorn.Config(
        app,
        http=guarded_protocol(),
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=int(HEAD_SECONDS),
        ws="none",
    )
    return uvicorn.Server(config)
