"""The ASGI application behind `keyhole serve`: routes, limits and the token.

    GET  /v2, /v2/health/live, /v2/health/ready
    GET  /v2/models/NAME[/versions/1][/ready]
    POST /v2/models/NAME[/versions/1]/infer
    POST /v2/repository/index

Health is open to all and outside all limits; everything else asks for the token, if there is one.
A model that takes its time is run by one thread, request after request, so that health and refusals
stay quick. Limits come before the work: on the requests at a time, on the body, on its JSON part.
"""

import asyncio
import hmac
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keyhole import __version__
from keyhole.oracles.http.open_inference import BINARY_EXTENSION
from keyhole.serving.inference import Inference, Refused, Reply

ROUTE = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?(/ready|/infer)?")
HEALTH = ("/v2/health/live", "/v2/health/ready")
BODY_SECONDS = 60.0  # for a request's body to arrive, and for an answer to be taken
REQUESTS = 128  # inference requests at a time
QUICK_SECONDS = 0.01  # a model that answers sooner is not worth a thread of its own
LOGGER = logging.getLogger("keyhole.serving")

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class App:
    """An ASGI application that serves one model."""

    def __init__(self, inference: Inference, token: str | None = None) -> None:
        self.inference, self._token = inference, token
        self._model = ThreadPoolExecutor(1, "keyhole-model")
        self._requests = 0  # for inference, from the first byte of the body to the reply
        self._busy = 0  # requests the model is working on or that wait for it
        self._seconds = QUICK_SECONDS  # what the last one took

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                reply = await self._reply(scope, receive)
                async with asyncio.timeout(BODY_SECONDS):
                    await _respond(send, 200, reply.body, reply.headers)
            except Refused as refused:
                body = json.dumps({"error": str(refused)}).encode()
                kind = (("content-type", "application/json"), *refused.headers)
                await _respond(send, refused.status, body, kind)
        else:  # a websocket: closing it is the polite refusal
            await send({"type": "websocket.close", "code": 1003})

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        self._model.shutdown()
        await send({"type": "lifespan.shutdown.complete"})

    async def _reply(self, scope: Scope, receive: Receive) -> Reply:
        method, path = scope["method"], scope["path"]
        path = path.rstrip("/") or "/"
        if path in HEALTH:
            _allow(method, "GET")
            return Reply(b"", ())
        headers = _headers(scope)
        self._authorise(headers)
        if path == "/v2":
            _allow(method, "GET")
            return _json(
                {"name": "keyhole", "version": __version__, "extensions": [BINARY_EXTENSION]}
            )
        if path == "/v2/repository/index":
            _allow(method, "POST")
            name = self.inference.name
            return _json([{"name": name, "version": "1", "state": "READY", "reason": ""}])
        return await self._model_reply(method, path, headers, receive)

    async def _model_reply(
        self, method: str, path: str, headers: dict[str, str], receive: Receive
    ) -> Reply:
        match = ROUTE.fullmatch(path)
        if match is None:
            raise Refused(404, "there is nothing at this path")
        name, version, what = match.groups()
        if name != self.inference.name or version not in (None, "1"):
            raise Refused(404, f"the only model is {self.inference.name}, version 1")
        if what == "/infer":
            _allow(method, "POST")
            if self._requests >= REQUESTS:
                raise Refused(503, f"{REQUESTS} requests are under way", (("retry-after", "1"),))
            self._requests += 1
            try:
                return await self._infer(await self._body(headers, receive), headers)
            finally:
                self._requests -= 1
        _allow(method, "GET")
        if what == "/ready":
            return _json({"name": self.inference.name, "ready": True})
        return _json(self.inference.metadata())

    def _authorise(self, headers: dict[str, str]) -> None:
        if self._token is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        good = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._token.encode())
        if scheme.lower() != "bearer" or not good:
            raise Refused(401, "a valid bearer token is needed", (("www-authenticate", "Bearer"),))

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytearray:
        most = self.inference.limits.body
        if headers.get("content-encoding", "identity") != "identity":
            raise Refused(415, "bodies must not be compressed")
        told = headers.get("content-length", "0")
        if told.isdigit() and int(told[:19]) > most:
            raise Refused(413, f"a request may have {most} bytes")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await _read(receive, most)
        except TimeoutError as error:
            raise Refused(408, "the body did not arrive in time") from error

    async def _infer(self, body: bytearray, headers: dict[str, str]) -> Reply:
        length = headers.get("inference-header-content-length")
        quick_bytes = 2**20  # of a request that may be answered at once, without another thread
        small = len(body) <= quick_bytes
        quick = small and self._busy == 0 and self._seconds < QUICK_SECONDS
        self._busy += 1
        start = time.perf_counter()
        try:
            if quick:
                return self.inference.infer(body, length)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._model, self.inference.infer, body, length)
        except Refused:
            raise
        except Exception as error:  # the model is the user's: its failure is not the server's end
            LOGGER.exception("the model failed")
            raise Refused(500, "the model failed; the server's log says why") from error
        finally:
            self._busy -= 1
            self._seconds = time.perf_counter() - start


async def _read(receive: Receive, most: int) -> bytearray:
    """The body, of the kind that may be written to: some models compute in their input."""
    body, more = bytearray(), True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise Refused(400, "the connection was closed before the body was complete")
        body += event.get("body", b"")
        if len(body) > most:
            raise Refused(413, f"a request may have {most} bytes")
        more = event.get("more_body", False)
    return body


async def _respond(
    send: Send, status: int, body: bytes, headers: tuple[tuple[str, str], ...]
) -> None:
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    pairs.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope) -> dict[str, str]:
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]
    }


def _allow(method: str, wanted: str) -> None:
    if method != wanted:
        raise Refused(405, f"this path takes {wanted}", (("allow", wanted),))


def _json(value: Any) -> Reply:
    return Reply(json.dumps(value).encode(), (("content-type", "application/json"),))
