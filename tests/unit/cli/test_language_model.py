"""Language models on the command line: check, recover, audit."""

import json
import sys
from pathlib import Path

import pytest

from keyhole.cli.main import main

MINE = """
from token_models import LanguageModel
logits = LanguageModel(3, tokens=80, width=8)
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Types words; gives the exit code and what was printed."""
    (tmp_path / "spoken.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def type_in(words):
        monkeypatch.setattr(sys, "argv", ["keyhole", *words.split()])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capsys.readouterr()

    yield type_in
    sys.modules.pop("spoken", None)


def test_check_tells_what_the_box_does(command):
    code, out, _ = command("check spoken:logits --language-model --json")
    told = json.loads(out)
    assert (code, told["tokens"], told["answers"]) == (0, 80, "logits")


def test_recover_learns_the_output_layer_and_counts_money(command):
    code, out, _ = command("recover spoken:logits --tokens 80 --max-length 32 --price 2 --json")
    told = json.loads(out)
    assert (code, told["details"]["rank"]) == (0, 8)
    ledger = told["ledger"]
    assert told["details"]["money"] == pytest.approx(
        2e-6 * (ledger["prompt_tokens"] + ledger["paid"])
    )


def test_audit_writes_a_page(command):
    words = "audit spoken:logits --language-model --max-length 32 --most 1000 --report page.html"
    code, out, error = command(words)
    assert code == 0
    assert "width 8" in out
    assert "top 20, no bias" in error  # the last interface, on the way
    assert "gives away" in Path("page.html").read_text()


def test_what_language_models_do_not_have_is_said(command):
    code, _, error = command("check spoken:logits --language-model --width 4")
    assert code == 2
    assert "a language model has no --width" in error
    code, _, error = command("check spoken:logits --tokens 5")
    assert code == 3
    assert "answers with 80 numbers" in error
