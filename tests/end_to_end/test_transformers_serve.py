"""A real `transformers serve`: it takes a bias and tells nothing but the sampled token.

It runs in a Python of its own, named by KEYHOLE_SERVING_PYTHON, which needs transformers[serving]
and torch. `make test` builds one in `.venv-serving` and names it.
"""

import os
import socket
import subprocess
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

import keyhole
from keyhole.oracles.queries import QueryBatch
from transformers_server import TOKENS

SERVER = Path(__file__).parents[1] / "transformers_server.py"
SHIFT = 2  # the word "0" is the token behind those of beginning and end


def find_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("serving")


@pytest.fixture(scope="module")
def url(folder):
    python = os.environ.get("KEYHOLE_SERVING_PYTHON")
    if not python:
        pytest.skip(
            "transformers[serving] is not installed: `make test` could not, or was not used to "
            "start the tests; KEYHOLE_SERVING_PYTHON may name a Python that has it and torch"
        )
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    address = f"http://127.0.0.1:{(port := find_port())}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [python, str(SERVER), str(folder), str(port)],
            env=kept | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")},
            stdout=log,
            stderr=log,
        )
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            try:
                if httpx.get(f"{address}/health", timeout=5.0).is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(20)


def test_labels_alone_tell_the_logits(url, folder):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    prompt, tokens = np.array([7, 3, 21]), list(range(SHIFT, SHIFT + 10))
    with keyhole.open_language_model(url, vocabulary=TOKENS, max_length=32) as box:
        told = box.interface
        assert (told.answers, told.bias, told.top, told.sampled) == ("labels", "sampling", 0, False)
        assert (told.reading, told.numbers, told.repeatable) == ("race", False, True)
        query = QueryBatch.of(prompt[None, :, None].astype(np.float64), "")
        read = keyhole.choose_tokens(box, tokens).ask(query)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.as_tensor(prompt[None] + SHIFT)).logits[0, -1].numpy()
    truth = logits[tokens] - logits[tokens[0]]
    assert np.abs(read - truth).max() <= 2.0 * 0.01  # both ends of a difference are raced for
