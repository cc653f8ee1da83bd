"""Connections that ask for nothing are closed in time, and never keep out those that ask."""

import contextlib
import socket
import threading
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

import keyhole
from keyhole.models.random import attention
from keyhole.serving import connections
from keyhole.serving.connections import HEAD_BYTES, make_room
from keyhole.serving.server import Bind, Service, make_server

pytest.importorskip("uvicorn")
READY = b"GET /v2/health/ready HTTP/1.1\r\nHost: here\r\n\r\n"


@pytest.fixture
def port():
    with serving() as number:
        yield number


@contextlib.contextmanager
def serving():
    box = keyhole.open_oracle(attention(np.random.default_rng(0), 4))
    server = make_server(Service(box).app())
    with Bind(port=0).listening(six=False) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=60.0)


def test_idle_connections_do_not_block_health(port):
    with contextlib.ExitStack() as idle:
        for _ in range(140):
            idle.enter_context(connect(port))
        assert httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200


def test_beyond_the_limit_the_one_that_waits_longest_makes_room(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 4)
    with serving() as port, contextlib.ExitStack() as idle:
        first = idle.enter_context(connect(port))
        first.sendall(READY)
        assert first.recv(100).startswith(b"HTTP/1.1 200")
        for _ in range(4):
            idle.enter_context(connect(port))
        assert httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200
        with contextlib.suppress(ConnectionResetError):
            while first.recv(2**16):  # the rest of the answer, then the end
                pass


@pytest.mark.parametrize("begun", [b"", b"GET /v2/hea", READY, READY + b"GET /v2 HTT"])
def test_a_head_that_does_not_come_ends_the_connection(monkeypatch, begun):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with serving() as port, connect(port) as slow:
        slow.sendall(begun)
        with contextlib.suppress(ConnectionResetError):
            while slow.recv(2**16):
                pass  # the time-out of this socket would raise


def test_a_head_without_end(port):
    with connect(port) as endless, contextlib.suppress(ConnectionError):
        endless.sendall(b"GET /v2 HTTP/1.1\r\n")
        for number in range(HEAD_BYTES // 100):
            endless.sendall(b"X-%08d: %s\r\n" % (number, b"a" * 200))
        while endless.recv(2**16):
            pass
    assert httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200


def test_who_makes_room(monkeypatch):
    closed = []

    class One:
        def __init__(self, name, since, waits=True):
            self.since, self.waits = since, waits
            self.transport = SimpleNamespace(close=lambda: closed.append(name))

    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    busy, old, new = One("busy", 0.0, waits=False), One("old", 1.0), One("new", 2.0)
    make_room({busy, new}, new)
    assert closed == []
    make_room({busy, old, new}, new)
    assert closed == ["old"]
    make_room({busy, One("other", 0.5, waits=False), new}, new)
    assert closed == ["old", "new"]
