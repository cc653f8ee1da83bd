"""verify, sign and watch as they are typed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from embedding_server import served
from keyhole.cli.main import main
from keyhole.oracles.token_models import open_token_model
from sentence_folders import write_sentence

MINE = """
import numpy as np
from keyhole.models.random import attention
layer = attention(np.random.default_rng(0), 5, outputs=2)
changed = attention(np.random.default_rng(1), 5, outputs=2)
table = np.random.default_rng(0).standard_normal((30, 30))
def logits(prompts):
    return table[prompts[:, -1]] + table[prompts[:, 0]]
def heated(prompts):
    return logits(prompts) / 1.3
"""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Types words; gives the exit code and what was printed."""
    (tmp_path / "typed.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def type_in(words):
        monkeypatch.setattr(sys, "argv", ["keyhole", *words.split()])
        with pytest.raises(SystemExit) as left:
            main()
        return left.value.code or 0, *capsys.readouterr()

    yield type_in
    sys.modules.pop("typed", None)


def test_sign_verify_and_evidence(command):
    code, out, _ = command("sign typed:layer --out a.keyhole --seed 3 --json")
    told = json.loads(out)
    assert (code, told["queries"], told["kind"], told["seed"]) == (0, 59, "vectors", 3)
    assert Path("a.keyhole").stat().st_mode & 0o777 == 0o600
    code, out, _ = command("verify a.keyhole typed:layer --evidence v.evidence --json")
    assert (code, json.loads(out)["agrees"]) == (0, True)
    code, out, _ = command("verify --evidence v.evidence")
    assert code == 0
    assert "The evidence is sound" in out
    code, out, _ = command("verify a.keyhole typed:changed --junit v.xml")
    assert code == 1
    assert "differs" in out
    assert "failure" in Path("v.xml").read_text()
    whole = bytearray(Path("v.evidence").read_bytes())
    whole[len(whole) // 2] ^= 1
    Path("v.evidence").write_bytes(whole)
    code, _, error = command("verify --evidence v.evidence")
    assert code == 2
    assert "was altered or cut" in error


def test_watch_night_after_night(command):
    command("sign typed:layer --out a.keyhole")
    code, out, _ = command("watch a.keyhole typed:layer --state w.json --report w.html")
    assert code == 0
    assert "No alarm after 1 night(s)" in out
    assert "<svg" in Path("w.html").read_text()
    codes = [command("watch a.keyhole typed:changed --state w.json --json")[0] for _ in range(3)]
    assert codes[-1] == 1
    code, out, _ = command("watch a.keyhole typed:layer --state w.json --junit w.xml")
    assert code == 1  # until it is armed again
    assert "ALARM: the box changed, most likely on" in out
    assert "the box changed" in Path("w.xml").read_text()
    code, out, _ = command("watch a.keyhole typed:layer --state w.json --rearm --json")
    told = json.loads(out)
    assert (code, told["alarm"], told["nights"], len(told["history"])) == (0, False, 1, 1)


def test_a_folder_against_an_endpoint(command, tmp_path):
    (tmp_path / "folder").mkdir()
    folder = write_sentence(tmp_path / "folder")
    model = open_token_model(folder)

    def embed(tokens, attention_mask):
        kept = attention_mask.sum(axis=1)
        return model.ask([row[:n] for row, n in zip(tokens, kept, strict=True)])

    with served(embed, dialects=("tei", "own")) as server:
        code, out, _ = command(f"verify hf:folder {server.url}/embed --queries 20 --json")
        assert (code, json.loads(out)["agrees"]) == (0, True)
        request = '{"ask":{"these":"$tokens"}}'
        own = f"--request {request} --answer result.vectors"
        code, out, _ = command(f"verify hf:folder {server.url}/own {own} --queries 20")
        assert code == 0, out
        code, out, _ = command(f"watch hf:folder {server.url}/embed --state w.json --queries 10")
        assert code == 0
        words = f"sign {server.url}/embed --tokens 50 --max-length 20 --out e.keyhole --queries 10"
        assert command(words)[0] == 0
        assert command(f"verify e.keyhole {server.url}/embed")[0] == 0


def test_language_models(command):
    code, out, _ = command("verify typed:logits typed:logits --language-model --queries 10")
    assert code == 0
    assert "10 fresh prompts" in " ".join(out.split())
    code, out, _ = command("verify typed:logits typed:heated --language-model --queries 10 --json")
    assert (code, json.loads(out)["agrees"]) == (1, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("verify", "name what TARGET should be"),
        ("verify no.such typed:layer", "no file, no URL"),
        ("verify hf:missing http://127.0.0.1:9", "no folder of a transformers model"),
        ("watch typed:layer", "TARGET"),
        ("sign --out a.keyhole", "name the box"),
        ("verify typed:layer typed:layer --evidence e", "sign the reference first"),
    ],
)
def test_slips_end_in_one_sentence(command, words, said):
    code, _, error = command(words)
    assert code == 2
    assert said in " ".join(error.split())
    assert "Traceback" not in error


def test_answers_of_floats_and_text(command):
    assert np.isfinite(json.loads(command("sign typed:layer --json")[1])["queries"])
    assert Path("model.keyhole").exists()
