"""A real llama.cpp server: what it does is found by asking, and its output layer is recovered.

It runs in a Python of its own, named by KEYHOLE_LLAMA_PYTHON, which needs xllamacpp and gguf. `make
test` builds one in `.venv-language-models` and names it.
"""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import keyhole
from keyhole.oracles.queries import QueryBatch
from llama_server import TOKENS, WIDTH

SERVER = Path(__file__).parents[1] / "llama_server.py"
WORDS = range(259, TOKENS)  # tokens that are whole characters
PROMPTS = QueryBatch.of(
    np.random.default_rng(0).integers(3, TOKENS, size=(3, 6, 1)).astype(np.float64), ""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def url(folder):
    python = os.environ.get("KEYHOLE_LLAMA_PYTHON")
    if not python:
        pytest.skip(
            "xllamacpp is not installed: `make test` could not, or was not used to start the tests; "
            "KEYHOLE_LLAMA_PYTHON may name a Python that has it and gguf"
        )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [python, str(SERVER), str(folder / "model.gguf")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    address = process.stdout.readline().strip()
    assert address.startswith("http://"), (folder / "log").read_text()[-2000:]
    yield address
    process.terminate()
    process.wait(20)
    process.stdout.close()


def opened(url, **options):
    return keyhole.open_language_model(url, max_length=64, **options)


@pytest.fixture(scope="module")
def truth(url):
    with opened(url) as box:
        return box.ask(PROMPTS)


def test_the_whole_vocabulary_gives_the_width(url, tmp_path):
    with opened(url) as box:
        told = box.interface
        assert (told.vocabulary, told.top, told.bias) == (TOKENS, TOKENS, "sampling")
        assert (told.number_format, told.repeatable) == ("float32", True)
        run = keyhole.recover(box, keyhole.OutputLayerLearner(), journal=tmp_path / "journal")
    assert run.outcome is keyhole.Outcome.RECOVERED
    assert run.model.width == WIDTH
    assert run.ledger.paid - box.opening_queries <= 2.5 * WIDTH


def test_top_20_and_bias_tell_the_same(url, truth):
    with opened(f"{url}/completion", top=20) as box:
        assert box.interface.reading == "reference"
        assert box.interface.heated
        found = box.ask(PROMPTS)
    assert np.abs(found - truth).max() < 1e-4
    assert np.median(np.abs(found - truth)) < 1e-5


def test_forced_tokens_tell_the_same(url, truth):
    chosen = list(WORDS)[:20]
    with opened(url, top=5) as box:
        assert box.interface.reading == "forced"
        found = keyhole.choose_tokens(box, chosen).ask(PROMPTS)
    same = truth[:, chosen] - truth[:, chosen[:1]]
    assert np.abs(found - same).max() < 1e-4


def test_the_file_that_is_served_is_read_as_the_server_computes(url, truth, folder):
    pytest.importorskip("gguf")
    import gguf

    tensors = {
        tensor.name: tensor.data for tensor in gguf.GGUFReader(folder / "model.gguf").tensors
    }
    model = keyhole.from_gguf(folder / "model.gguf")
    prompts = PROMPTS.tokens()[:, :, 0].astype(int)
    logits = model(tensors["token_embd.weight"][prompts]) @ tensors["output.weight"].T
    logits = logits - logits.max(axis=1, keepdims=True)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert np.abs(expected - truth).max() < 1e-2  # it keeps keys and values in half precision


def test_chat_is_opened_too(url):
    with opened(f"{url}/v1/chat/completions", top=5) as box:
        assert box.interface.reading == "forced"
        assert not box.interface.numbers
        found = keyhole.choose_tokens(box, list(WORDS)[:5]).ask(PROMPTS)
    assert len(np.unique(found[:, 1])) == len(PROMPTS)  # prompts matter
