"""The commands a person types, in a process of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole
from keyhole.cli.main import main
from keyhole.models.files import save_model
from keyhole.models.random import attention
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel

SOURCE = str(Path(keyhole.__file__).parents[1])
MODEL = attention(np.random.default_rng(5), 6, bias=True)

BOXES = '''
"""Boxes for the command line."""

import numpy as np

from keyhole.models.random import attention

head = attention(np.random.default_rng(5), 6, bias=True)
other = attention(np.random.default_rng(6), 6, bias=True)
two_heads = attention(np.random.default_rng(7), 6, heads=2)


def plain(tokens):  # does not tell its width
    return head(tokens)


def told(tokens):
    return head(tokens)


told.width = 6


def broken(tokens):
    raise RuntimeError("the cable is out")


broken.width = 6


def misshapen(tokens):
    return head(tokens)[:, None, None]


misshapen.width = 6
number = 3
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(BOXES)
    return tmp_path


def run(folder: Path, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "keyhole", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done


def as_json(folder: Path, *arguments: str, code: int = 0) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    done = run(folder, *arguments, "--json", code=code)
    return json.loads(done.stdout, parse_constant=refuse)


def sentence(done: subprocess.CompletedProcess[str]) -> str:
    """The error: one line on stderr that starts with the command's name."""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("keyhole: ")
    return lines[0]


def test_demo_recovers_what_it_hid_and_saves_the_run(folder: Path) -> None:
    text = run(folder, "demo", "--width", "6").stdout
    assert "RECOVERED" in text
    assert "49 parameters" in text
    error = re.search(r"relative error of ([0-9.e+-]+[0-9])", text)
    assert error is not None
    assert float(error[1]) < 1e-12
    assert "score" in text
    recovery = keyhole.load(folder / "keyhole-demo")
    assert recovery.outcome is keyhole.Outcome.RECOVERED


def test_recover_a_target_that_tells_its_width(folder: Path) -> None:
    record = as_json(folder, "recover", "mine:told", "--out", "run")
    assert record["outcome"] == "RECOVERED"
    assert record["ledger"]["floor"] == 49
    recovery = keyhole.load(folder / "run")
    assert keyhole.distance(recovery.model, MODEL) < 1e-12
    assert recovery.to_json() == record
    assert run(folder, "recover", "mine:told").stdout.count("RECOVERED") == 1


def test_recover_a_target_that_does_not(folder: Path) -> None:
    assert "--width" in sentence(run(folder, "recover", "mine:plain", code=2))
    assert as_json(folder, "recover", "mine:plain", "--width", "6")["outcome"] == "RECOVERED"


@pytest.mark.parametrize(
    ("options", "purpose"),
    [
        (["relu-network", "--exact"], "polish"),
        (["transformer", "--no-exact"], "score"),
        (["transformer", "--method", "antisymmetric", "--no-exact"], "score"),
    ],
)
def test_recover_networks_and_layers(folder: Path, options: list[str], purpose: str) -> None:
    network = ReluNetwork(np.random.default_rng(0).standard_normal((5, 3)), None, np.arange(1.0, 6))
    model: Any = network
    if options[0] == "transformer":
        model = TransformerModel(np.eye(3), None, network)
    save_model(model, folder / "m.safetensors")
    record = as_json(folder, "recover", "m.safetensors", "--learner", *options)
    assert record["outcome"] == "RECOVERED"
    assert purpose in record["ledger"]["by_purpose"]
    assert ("polish" in record["ledger"]["by_purpose"]) == ("--exact" in options)


def test_recover_a_saved_model_and_leave_out_verification(folder: Path) -> None:
    save_model(MODEL, folder / "m.safetensors")
    record = as_json(folder, "recover", "m.safetensors", "--no-verify")
    assert record["outcome"] == "UNVERIFIED"
    assert record["verdict"] is None


