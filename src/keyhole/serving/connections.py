"""Connections that ask for nothing must not keep out those that do.

uvicorn closes a connection that is idle after an answer; one that never asks, or whose head drips
in, it would keep for good. Here a head must be complete within a time and a size, and where there
are too many connections the one that has waited longest makes room.
"""

import asyncio
from typing import Any

HEAD_SECONDS = 30.0  # from the connection, or the last answer, to the end of the next head
HEAD_BYTES = 2**16
MAX_CONNECTIONS = 512


def guarded_protocol() -> type[asyncio.Protocol]:
    """uvicorn's own protocol (by httptools, or by h11 where that is missing) with these limits."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol

    class Guarded(base):  # type: ignore[misc]
        since = 0.0  # when it last began to wait for a head
        head = 0  # bytes of the head so far
        timer: asyncio.TimerHandle | None = None

        @property
        def waits(self) -> bool:
            """Whether no request is under way."""
            return self.cycle is None or bool(self.cycle.response_complete)

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.since = self.loop.time()
            self.timer = self.loop.call_later(HEAD_SECONDS, self.give_up)
            make_room(self.connections, self)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self.head = self.head + len(data) if self.waits else 0
            if self.head > HEAD_BYTES:
                self.transport.close()

        def on_response_complete(self) -> None:
            self.since, self.head = self.loop.time(), 0
            super().on_response_complete()

        def give_up(self) -> None:
            """Closes the connection if it has waited too long, and else comes back."""
            left = HEAD_SECONDS - (self.loop.time() - self.since)
            if self.waits and left <= 0:
                self.transport.close()
            else:
                later = left if self.waits else HEAD_SECONDS
                self.timer = self.loop.call_later(later, self.give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            super().connection_lost(exc)

    return Guarded


def make_room(connections: set[Any], newest: Any) -> None:
    """Closes the connection that has waited longest where there are too many; the newest where all
    others are being answered."""
    if len(connections) <= MAX_CONNECTIONS:
        return
    waiting = [one for one in connections if one is not newest and one.waits]
    first = min(waiting, key=lambda one: one.since, default=newest)
    connections.discard(first)
    first.transport.close()
