"""One model as a torch module, as an ONNX file and behind `keyhole serve`: the same recovery."""

import os
import socket
import subprocess
import sys
import time
import warnings

import httpx
import numpy as np
import pytest

import keyhole
from keyhole.models.draw import attention
from keyhole.models.export import export, to_torch

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

WIDTH = 12


class AnswersInSingle(torch.nn.Module):
    """Computes in double and answers in single precision: the engines' last bits are rounded off,
    so that torch and onnxruntime give the same answers bit for bit."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.width = inner, inner.width

    def forward(self, tokens):
        return self.inner(tokens).to(torch.float32)


def exported(module, path):
    """By torch's own exporter, as a user would."""
    example = torch.zeros(2, 3, WIDTH, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (example,),
            str(path),
            input_names=["tokens"],
            output_names=["answers"],
            dynamic_axes={"tokens": {0: "batch", 1: "length"}, "answers": {0: "batch"}},
            dynamo=False,
        )
    return path


def same(a, b):
    left, right = a.to_arrays(), b.to_arrays()
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


@pytest.fixture
def serve():
    """`keyhole serve TARGET` in a process of its own; gives the URL."""
    running = []

    def start(target, **environment):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        code = "import typer; from keyhole.cli.serve import serve; typer.run(serve)"
        command = [sys.executable, "-c", code, str(target), "--port", str(port)]
        running.append(
            subprocess.Popen(
                command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True
            )
        )
        for _ in range(300):
            assert running[-1].poll() is None, running[-1].stderr.read()
            try:
                if httpx.get(f"http://127.0.0.1:{port}/v2/health/ready").status_code == 200:
                    return f"http://127.0.0.1:{port}"
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("the server did not start")

    yield start
    for process in running:
        process.terminate()
        process.wait()
        process.stderr.close()


def test_bitwise_the_same_where_the_answers_are(tmp_path, serve, monkeypatch):
    module = AnswersInSingle(to_torch(attention(np.random.default_rng(0), WIDTH, bias=True)))
    file = exported(module, tmp_path / "model.onnx")
    here = keyhole.recover(learner=keyhole.SingleHead(), box=module)
    there = keyhole.recover(learner=keyhole.SingleHead(), box=str(file))
    with keyhole.open_oracle(serve(file)) as box:
        served = keyhole.recover(learner=keyhole.SingleHead(), box=box)
    for other in (there, served):
        assert same(here.model, other.model)
        assert dict(here.ledger.by_purpose) == dict(other.ledger.by_purpose)
    assert here.details["precision"] == "float32"


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_serving_changes_no_bit_and_engines_only_the_last(tmp_path, serve, dtype):
    secret = attention(np.random.default_rng(1), WIDTH, outputs=2)
    module = to_torch(secret, dtype)
    file = export(secret, tmp_path / "model.onnx", dtype)
    model = export(secret, tmp_path / "model.safetensors", dtype)
    paid, found = [], []
    for target in (file, model):
        local = keyhole.recover(learner=keyhole.SingleHead(), box=str(target))
        with keyhole.open_oracle(serve(target)) as box:
            remote = keyhole.recover(learner=keyhole.SingleHead(), box=box)
        assert same(local.model, remote.model)
        assert dict(local.ledger.by_purpose) == dict(remote.ledger.by_purpose)
        paid.append(local.ledger.paid)
        found.append(local.model)
    there = keyhole.recover(learner=keyhole.SingleHead(), box=module)
    tolerance = 1e-11 if dtype == np.float64 else 3e-3
    assert {*paid, there.ledger.paid} == {paid[0]}
    assert all(keyhole.distance(there.model, other) < tolerance for other in found)
