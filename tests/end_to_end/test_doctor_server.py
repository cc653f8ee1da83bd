"""`keyhole doctor hf:FOLDER URL` against FastAPI in front of sentence-transformers.

The server runs in a Python of its own, named by KEYHOLE_SENTENCE_PYTHON, which has fastapi, uvicorn
and sentence-transformers; these are none of this project's needs.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from sentence_folders import write_sentence

SERVER = Path(__file__).parents[1] / "sentence_server.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_sentence(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="module")
def url(place):
    python = os.environ.get("KEYHOLE_SENTENCE_PYTHON")
    if not python:
        pytest.skip(
            "KEYHOLE_SENTENCE_PYTHON names no Python with fastapi and sentence-transformers"
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    log = place.parent / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [python, str(SERVER), str(place), str(port)], stdout=output, stderr=output
        )
    try:
        while True:
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                httpx.put(f"{address}/faults", json={}, timeout=5.0).raise_for_status()
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def visit(place, url, **faults):
    httpx.put(f"{url}/faults", json=faults, timeout=30.0).raise_for_status()
    done = subprocess.run(
        [sys.executable, "-m", "keyhole", "doctor", f"hf:{place}", url, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(done.stdout)


def test_a_healthy_server(place, url) -> None:
    code, record = visit(place, url)
    assert (code, record["same"], record["causes"]) == (0, True, [])


@pytest.mark.parametrize(
    ("faults", "names"),
    [
        ({"ignore the mask": True}, {"the attention mask is ignored, by pooling as well"}),
        ({"tanh": True}, {"the activation is gelu_pytorch_tanh"}),
        ({"first token": True, "tanh": True},
         {"pooling is cls", "the activation is gelu_pytorch_tanh"}),
    ],
)  # fmt: skip
def test_faults_that_are_switched_on_while_it_runs(place, url, faults, names) -> None:
    code, record = visit(place, url, **faults)
    assert code == 1
    assert {cause["name"] for cause in record["causes"]} == names
    assert record["left_over"] <= record["tolerance"]
