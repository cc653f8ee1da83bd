"""`keyhole doctor` as typed: exit codes, --json, the page, a slip of the pen."""

import json
import sys

import pytest
from typer.testing import CliRunner

from keyhole.cli.commands import app
from sentence_folders import write_sentence

SUSPECT = """
from suspects import serve_bert
import torch, transformers
model = transformers.AutoModel.from_pretrained(r"{folder}").eval()
healthy = serve_bert(model)
causal = serve_bert(model, causal=True)
def broken(tokens, attention_mask=None):
    raise RuntimeError("out of order")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    write_sentence(folder / "model")
    (folder / "served_here.py").write_text(SUSPECT.format(folder=folder / "model"))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def run(place, suspect, *options):
    return CliRunner().invoke(app, ["doctor", f"hf:{place / 'model'}", suspect, *options])


def test_healthy_ends_with_zero(place) -> None:
    done = run(place, "served_here:healthy")
    assert done.exit_code == 0, done.output
    assert "HEALTHY" in done.output


def test_a_fault_ends_with_one_and_a_page(place, tmp_path) -> None:
    done = run(place, "served_here:causal", "--json", "--report", str(tmp_path / "page.html"))
    assert done.exit_code == 1
    record = json.loads(done.stdout)
    assert [cause["name"] for cause in record["causes"]] == ["attention is causal"]
    assert "attention is causal" in (tmp_path / "page.html").read_text()


def test_a_person_reads_causes_and_advice(place) -> None:
    done = run(place, "served_here:causal")
    assert "DIFFERENT" in done.output
    assert "is_causal=False" in done.output


def test_how_it_ends_otherwise(place) -> None:
    from keyhole.cli.main import exit_code

    assert exit_code(run(place, "served_here:broken").exception) == 3
    assert exit_code(run(place, "nowhere_at_all:x").exception) == 2
    assert exit_code(run(place, "served_here:healthy", "--budget", "3").exception) == 4
    assert exit_code(run(place, "served_here:healthy", "--pooling", "wrong").exception) == 2
