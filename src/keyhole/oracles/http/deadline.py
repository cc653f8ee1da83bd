"""A time-out for a whole exchange. httpx limits the time between two bytes, so that a head that
drips in, headers without end or one `100 Continue` after another would never end."""

import threading
import time
from typing import Any

import httpcore
import httpx


class Deadline(threading.local):
    """When the exchange of this thread must be over, on the clock of `time.monotonic`."""

    end = float("inf")

    def start(self, seconds: float) -> None:
        self.end = time.monotonic() + seconds

    def left(self, timeout: float | None, late: type[Exception]) -> float | None:
        """Seconds that the next step may take; raises `late` where none are left."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise late("the answer came too slowly")
        least = left if timeout is None else min(timeout, left)
        return None if least == float("inf") else least


class _Stream(httpcore.NetworkStream):
    """A connection that keeps the deadline of whoever uses it."""

    def __init__(self, inner: httpcore.NetworkStream, deadline: Deadline) -> None:
        self._inner, self._deadline = inner, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, self._deadline.left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._deadline.left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        left = self._deadline.left(timeout, httpcore.ConnectTimeout)
        inner = self._inner.start_tls(ssl_context, server_hostname, left)
        return _Stream(inner, self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend(httpcore.NetworkBackend):
    """Makes connections that keep the deadline."""

    def __init__(self, inner: httpcore.NetworkBackend, deadline: Deadline) -> None:
        self._inner, self._deadline = inner, deadline

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Any = None,
    ) -> httpcore.NetworkStream:
        left = self._deadline.left(timeout, httpcore.ConnectTimeout)
        inner = self._inner.connect_tcp(host, port, left, local_address, socket_options)
        return _Stream(inner, self._deadline)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class Transport(httpx.HTTPTransport):
    """httpx's own transport, whose connections keep `deadline`."""

    def __init__(self, limits: httpx.Limits, proxy: str | None) -> None:
        super().__init__(limits=limits, proxy=proxy)
        self.deadline = Deadline()
        # httpx offers no way to hand its pool a backend of one's own; httpcore does
        pool: Any = self._pool
        pool._network_backend = _Backend(pool._network_backend, self.deadline)
