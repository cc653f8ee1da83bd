"""A server of embeddings around a function on padded token numbers, in the dialects in use.

`embed(tokens, attention_mask)` answers; `encode(text)` makes token numbers of a text, where the
server takes texts. `dialects` is a set of "openai", "tei", "predict", "own"; `habits` a set of
"shuffled" (answers in another order, with their index), "few" (one answer is missing), "named"
(refuses requests that do not name its model).
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

from keyhole.oracles.rows import pad_rows


class Refusal(Exception):
    pass


class Embeddings(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, embed, encode, dialects, habits, takes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.embed, self.encode = embed, encode
        self.dialects, self.habits, self.takes = set(dialects), set(habits), set(takes)
        self.requests = []  # rows of each, as token numbers

    def answer(self, rows):
        numbers = []
        for row in rows:
            kind = "text" if isinstance(row, str) else "numbers"
            if kind not in self.takes:
                raise Refusal(f"no {kind} here")
            numbers.append(self.encode(row) if kind == "text" else row)
        self.requests.append(numbers)
        answers = np.asarray(self.embed(*pad_rows(numbers)), dtype=float).tolist()
        return answers[:-1] if "few" in self.habits else answers

    def reply(self, path, body):
        if path == "/v1/embeddings" and "openai" in self.dialects:
            if "named" in self.habits and body.get("model") != "small":
                raise Refusal("which model?")
            answers = list(enumerate(self.answer(body["input"])))
            if "shuffled" in self.habits:
                answers = answers[::-1]
            return {"data": [{"index": k, "embedding": row} for k, row in answers]}
        if path == "/embed" and "tei" in self.dialects:
            return self.answer(body["inputs"])
        if path == "/predict" and "predict" in self.dialects:
            answers = self.answer([text for (text,) in body["inputs"]])
            scores = [
                [{"label": f"LABEL_{k}", "score": x} for k, x in enumerate(r)] for r in answers
            ]
            return [sorted(row, key=lambda one: -one["score"]) for row in scores]
        if path == "/own" and "own" in self.dialects:
            return {"result": {"vectors": self.answer(body["ask"]["these"])}}
        return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        if "named" in self.server.habits:
            return self._send(200, {"data": [{"id": "small"}]})
        return self._send(404, {"error": "not here"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            reply = self.server.reply(self.path, body)
        except Refusal as refusal:
            return self._send(422, {"error": str(refusal)})
        if reply is None:
            return self._send(404, {"error": "not here"})
        return self._send(200, reply)

    def _send(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(embed, *habits, encode=None, dialects=("openai",), takes=("numbers",)):
    """The server while it runs, with its `url`."""
    server = Embeddings(embed, encode, dialects, habits, takes)
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
