"""Commands in this process: what they check before they ask, and what they leave with."""

import json
import sys

import numpy as np
import pytest

import keyhole
from keyhole.cli.app import main
from keyhole.models.draw import attention
from keyhole.models.files import save_model

MINE = """
import numpy as np
from keyhole.models.draw import attention
head, asked = attention(np.random.default_rng(5), 4), []
def box(tokens):
    asked.append(len(tokens))
    return head(tokens)
box.width = 4
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Types words; gives the exit code and what was printed."""
    (tmp_path / "counted.py").write_text(MINE)
    save_model(attention(np.random.default_rng(5), 4), tmp_path / "head.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def type_in(words):
        monkeypatch.setattr(sys, "argv", ["keyhole", *words.split()])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capsys.readouterr()

    yield type_in
    sys.modules.pop("counted", None)


@pytest.mark.parametrize("place", ["--out file/run", "--report file/r.html", "--report ."])
def test_where_nothing_can_be_kept_nothing_is_asked(command, tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    code, _, error = command(f"recover counted:box {place}")
    assert code == 2
    assert error.startswith("keyhole: ")
    assert "counted" not in sys.modules or sys.modules["counted"].asked == []
    assert command(f"demo --width 3 {place}")[0] == 2


@pytest.mark.parametrize("form", ["", "--json"])
def test_a_result_that_cannot_be_saved_is_shown_all_the_same(command, monkeypatch, form):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(keyhole.Recovery, "save", full)
    code, shown, error = command(f"recover counted:box --out run {form}")
    assert (code, error.splitlines()[-1]) == (2, "keyhole: no space left")
    assert "RECOVERED" in shown
    assert not form or json.loads(shown)["outcome"] == "RECOVERED"


def test_a_negative_seed_is_a_usage_error(command):
    for words in ("demo", "recover counted:box", "check counted:box", "learn x.npz"):
        code, _, error = command(f"{words} --seed -1")
        assert code == 2
        assert "--seed" in error


def test_unverified_is_fine_where_it_was_asked_for(command):
    code, shown, _ = command("recover counted:box --learner single-head --json")
    paid = json.loads(shown)["ledger"]["paid"]
    assert code == 0
    assert command("recover counted:box --learner single-head --no-verify --json")[0] == 0
    code, shown, _ = command(
        f"recover counted:box --learner single-head --budget {paid - 1} --json"
    )
    assert (code, json.loads(shown)["outcome"]) == (4, "UNVERIFIED")


def test_identifiability_as_json(command):
    code, shown, _ = command("identifiability head.safetensors --json")
    record = json.loads(shown)
    assert (code, record["identifiable"], record["heads"]) == (0, True, 1)
    assert command("identifiability head.safetensors")[1].splitlines() == record["sentences"]
