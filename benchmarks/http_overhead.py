"""What HTTP costs: `open_oracle(url)` against `keyhole serve`, beside plain httpx against a handler
that reads the same bytes and sends back the same number of bytes. Both over loopback, both on
uvicorn, round by round in one run; the figure is the median ratio of their throughputs. "Free box"
serves a function that costs nothing (so the ratio is the overhead alone), "attention" a model of
that width, whose own arithmetic then counts against us: without any overhead, plain httpx and after
it the model in process would reach what stands in brackets. Both servers keep the memory of their
bodies (`keep_memory`), so that the allocator slows neither by chance.

    python benchmarks/http_overhead.py [--quick]
"""

import argparse
import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import numpy as np
import uvicorn

import keyhole
from keyhole.models.random import attention
from keyhole.oracles.http.tensors import HEADER_LENGTH, Tensor, encode
from keyhole.serving.server import keep_memory, service

SECONDS = 0.1  # of one round: short, so that what else the machine does meets all of them alike
ROUNDS = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def first_entries(tokens: np.ndarray) -> np.ndarray:
    """A box that costs nothing: what remains is the way there and back."""
    return tokens[:, 0, 0].copy()


def serve_model(port: int, width: int, free: bool) -> None:
    model = first_entries if free else attention(np.random.default_rng(0), width)
    app = service(model, "model", width=width).app()
    uvicorn.run(app, port=port, log_level="error", access_log=False)


def serve_trivial(port: int, size: int) -> None:
    """Reads the body, answers with `size` bytes: what any handler must do at least."""
    keep_memory()
    answer = bytes(size)

    async def app(scope, receive, send):  # type: ignore[no-untyped-def]
        if scope["type"] != "http":
            return
        parts, more = [], True
        while more:
            event = await receive()
            parts.append(event.get("body", b""))
            more = event.get("more_body", False)
        len(b"".join(parts))
        headers = [(b"content-length", str(len(answer)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer})

    uvicorn.run(app, port=port, log_level="error", access_log=False, lifespan="off")


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 0.1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit("the server did not start")


def rate(call: Callable[[], Any], queries: int) -> float:
    """Queries per second."""
    count, start = 0, time.perf_counter()
    while (spent := time.perf_counter() - start) < SECONDS:
        call()
        count += queries
    return count / spent


def measure(width: int, length: int, batch: int, rounds: int) -> tuple[float, ...]:
    tokens = np.random.default_rng(1).standard_normal((batch, length, width))
    queries = keyhole.QueryBatch.of(tokens, "benchmark")
    body, split = encode({"id": "0" * 32}, "inputs", Tensor("tokens", tokens), True)
    reply, _ = encode({"id": "0" * 32}, "outputs", Tensor("answers", np.zeros(batch)), True)
    ports = free_port(), free_port(), free_port()
    servers = [
        multiprocessing.Process(target=serve_model, args=(ports[0], width, True), daemon=True),
        multiprocessing.Process(target=serve_model, args=(ports[1], width, False), daemon=True),
        multiprocessing.Process(target=serve_trivial, args=(ports[2], len(reply)), daemon=True),
    ]
    for server, port in zip(servers, ports, strict=True):
        server.start()
        wait_for(port)
    boxes = [keyhole.open_oracle(f"http://127.0.0.1:{port}") for port in ports[:2]]
    boxes.append(keyhole.open_oracle(attention(np.random.default_rng(0), width)))
    client, headers = httpx.Client(), {HEADER_LENGTH: str(split)}
    url = f"http://127.0.0.1:{ports[2]}/"
    calls = [partial(box.ask, queries) for box in boxes]
    calls.append(lambda: client.post(url, content=body, headers=headers).content)
    rates = [[rate(call, batch) for call in calls] for _ in range(rounds)]
    for box in boxes:
        box.close()
    client.close()
    for server in servers:
        server.terminate()
        server.join()
    medians = [statistics.median(column) for column in zip(*rates, strict=True)]
    ratios = [statistics.median(row[k] / row[-1] for row in rates) for k in (0, 1)]
    return (*medians, *ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one size, short rounds")
    given = parser.parse_args()
    multiprocessing.set_start_method("spawn")
    sizes = [(128, 2, 512)] if given.quick else [(128, 2, 64), (128, 2, 512), (128, 8, 512)]
    rounds = 10 if given.quick else ROUNDS
    print("queries a second | attention  | free box   attention  plain httpx | ratio to plain")
    print("width length batch | in process | over HTTP  over HTTP  trivial     | free attention")
    for width, length, batch in sizes:
        free, served, inside, plain, *ratios = measure(width, length, batch, rounds)
        print(
            f"{width:5} {length:6} {batch:5} | {inside:10,.0f} | {free:9,.0f}  {served:9,.0f}  "
            f"{plain:11,.0f} | {ratios[0]:4.0%} {ratios[1]:9.0%}  ({inside / (inside + plain):.0%})"
        )


if __name__ == "__main__":
    main()
