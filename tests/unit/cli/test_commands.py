"""Commands in this process: what they check before they ask, and what they leave with."""

import json
import sys

import numpy as np
import pytest

import keyhole
from keyhole.cli.main import main
from keyhole.models.files import save_model
from keyhole.models.random import attention

MINE = """
import numpy as np
from keyhole.models.random import attention
head, asked = attention(np.random.default_rng(5), 4), []
def box(tokens):
    asked.append(len(tokens))
    return head(tokens)
def dying(tokens):
    if sum(asked) > 20:
        raise ConnectionError("gone")
    return box(tokens)
def noise(tokens, rng=np.random.default_rng(0)):
    return rng.standard_normal(len(tokens))
box.width = dying.width = noise.width = 4
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


def test_without_a_word_the_commands_are_listed(command):
    code, shown, error = command("")
    assert code == 2, error
    assert "Start with: keyhole demo" in shown
    assert "  recover " in shown


@pytest.mark.parametrize("place", ["--out file/run", "--report file/r.html", "--report ."])
def test_where_nothing_can_be_kept_nothing_is_asked(command, tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    code, _, error = command(f"recover counted:box {place}")
    assert code == 2
    assert error.startswith("keyhole: ")
    assert place.split()[0] in error  # what to change
    assert "counted" not in sys.modules or sys.modules["counted"].asked == []
    assert command(f"demo --width 3 {place}")[0] == 2


@pytest.mark.parametrize("form", ["", "--json"])
def test_a_result_that_cannot_be_saved_is_shown_all_the_same(command, monkeypatch, form):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(keyhole.Recovery, "save", full)
    code, shown, error = command(f"recover counted:box --out run {form}")
    words = "run could not be written (no space left): make room, or name another place with --out"
    assert code == 2
    assert words in error.splitlines()[-1]
    assert "RECOVERED" in shown
    if form:
        record = json.loads(shown)
        assert record["outcome"] == "RECOVERED"
        assert words in record["message"]
        assert (record["error"], record["exit_code"]) == ("InvalidArgument", 2)


@pytest.mark.parametrize("form", ["", "--json"])
def test_an_audit_without_its_plot_is_shown_all_the_same(command, monkeypatch, form):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("keyhole.audit.picture.draw", full)
    words = "audit head.safetensors --protections float64 --multiples 1 --no-unbounded --plot a.png"
    code, shown, error = command(f"{words} {form}")
    assert code == 2
    assert "a.png could not be written (No space left on device)" in error
    assert json.loads(shown)["rows"] if form else "float64" in shown


def test_a_place_that_looks_like_markup_is_named_as_it_is(command):
    code, shown, _ = command("recover counted:box --out o[/b]ut")
    assert code == 0
    assert "saved in o[/b]ut" in shown


def test_a_box_that_fails_half_way_leaves_the_command_that_continues(command):
    code, _, error = command("recover counted:dying --journal run.journal")
    assert code == 3
    assert "the box failed after" in error
    assert error.splitlines()[-1] == "  keyhole recover counted:dying --journal run.journal"


def test_what_noise_hides_is_no_spent_budget(command):
    code, shown, _ = command("recover counted:noise --learner relu-network --json")
    record = json.loads(shown)
    assert (code, record["outcome"]) == (1, "UNVERIFIED")
    assert "Noise hides the box" in record["reason"]


MISUSE = {  # command -> the error's name
    "recover counted:nothing --json": "InvalidArgument",
    "recover --json": "BadParameter",
    "recover counted:box --width x --json": "BadParameter",
    "dance --json": "UsageError",
    "learn nothing.npz --json": "FileFormatError",
    "recover counted:box --vocabulary nothing.npy --json": "FileNotFoundError",
    "audit head.safetensors --plot head.safetensors/a.png --json": "InvalidArgument",
    "report head.safetensors --json": "InvalidArgument",
}


@pytest.mark.parametrize("words", MISUSE)
def test_with_json_an_error_is_one_object_too(command, words):
    code, shown, error = command(words)
    record = json.loads(shown)
    assert (code, record["exit_code"], record["error"]) == (2, 2, MISUSE[words])
    assert record["message"]
    assert error
    assert not command(words.removesuffix("--json"))[1]


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ZeroDivisionError("seven"), 70, "a fault of Keyhole"),
        (MemoryError(), 2, "out of memory: ask fewer queries"),
        (KeyboardInterrupt(), 130, "keyhole: stopped"),
    ],
)
def test_what_nobody_expected_is_no_verdict(command, monkeypatch, raised, code, said):
    """An exit code of 1 would say that the box is something else."""

    def broken(*_, **__):
        raise raised

    monkeypatch.setattr("keyhole.measurement.noise.examine", broken)
    left, shown, error = command("check counted:box --json")
    assert left == json.loads(shown)["exit_code"] == code
    assert said in error
    assert ("Traceback" in error) == (code == 70)


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
        f"recover counted:box --learner single-head --budget {paid - 56} --json"
    )
    assert (code, json.loads(shown)["outcome"]) == (4, "UNVERIFIED")


def test_identifiability_as_json(command):
    code, shown, _ = command("identifiability head.safetensors --json")
    record = json.loads(shown)
    assert (code, record["identifiable"], record["heads"]) == (0, True, 1)
    assert command("identifiability head.safetensors")[1].splitlines() == record["sentences"]
