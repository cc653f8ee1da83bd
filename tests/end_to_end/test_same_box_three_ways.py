"""One model as a torch module, as an ONNX file and behind `keyhole serve`: the same recovery."""

import json
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
from keyhole.cli.main import main
from keyhole.models.export import export, to_torch
from keyhole.models.random import attention
from keyhole.oracles.base import Wrapper

torch = pytest.importorskip("torch")
pytest.importorskip("onnxruntime")

WIDTH = 12
ROUNDOFFS = 200  # of the number format: how far engines may pull the parameters apart (seen: 19)
BARS = 6  # standard errors: none of a few hundred numbers is further off
MINE = """
import numpy, keyhole
from keyhole.models.export import to_torch
module = to_torch(keyhole.load("{file}"), numpy.{dtype})
"""


class Recorded(Wrapper):
    """Notes every batch it is asked."""

    def __init__(self, inner):
        self.inner, self.batches = inner, []

    def ask(self, queries):
        self.batches.append((queries.purpose, queries.digest()))
        return self.inner.ask(queries)


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
    kind = next(module.parameters()).dtype
    example = torch.zeros(2, 3, WIDTH, dtype=kind)
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

    def start(target, folder=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "keyhole", "serve", str(target), "--port", str(port)]
        running.append(
            subprocess.Popen(command, cwd=folder, env=os.environ, stderr=subprocess.PIPE, text=True)
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


@pytest.fixture
def named(tmp_path, monkeypatch):
    """What a person types to name one and the same model, by the engine that runs it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def write(dtype):
        secret = attention(np.random.default_rng(1), WIDTH, outputs=2)
        model = export(secret, tmp_path / "model.safetensors", dtype)
        file = exported(to_torch(secret, dtype), tmp_path / "model.onnx")
        (tmp_path / "mine.py").write_text(MINE.format(file=model, dtype=dtype.__name__))
        return {"torch": "mine:module", "onnxruntime": str(file), "numpy": str(model)}

    yield write
    sys.modules.pop("mine", None)


def recovered(target, **options):
    """The recovery, and every batch that was asked on the way."""
    with keyhole.open_oracle(target, **options) as opened:
        box = Recorded(opened)
        return keyhole.recover(box, keyhole.SingleHead()), box.batches


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("engine", ["torch", "onnxruntime", "numpy"])
def test_serving_changes_no_bit(tmp_path, named, serve, engine, dtype):
    target = named(dtype)[engine]
    here, asked = recovered(target)
    url = serve(target, tmp_path)
    there = [recovered(url, encoding="binary"), recovered(url, encoding="json")]
    there.append(recovered([url, url], batch=512))  # as many as go to a box at once
    for remote, batches in there:
        assert batches == asked
        assert same(here.model, remote.model)
        assert dict(here.ledger.by_purpose) == dict(remote.ledger.by_purpose)
    shared = recovered([url, url], batch=5), recovered(target, batch=5)
    assert same(shared[0][0].model, shared[1][0].model)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_engines_differ_in_the_last_bits_alone(named, dtype):
    targets = named(dtype)
    found = {engine: recovered(target) for engine, target in targets.items()}
    here, asked = found.pop("torch")
    for there, batches in found.values():
        assert batches[0] == asked[0]  # later ones depend on the answers to the last bit
        assert dict(there.ledger.by_purpose) == dict(here.ledger.by_purpose)
        assert keyhole.distance(here.model, there.model) < ROUNDOFFS * np.finfo(dtype).eps / 2
        for part in ("score", "value"):
            ours, theirs = (getattr(run.model.heads[0], part) for run in (here, there))
            bars = [getattr(run.errors.heads[0], part) for run in (here, there)]
            assert (np.abs(ours - theirs) <= BARS * np.hypot(*bars)).all()


def test_on_the_command_line(tmp_path, named, serve, monkeypatch, capsys):
    targets = named(np.float64)
    targets["served"] = serve(targets["torch"], tmp_path)
    told, found = {}, {}
    for engine, target in targets.items():
        command = ["recover", target, "--learner", "single-head", "--json", "--out", engine]
        monkeypatch.setattr(sys, "argv", ["keyhole", *command])
        with pytest.raises(SystemExit) as left:
            main()
        assert not left.value.code
        told[engine] = json.loads(capsys.readouterr().out)["ledger"]["by_purpose"]
        found[engine] = keyhole.load(engine).model
    assert same(found["served"], found["torch"])
    assert all(counts == told["torch"] for counts in told.values())
