"""Endpoints that mean harm: heads, names, shapes, sizes, encodings and pauses of every kind.

An endpoint answers properly until the request it was told to spoil. Whatever it then sends, the run
ends as ORACLE_FAILED, or recovers the right model; no token is in anything that leaves, no control
character, and neither time nor memory runs away.
"""

import contextlib
import copy
import gzip
import json
import os
import re
import resource
import socket
import threading
import time
from unittest import mock

import numpy as np

import keyhole
from keyhole.models.random import attention
from keyhole.oracles.http.retry import RetryPolicy
from keyhole.oracles.http.tensors import HEADER_LENGTH
from keyhole.oracles.open import open_oracle
from keyhole.report.html import render
from keyhole.serving.inference import Inference, Limits

TOKEN = "attack-S3cr3t-t0ken"
WIDTH, TIMEOUT = 3, 0.5
MOST_SECONDS = 30.0  # a run with three attempts of half a second, and its pauses
MOST_BYTES = 2**30  # of memory on top of what was there
STAGES = ("POST /v2/repository/index", "GET /v2/models", "GET /v2", "POST /infer")
NUMBERS = (-1, 0, 2**31, 2**47, 2**63, 10**30, 1.5, 1e400, float("nan"), None, "7", [], {}, True)
TEXTS = (TOKEN, TOKEN.upper(), "\x1b[2J\x1b]0;x\x07", "\ud800", "../..", "a" * 5000, "", "<script>")
HEADERS = (
    "Retry-After: Wed, 21 Oct 99999999999 07:28:00 GMT",
    "Retry-After: nan",
    "Retry-After: 1e999",
    f"Location: http://{TOKEN}.example/",
    "Location: http://[::1",
    "Location: //:99999999",
    "Location: \x00",
    "Content-Encoding: gzip, gzip",
    "Content-Encoding: zstd",
    "Content-Length: -5",
    "Content-Length: 99999999999999999999",
    "Content-Length: 3\r\nContent-Length: 4",
    "Transfer-Encoding: chunked",
    f"{HEADER_LENGTH}: 99999999999999999999",
    f"{HEADER_LENGTH}: -1",
    f"{HEADER_LENGTH}: {TOKEN}",
    "Connection: \x1b[31m",
    "X: " + "y" * 70_000,
)


def draw(rng):
    how = ("json", "headers", "bytes", "endless", "bomb", "refusal")[rng.integers(6)]
    return {
        "how": how,
        "stage": STAGES[rng.integers(len(STAGES))],
        "after": int(rng.integers(3)),  # proper answers at this stage before
        "status": int(rng.choice([200, 200, 200, 204, 301, 307, 308, 400, 401, 418, 429, 503])),
        "header": HEADERS[rng.integers(len(HEADERS))],
        "seed": int(rng.integers(2**31)),
    }


