"""Other people's programs: our client against MLServer, tritonclient against our server.

Neither belongs into this project's environment (MLServer pins old versions of what others need), so
each runs in a Python of its own, named by KEYHOLE_MLSERVER_PYTHON and KEYHOLE_TRITON_PYTHON. `make
test` builds one for both in `.venv-interoperation` and names it.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time

import httpx
import numpy as np
import pytest

import keyhole
from keyhole.models.files import save_model
from keyhole.models.random import attention
from keyhole.serving.server import service

WIDTH = 6
SERVED = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse
A = np.load("parameters.npz")


class Head(MLModel):
    async def load(self):
        return True

    async def predict(self, payload):
        x = NumpyCodec.decode_input(payload.inputs[0])
        keys = x[:, -1] @ A["score"].T
        scores = np.einsum("bnd,bd->bn", x, keys)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        answers = np.einsum("bn,bnd,dk->bk", weights, x, A["value"])
        output = NumpyCodec.encode_output("answers", answers)
        return InferenceResponse(model_name=self.name, id=payload.id, outputs=[output])
"""
ASKING = """
import sys, numpy as np, tritonclient.http as triton
from tritonclient.utils import InferenceServerException
url, binary = sys.argv[1], sys.argv[2] == "binary"
client = triton.InferenceServerClient(url)
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("model")
told = client.get_model_metadata("model")
assert told["inputs"][0]["shape"] == [-1, -1, 6], told
assert [m["name"] for m in client.get_model_repository_index()] == ["model"]
tokens = np.load("tokens.npy")
asked = triton.InferInput("tokens", tokens.shape, "FP64")
asked.set_data_from_numpy(tokens, binary_data=binary)
wanted = triton.InferRequestedOutput("answers", binary_data=binary)
np.save("answers.npy", client.infer("model", [asked], outputs=[wanted]).as_numpy("answers"))
np.save("default.npy", client.infer("model", [asked]).as_numpy("answers"))
try:
    client.infer("other", [asked])
except InferenceServerException as error:
    assert "only model" in str(error), error
else:
    raise SystemExit("a model that does not exist answered")
"""


def python_with(package, variable):
    """An interpreter that has the package: the one named, or this one."""
    named = os.environ.get(variable)
    if named:
        return named
    if importlib.util.find_spec(package) is None:
        pytest.skip(
            f"{package} is not installed: `make test` could not, or was not used to start the "
            f"tests; {variable} may name a Python that has it"
        )
    return sys.executable


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def mlserver(tmp_path):
    """MLServer with one head, and the head."""
    python = python_with("mlserver", "KEYHOLE_MLSERVER_PYTHON")
    secret = attention(np.random.default_rng(0), WIDTH, outputs=2)
    head = secret.heads[0]
    np.savez(tmp_path / "parameters.npz", score=head.score, value=head.value)
    (tmp_path / "head.py").write_text(SERVED)
    port = free_port()
    settings = {"http_port": port, "grpc_port": free_port(), "metrics_port": free_port()}
    settings |= {"host": "127.0.0.1", "parallel_workers": 0, "debug": False}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    model = {
        "name": "head",
        "implementation": "head.Head",
        "inputs": [{"name": "tokens", "datatype": "FP64", "shape": [-1, -1, WIDTH]}],
        "outputs": [{"name": "answers", "datatype": "FP64", "shape": [-1, 2]}],
    }
    (tmp_path / "model-settings.json").write_text(json.dumps(model))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment["PYTHONPATH"] = str(tmp_path)
    process = subprocess.Popen(
        [python, "-c", "from mlserver.cli.main import main; main()", "start", str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True).start()
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        assert process.poll() is None, "".join(lines)
        try:
            if httpx.get(f"{url}/v2/models/head/ready").status_code == 200:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    yield url, secret
    process.terminate()
    process.wait(20)
    process.stdout.close()


def test_our_client_against_mlserver(mlserver):
    url, secret = mlserver
    for target in (url, f"{url}/v2/models/head"):
        with keyhole.open_oracle(target) as box:
            assert box.spec.width == WIDTH
            found = keyhole.recover(learner=keyhole.SingleHead(), box=box)
            assert found.outcome is keyhole.Outcome.RECOVERED
            assert keyhole.distance(found.model, secret) < 1e-12
    with pytest.raises(keyhole.OracleError, match="404"):
        keyhole.open_oracle(f"{url}/v2/models/tail")


@pytest.fixture
def served(tmp_path):
    """Our server with one head, in a thread."""
    uvicorn = pytest.importorskip("uvicorn")
    secret = attention(np.random.default_rng(1), WIDTH)
    save_model(secret, tmp_path / "model.safetensors")
    app = service(tmp_path / "model.safetensors").app()
    port = free_port()
    config = uvicorn.Config(app, port=port, log_level="error", access_log=False, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"127.0.0.1:{port}", secret
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize("encoding", ["binary", "json"])
def test_tritonclient_against_our_server(served, tmp_path, encoding):
    python = python_with("tritonclient", "KEYHOLE_TRITON_PYTHON")
    address, secret = served
    tokens = np.random.default_rng(2).standard_normal((5, 3, WIDTH))
    np.save(tmp_path / "tokens.npy", tokens)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    asked = subprocess.run(
        [python, "-c", ASKING, address, encoding],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert asked.returncode == 0, asked.stderr
    for name in ("answers.npy", "default.npy"):
        np.testing.assert_array_equal(np.load(tmp_path / name), secret(tokens))
