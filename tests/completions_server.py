"""A server with OpenAI's API around a small language model, with limits and bad habits.

`habits` is a set of: "ids" (tokens by number), "legacy" (the older form of log-probabilities),
"words" (prompts as text only), "strict" (refuses what it does not know), "chat" (chat alone),
"unsummed", "clips" (fewer log-probabilities than asked for, without a word), "flaky" (every fifth request fails), "changes" (another model later on).
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

KNOWN = {"model", "prompt", "messages", "max_tokens", "temperature", "seed", "logprobs"}
KNOWN |= {"top_logprobs", "logit_bias", "echo"}


class Refusal(Exception):
    pass


class Model(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, logits, interface, habits):
        super().__init__(("127.0.0.1", 0), Handler)
        self.logits, self.interface, self.habits = logits, interface, set(habits)
        self.requests, self.questions, self.prompt_tokens = 0, 0, 0
        self.token = None  # that must be sent

    def complete(self, body, chat):
        interface, habits = self.interface, self.habits
        if "strict" in habits and set(body) - KNOWN:
            raise Refusal(f"unrecognized arguments {set(body) - KNOWN}")
        prompt = body["messages"][0]["content"] if chat else body["prompt"]
        if isinstance(prompt, list) and "words" in habits:
            raise Refusal("prompt must be a string")
        prompt = [int(word) for word in prompt.split()] if isinstance(prompt, str) else prompt
        top = body.get("top_logprobs", 0) if chat else body.get("logprobs", 0)
        if top > interface.top and "clips" in habits:
            top = interface.top
        if top > interface.top:
            raise Refusal(f"at most {interface.top} log-probabilities")
        bias = {int(token): value for token, value in body.get("logit_bias", {}).items()}
        if len(bias) > interface.bias_entries:
            raise Refusal("too many biases")
        self.questions += 1
        self.prompt_tokens += len(prompt)
        logits = np.array(self.logits(np.array([prompt]))[0], dtype=float)
        if "changes" in habits and self.questions > 60:
            logits = logits[::-1].copy()
        biased = logits.copy()
        if interface.bias != "none":
            for token, value in bias.items():
                biased[token] += value
        told = biased if interface.bias == "reported" else logits
        logprobs = told - told.max() - np.log(np.exp(told - told.max()).sum())
        if "unsummed" in habits:
            logprobs = logprobs - 0.5
        sampled = int(np.argmax(biased))
        return self._choice(sampled, logprobs, top, chat)

    def _choice(self, sampled, logprobs, top, chat):
        text = f"t{sampled}"
        choice = {"message": {"content": text}} if chat else {"text": text}
        if not top:
            return choice
        best = np.argsort(-logprobs)[:top]
        if "legacy" in self.habits:
            choice["logprobs"] = {
                "tokens": [text],
                "token_logprobs": [logprobs[sampled]],
                "top_logprobs": [{f"t{t}": logprobs[t] for t in best}],
            }
            return choice
        content = self._entry(sampled, logprobs)
        content["top_logprobs"] = [self._entry(int(t), logprobs) for t in best]
        choice["logprobs"] = {"content": [content]}
        return choice

    def _entry(self, token, logprobs):
        entry = {"token": f"t{token}", "logprob": float(logprobs[token])}
        return entry | ({"id": token} if "ids" in self.habits else {})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._send(200, {"data": [{"id": "small"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server, chat = self.server, self.path == "/v1/chat/completions"
        server.requests += 1
        if server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
            return self._send(401, {"error": "who are you"})
        if "flaky" in server.habits and server.requests % 5 == 0:
            return self._send(503, {"error": "busy"})
        served = chat if "chat" in server.habits else self.path == "/v1/completions" or chat
        if not served:
            return self._send(404, {"error": "not here"})
        try:
            choice = server.complete(body, chat)
        except Refusal as refusal:
            return self._send(400, {"error": str(refusal)})
        return self._send(200, {"choices": [choice]})

    def _send(self, status, body):
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(logits, interface, *habits):
    """The server while it runs, with its `url`."""
    server = Model(logits, interface, habits)
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