class Hostile:
    """A server on a socket of its own that spoils one kind of request."""

    def __init__(self, spec):
        self.spec, self.rng = spec, np.random.default_rng(spec["seed"])
        self.inference = Inference(
            open_oracle(attention(np.random.default_rng(0), WIDTH)), "m", Limits()
        )
        self.proper = spec["after"]
        self.ended = threading.Event()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while not self.ended.is_set():
            try:
                connection, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()

    def serve(self, connection):
        with contextlib.suppress(Exception), connection:
            connection.settimeout(10.0)
            waiting = b""
            while not self.ended.is_set():
                while b"\r\n\r\n" not in waiting:
                    more = connection.recv(2**16)
                    if not more:
                        return
                    waiting += more
                head, _, waiting = waiting.partition(b"\r\n\r\n")
                size = int(re.search(rb"(?i)content-length: *(\d+)", head)[1])
                while len(waiting) < size:
                    waiting += connection.recv(2**16)
                body, waiting = waiting[:size], waiting[size:]
                self.reply(connection, head.decode("latin-1"), body)

    def reply(self, connection, head, body):
        method, path = head.split()[:2]
        stage = f"{method} {path}"
        if "/infer" in path:
            stage = "POST /infer"
            split = re.search(rf"(?i){HEADER_LENGTH}: *(\d+)", head)
            answer = self.inference.infer(bytearray(body), split and split[1])
            content, headers = answer.body, [f"{k}: {v}" for k, v in answer.headers]
        else:
            stage = "GET /v2/models" if "/v2/models" in path else stage
            known = {
                "POST /v2/repository/index": [{"name": "m"}],
                "GET /v2": {"extensions": ["binary_tensor_data"]},
                "GET /v2/models": self.inference.metadata(),
            }
            content, headers = json.dumps(known.get(stage, {})).encode(), []
        if stage == self.spec["stage"]:
            self.proper -= 1
            if self.proper < 0:
                connection.sendall(self.spoiled(connection, content, headers))
                return
        connection.sendall(message(200, headers, content))

    def spoiled(self, connection, content, headers):
        spec, rng = self.spec, self.rng
        match spec["how"]:
            case "headers":
                own = (
                    []
                    if "Content-Length" in spec["header"]
                    else [f"Content-Length: {len(content)}"]
                )
                return raw(spec["status"], [*headers, spec["header"], *own], content)
            case "bytes":
                whole = bytearray(message(200, headers, content))
                for _ in range(int(rng.integers(1, 8))):
                    whole[int(rng.integers(len(whole)))] = int(rng.integers(256))
                return bytes(whole[: int(rng.integers(1, len(whole) + 1))])
            case "endless":
                first, again = (
                    (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
                    (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
                    (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
                    (b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b" "),
                    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n"),
                )[rng.integers(5)]
                connection.sendall(first)
                while not self.ended.wait(0.02):
                    connection.sendall(again)
                return b""
            case "bomb":
                packed = gzip.compress(gzip.compress(bytes(2**24)))
                return raw(
                    200, ["Content-Encoding: gzip, gzip", f"Content-Length: {len(packed)}"], packed
                )
            case "refusal":
                text = f"{TEXTS[rng.integers(len(TEXTS))]} {TOKEN} \x1b[31m".encode(
                    "utf-8", "replace"
                )
                return message(spec["status"], [], text)
        with contextlib.suppress(ValueError):
            told = json.loads(content)
            return message(200, [], json.dumps(spoil(told, rng)).encode())
        return message(200, [], json.dumps(spoil({"id": "x", "outputs": [{}]}, rng)).encode())


def spoil(value, rng):
    if isinstance(value, (dict, list)) and value and rng.random() < 0.8:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[rng.integers(len(keys))]
        value[key] = spoil(value[key], rng)
        return value
    junk = NUMBERS + TEXTS
    return copy.deepcopy(junk[rng.integers(len(junk))])


def message(status, headers, content):
    return raw(status, [*headers, f"Content-Length: {len(content)}"], content)


def raw(status, headers, content):
    head = "\r\n".join([f"HTTP/1.1 {status} X", *headers])
    return head.encode("latin-1", "replace") + b"\r\n\r\n" + content


def run(spec, folder):
    with mock.patch.dict(os.environ, {"KEYHOLE_TOKEN": TOKEN}):
        return recover_from(spec, folder)


def recover_from(spec, folder):
    server, texts, findings, counts = Hostile(spec), [], [], {}
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    title = f"{spec['how']} at {spec['stage']}"
    try:
        patience = RetryPolicy(attempts=3, first=0.001, willing=0.1)
        with keyhole.open_oracle(server.url, timeout=TIMEOUT, patience=patience) as box:
            found = keyhole.recover(
                box, keyhole.SingleHead(), journal=folder / "journal", throw=False
            )
        texts += [json.dumps(found.to_json(), ensure_ascii=False), render(found)]
        counts[found.outcome.name] = 1
        right = found.outcome.name == "RECOVERED" and found.verdict.agrees
        if right:
            truth = attention(np.random.default_rng(0), WIDTH)
            right = keyhole.distance(found.model, truth) < 1e-6
        # answers that are numbers, and other numbers, are a lie that only verification can tell
        lie = spec["how"] in ("json", "bytes") and spec["stage"] == "POST /infer"
        if not (
            right
            or found.outcome.name == "ORACLE_FAILED"
            or (lie and found.outcome.name != "RECOVERED")
        ):
            findings.append(
                ("an endpoint's failure became an outcome", f"{title}: {found.outcome.name}")
            )
    except keyhole.KeyholeError as error:
        texts.append(str(error))
        counts["refused"] = 1
    except Exception as error:
        findings.append(("traceback", f"{title}: {type(error).__name__}: {error}"))
    finally:
        server.ended.set()
        server.listening.close()
    for file in folder.iterdir():
        texts.append(file.read_bytes().decode("latin-1"))
    if any(TOKEN.lower() in text.lower() for text in texts):
        findings.append(("secret", title))
    if any(re.search("[\x00-\x08\x0b-\x1f]", text) for text in texts[:2]) and counts.get("refused"):
        findings.append(("control characters", title))
    if time.monotonic() - begun > MOST_SECONDS:
        findings.append(("time ran away", f"{title}: {time.monotonic() - begun:.0f} s"))
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    if grown > MOST_BYTES:
        findings.append(("memory ran away", f"{title}: {grown:.1e} bytes"))
    return counts, findings
