"""An endpoint of the Open Inference Protocol that misbehaves on purpose.

Run as a program it prints its port and serves until killed; `start` serves from a thread. Faults
are drawn at random (`share`), or follow a list, one entry per request. GET /stats tells what was
asked and what was answered in full.
"""

import argparse
import json
import random
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from keyhole.models.random import attention
from keyhole.oracles.http.tensors import HEADER_LENGTH, Tensor, decode, encode
from keyhole.oracles.open import open_oracle
from keyhole.serving.inference import OUTPUT, Inference, Limits

KINDS = (
    "drop",  # the connection closes without a word
    "half",  # fewer bytes than announced
    "cut",  # as many bytes as announced, but half a message
    "429",
    "500",
    "503",
    "other",  # the answer to another request
    "few",  # one answer is missing
    "nan",
    "drip",  # a byte now and then
    "down",  # nobody listens for a moment
)
DOWN_SECONDS = 0.3
DRIP_SECONDS = 0.25


class Endpoint(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, model, *, share=0.0, plan=(), seed=0, drift=None, shuffle=False, port=0):
        super().__init__(("127.0.0.1", port), Handler)
        self.inference = Inference(open_oracle(model), "model", Limits())
        self.drifted = (
            None if drift is None else Inference(open_oracle(drift[0]), "model", Limits())
        )
        self.drift_after = None if drift is None else drift[1]
        self.share, self.plan, self.rng = share, list(plan), random.Random(seed)
        self.shuffle = shuffle
        self.lock = threading.Lock()
        self.down_until = 0.0
        self.asked, self.answered, self.sizes = {}, {}, {}
        self.queries = 0
        self.faults = dict.fromkeys(KINDS, 0)
        self.last = None
        self.tokens_seen = set()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v2/models/model"

    def fault(self):
        with self.lock:
            if self.plan:
                kind = self.plan.pop(0)
                kind = None if kind == "ok" else kind
            else:
                kind = self.rng.choice(KINDS) if self.rng.random() < self.share else None
            if kind is not None:
                self.faults[kind] += 1
            return kind

    def stats(self):
        with self.lock:
            return {
                "distinct": sum(self.sizes.values()),
                "answered": sum(self.sizes[name] * n for name, n in self.answered.items()),
                "unanswered": sum(name not in self.answered for name in self.asked),
                "faults": self.faults,
            }

    def handle_error(self, request, client_address):
        pass  # clients that are killed or give up close their connections


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def reply(self, status, body, headers=()):
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def hang_up(self):
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def do_GET(self):
        server = self.server
        if self.path == "/stats":
            self.reply(200, json.dumps(server.stats()).encode())
        elif self.path == "/v2":
            self.reply(200, b'{"name": "faulty", "extensions": ["binary_tensor_data"]}')
        else:
            self.reply(200, json.dumps(server.inference.metadata()).encode())

    def do_POST(self):
        server = self.server
        with server.lock:
            server.tokens_seen.add(self.headers.get("Authorization"))
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if time.monotonic() < server.down_until:
            return self.hang_up()
        message, tensors = decode(body, self.headers.get(HEADER_LENGTH), "inputs")
        name, count = message["id"], len(tensors[0].array)
        fault = server.fault()
        with server.lock:
            server.asked[name] = server.asked.get(name, 0) + 1
            server.sizes[name] = count
            server.queries += count
            late = server.drift_after is not None and server.queries > server.drift_after
        model = server.drifted if late else server.inference
        if fault in ("429", "500", "503"):
            headers = [("Retry-After", "0.05")] if fault == "429" else []
            return self.reply(int(fault), b'{"error": "not now"}', headers)
        if fault == "down":
            server.down_until = time.monotonic() + DOWN_SECONDS
            return self.hang_up()
        if fault == "drop":
            return self.hang_up()
        self.deliver(name, model.infer(body, self.headers.get(HEADER_LENGTH)), fault)
        return None

    def deliver(self, name, reply, fault):
        server = self.server
        body, headers = reply.body, list(reply.headers)
        if fault == "other":
            body, headers = server.last or changed(reply, lambda a: a, "another request")
        elif fault == "few":
            body, headers = changed(reply, lambda a: a[:-1], name)
        elif fault == "nan":
            body, headers = changed(
                reply, lambda a: np.where(np.arange(len(a)) == 0, np.nan, a.T).T, name
            )
        elif server.shuffle:
            body, headers = changed(reply, lambda a: a[::-1], name)
        if fault == "cut":
            self.reply(200, body[: len(body) // 2], headers)
        elif fault in ("half", "drip"):
            self.send_response(200)
            for header in headers:
                self.send_header(*header)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for byte in body[: len(body) // 2 if fault == "half" else 40]:
                self.wfile.write(bytes([byte]))
                if fault == "drip":
                    time.sleep(DRIP_SECONDS)
            self.hang_up()
        else:
            self.reply(200, body, headers)
            if fault is None:
                with server.lock:
                    server.answered[name] = server.answered.get(name, 0) + 1
                    server.last = (body, headers)


def changed(reply, change, name):
    """The reply with other answers, or under another name."""
    split = dict(reply.headers).get(HEADER_LENGTH.lower())
    _, (tensor,) = decode(reply.body, split, "outputs")
    body, length = encode(
        {"id": name}, "outputs", Tensor(OUTPUT, change(tensor.array)), bool(split)
    )
    return body, [(HEADER_LENGTH, str(length))] if split else []


def start(model, **options):
    """Serves from a thread of this process; `shutdown` ends it."""
    endpoint = Endpoint(model, **options)
    threading.Thread(target=endpoint.serve_forever, args=(0.02,), daemon=True).start()
    return endpoint


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.0)
    given = parser.parse_args()
    secret = attention(np.random.default_rng(given.seed), given.width)
    served = Endpoint(secret, share=given.share, seed=given.seed)
    print(served.server_address[1], flush=True)  # noqa: T201 - the test reads the port here
    served.serve_forever()