def test_rejected_is_1_with_the_counterexample(folder: Path) -> None:
    record = as_json(folder, "recover", "mine:two_heads", "--learner", "single-head", code=1)
    assert record["outcome"] == "REJECTED"
    assert record["verdict"]["counterexample"]["input"]
    assert (
        "counterexample"
        in run(folder, "recover", "mine:two_heads", "--learner", "single-head", code=1).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["recover", "nowhere:box"], "no module named 'nowhere'"),
        (["recover", "mine:nothing"], "mine has no 'nothing'"),
        (["recover", "mine:number", "--width", "6"], "cannot open a int"),
        (["recover", "missing.safetensors"], "is no file"),
        (["recover", "mine.py"], "is Python code: name what is in it as mine:attribute"),
        (["recover", "mine:told", "--learner", "psychic"], "unknown learner 'psychic'"),
        (["recover", "mine:told", "--exact"], "Auto has no option exact"),
        (["recover", "mine:told", "--method", "convex"], "Auto has no option method"),
        (["recover", "mine:told", "--budget", "0"], "budget must be a whole number of at least 1"),
        (["recover", "mine:told", "--max-norm", "-1"], "max_norm must be a finite number above 0"),
        (["recover", "mine:told", "--journal", "none/run.journal"], "not a folder"),
        (["verify", "missing", "mine:told"], "does not exist"),
        (["verify", "mine.py", "mine:told"], "cannot be read"),
        (["check", "mine:plain"], "--width"),
        (["plan"], "name a TARGET, or give --width"),
        (["report", "missing"], "does not exist"),
        (["report", "mine.py"], "cannot be read"),
    ],
)
def test_misuse_is_2_with_one_sentence(
    folder: Path,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process: what is tested is the sentence, and there are many."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["keyhole", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    with pytest.raises(SystemExit) as left:
        main()
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    printed = capsys.readouterr()
    done = subprocess.CompletedProcess(arguments, 2, printed.out, printed.err)
    assert left.value.code == 2
    assert words in sentence(done)


def test_unknown_commands_and_options_are_2(folder: Path) -> None:
    for arguments in (["dance"], ["recover"], ["recover", "mine:told", "--nonsense"]):
        run(folder, *arguments, code=2)


def test_a_failing_box_is_3(folder: Path) -> None:
    assert as_json(folder, "recover", "mine:broken", code=3)["outcome"] == "ORACLE_FAILED"
    shown = run(folder, "recover", "mine:broken", code=3).stdout
    assert "the cable is out" in " ".join(shown.replace("│", " ").split())
    assert "shape" in as_json(folder, "recover", "mine:misshapen", code=3)["reason"]


def test_a_spent_budget_is_4_and_the_journal_continues(folder: Path) -> None:
    options = ("--journal", "run.journal")
    record = as_json(folder, "recover", "mine:told", "--budget", "20", *options, code=4)
    assert record["outcome"] == "BUDGET_EXHAUSTED"
    assert record["ledger"]["paid"] <= 20
    resumed = as_json(folder, "recover", "mine:told", *options)
    assert resumed["ledger"]["replayed"] == record["ledger"]["paid"]
    assert resumed["ledger"]["paid"] == as_json(folder, "recover", "mine:told")["ledger"]["paid"]
    words = sentence(run(folder, "recover", "mine:told", "--seed", "1", *options, code=2))
    assert "seed" in words


def test_verify_says_whether_the_box_is_the_model(folder: Path) -> None:
    as_json(folder, "recover", "mine:told", "--out", "run")
    assert as_json(folder, "verify", "run/model.safetensors", "mine:plain")["agrees"] is True
    assert "agrees" in run(folder, "verify", "run", "mine:told", "--queries", "9").stdout
    verdict = as_json(folder, "verify", "run", "mine:other", code=1)
    assert verdict["agrees"] is False
    assert verdict["counterexample"]["input"]
    assert "cable" in sentence(run(folder, "verify", "run", "mine:broken", code=3))
    as_json(folder, "recover", "mine:told", "--budget", "3", "--out", "spent", code=4)
    assert "without a model" in sentence(run(folder, "verify", "spent", "mine:told", code=2))


def test_check_tells_what_the_box_can_do(folder: Path) -> None:
    found = as_json(folder, "check", "mine:told")
    assert found["width"] == 6
    assert found["number_format"] == "float64"
    assert found["deterministic"] is True
    assert found["recover"].startswith("will try: ")
    assert found["asked"] < 30
    assert "number format" in run(folder, "check", "mine:told").stdout
    assert "cable" in sentence(run(folder, "check", "mine:broken", code=3))
    assert "shape" in sentence(run(folder, "check", "mine:misshapen", code=3))


def test_a_report_is_written_and_rebuilt_from_the_saved_run(folder: Path) -> None:
    text = run(folder, "recover", "mine:told", "--out", "run", "--report", "first.html").stdout
    assert "report: first.html" in text
    first = (folder / "first.html").read_text("utf-8")
    assert "keyhole recover mine:told --out run --report first.html" in first
    assert as_json(folder, "report", "run", "--out", "again.html")["bytes"] == len(first.encode())
    assert (folder / "again.html").read_text("utf-8") == first
    assert "report.html" in run(folder, "report", "run").stdout
    assert (folder / "run/report.html").read_text("utf-8") == first
    words = sentence(run(folder, "report", "run/model.safetensors", code=2))
    assert "folder of a run" in words
    run(folder, "recover", "mine:told", "--budget", "5", "--report", "spent.html", code=4)
    assert "budget exhausted" in (folder / "spent.html").read_text("utf-8")


def test_plan_tells_the_cost_before_it_is_paid(folder: Path) -> None:
    record = as_json(folder, "plan", "mine:told", "--rank", "2")
    assert record["kind"] == "attention"
    assert record["asked"] <= 30
    lines = {line["learner"]: line for line in record["learners"]}
    assert set(lines) == {"single-head", "low-rank", "multi-head"}
    paid = as_json(folder, "recover", "mine:told", "--learner", "single-head")["ledger"]["learning"]
    assert abs(lines["single-head"]["queries"] - paid) <= 16
    assert lines["single-head"]["seconds"] > 0
    assert lines["single-head"]["error"] < 1e-12
    text = run(folder, "plan", "--width", "64", "--no-rehearse").stdout
    assert "4,164" in text
    assert "give --rank" in text
    assert "cable" in sentence(run(folder, "plan", "mine:broken", code=3))


def test_help_and_version(folder: Path) -> None:
    text = run(folder, "--help").stdout
    for command in ("demo", "recover", "check", "plan", "verify", "report", "learn"):
        assert command in text
        assert "Usage" in run(folder, command, "--help").stdout
    assert keyhole.__version__ in run(folder, "--version").stdout
