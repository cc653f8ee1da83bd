"""Evidence for language models: whatever the interface tells, the verdict follows again offline."""

import json

import numpy as np
import pytest

import keyhole
from completions_server import served
from keyhole.errors import FileFormatError
from keyhole.oracles.language_model.interface import Interface
from keyhole.verification.records import pack_array, unpack_array, write_record
from keyhole.verification.signature import (
    EVIDENCE,
    check_evidence,
    speak_with_evidence,
    verify_with_evidence,
)
from keyhole.verification.spoken_evidence import PromptPlan
from prompted_models import TOKENS, LastTokens

NAMES = [f"t{token}" for token in range(TOKENS)]
INTERFACES = {
    "all": Interface(TOKENS, TOKENS),
    "five": Interface(TOKENS, 5),
    "label": Interface(TOKENS, 0),
    "label with a bias": Interface(TOKENS, 0, bias="sampling"),
}


def other(prompts):
    return LastTokens(table=np.random.default_rng(7).standard_normal((2, TOKENS, 6)))(prompts)


def bend(path, change):
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    change(body)
    write_record(path, EVIDENCE, body)


@pytest.mark.parametrize("logits", [LastTokens(), other], ids=["same", "other"])
@pytest.mark.parametrize("tells", INTERFACES)
def test_a_verdict_is_checked_offline(tells, logits, tmp_path):
    path = tmp_path / "verdict.evidence"
    with served(logits, INTERFACES[tells], "ids") as server:
        box = keyhole.open_language_model(server.url, vocabulary=TOKENS, max_length=9, names=NAMES)
        verdict = speak_with_evidence(box, LastTokens(), path, queries=20, seed=3)
        box.close()
    assert verdict.agrees == (logits is not other)
    evidence = check_evidence(path)
    assert evidence.sound, str(evidence)
    assert evidence.verdict.bound == verdict.bound
    assert evidence.verdict.worst == verdict.worst
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("top", [5, 0])
def test_a_verdict_on_a_signature_is_checked_offline(top, tmp_path):
    signature, path = tmp_path / "a.keyhole", tmp_path / "verdict.evidence"
    with served(LastTokens(), Interface(TOKENS, top), "ids") as server:
        box = keyhole.open_language_model(server.url, vocabulary=TOKENS, max_length=9, names=NAMES)
        keyhole.sign(box, signature, queries=20, seed=1)
        verdict = verify_with_evidence(box, str(signature), path, queries=8)
        box.close()
    assert verdict.agrees
    assert check_evidence(path).sound
    assert not verify_with_evidence(keyhole.open_language_model(other), str(signature), path).agrees
    assert check_evidence(path).sound
    assert not check_evidence(path).verdict.agrees


def test_what_does_not_fit_together_is_found(tmp_path):
    path = tmp_path / "verdict.evidence"
    box = keyhole.open_language_model(other, vocabulary=TOKENS, max_length=9)
    assert not speak_with_evidence(box, LastTokens(), path, queries=12, seed=3).agrees
    whole = path.read_bytes()
    for place in np.linspace(0, len(whole) - 1, 40).astype(int):
        altered = bytearray(whole)
        altered[place] ^= 4
        path.write_bytes(altered)
        with pytest.raises(FileFormatError):
            check_evidence(path)
    path.write_bytes(whole)
    bend(path, lambda body: body["verdict"].update(agrees=True))
    assert "not so: the verdict follows" in str(check_evidence(path))
    path.write_bytes(whole)

    def another_prompt(body):
        first = unpack_array(body["spoken"]["prompts"][0])
        body["spoken"]["prompts"][0] = pack_array((first + 1) % TOKENS)

    bend(path, another_prompt)
    assert "not so: the seed draws these queries" in str(check_evidence(path))
    path.write_bytes(whole)
    bend(path, lambda body: body["plan"].update(seed=4))
    assert "not so: the seed is the one committed to" in str(check_evidence(path))


def test_prompts_that_were_chosen_come_from_the_pool():
    plan = PromptPlan(3, 4, TOKENS, 9)
    assert not plan.draws(tuple(np.array([1]) for _ in range(4)), 2)
    assert not plan.draws((), 2)
