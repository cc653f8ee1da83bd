"""`keyhole audit` as a person types it: killed and continued, in processes, on a cluster."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import keyhole
from keyhole.audit.cells import Plan
from keyhole.audit.sweep import run_audit
from keyhole.cli.audit import audit
from keyhole.models.files import save_model
from keyhole.models.random import attention

WIDTH = 6
SECRET = attention(np.random.default_rng(0), WIDTH)
PLAN = Plan(("float32", "decimals:3", "noise:1e-3"), (1, 4))
OPTIONS = ["--protections", "float32,decimals:3,noise:1e-3", "--multiples", "1,4"]
CODE = "import typer; from keyhole.cli.audit import audit; typer.run(audit)"


@pytest.fixture
def model(tmp_path):
    return save_model(SECRET, tmp_path / "model.safetensors")


def command(*arguments):
    app = typer.Typer()
    app.command()(audit)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_one_and_two_processes_agree():
    one = run_audit(SECRET, PLAN, workers=1)
    two = run_audit(SECRET, PLAN, workers=2)
    assert one.cells == two.cells
    assert len(one.cells) == 12


@pytest.mark.filterwarnings("ignore")  # Dask's own, when processes come and go
def test_a_cluster_gives_the_same(model):
    distributed = pytest.importorskip("distributed")
    alone = run_audit(SECRET, PLAN, workers=1)
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as cluster:
        shown = command(model, *OPTIONS, "--scheduler", cluster.scheduler_address, "--json")
        assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["cells"] == [dict(cell) for cell in alone.cells]


def gone(group):
    """Whether all processes of a group have ended, within half a minute."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_killed_and_continued(model, tmp_path):
    store = tmp_path / "cells.jsonl"
    # many repetitions, so that there is a half way
    arguments = [sys.executable, "-c", CODE, str(model), "--protections", "noise:1e-3"]
    arguments += ["--multiples", "16", "--repeats", "24", "--no-unbounded", "--json"]
    arguments += ["--workers", "2"]
    arguments += ["--store", str(store)]
    environment = {**os.environ, "PYTHONPATH": str(Path(keyhole.__file__).parents[1])}
    process = subprocess.Popen(
        arguments, env=environment, stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if store.exists() and store.read_bytes().count(b"\n") >= 4:
            break
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)  # the parent alone: its children must follow
    process.wait()
    assert gone(process.pid)
    kept = [line for line in store.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]
    assert 4 <= len(kept) < 25
    done = subprocess.run(arguments, env=environment, capture_output=True, check=True, text=True)
    lines = store.read_bytes().splitlines(keepends=True)
    assert lines[: len(kept)] == kept
    keys = [json.loads(line)["key"] for line in lines[1:]]
    assert len(keys) == len(set(keys)) == 24
    assert len(json.loads(done.stdout)["cells"]) == 24


def test_table_and_plot(model, tmp_path):
    plot = tmp_path / "plot.svg"
    shown = command(model, *OPTIONS, "--plot", plot, "--no-unbounded")
    assert shown.exit_code == 0, shown.output
    assert "noise 1e-03" in shown.output
    assert "queries" in shown.output
    assert plot.exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["missing.safetensors"], keyhole.FileFormatError),
        (["keyhole:__version__"], keyhole.InvalidArgument),
        (["keyhole:nothing_here"], keyhole.InvalidArgument),
        (["{model}", "--multiples", "many"], keyhole.InvalidArgument),
        (["{model}", "--protections", "prayer"], keyhole.InvalidArgument),
        (["{model}", "--plot", "plot.gif"], keyhole.InvalidArgument),
        (["{model}", "--max-norm", "-1"], keyhole.InvalidArgument),
        (["{model}", "--scheduler", "nonsense"], keyhole.KeyholeError),
    ],
)
def test_mistakes_get_a_sentence(model, arguments, error):
    shown = command(*(argument.format(model=model) for argument in arguments))
    assert isinstance(shown.exception, error), shown.exception
