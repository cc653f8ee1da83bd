"""What leaves is clean: no secrets, nothing that only a terminal would read."""

import numpy as np
import pytest

import keyhole
from keyhole import text
from keyhole.results import Ledger, Outcome, Recovery, plain
from keyhole.text import clean, clean_all, keep_secret

SECRET = 'Sup3r"S3cret/Value'


@pytest.fixture
def secret(monkeypatch):
    monkeypatch.setattr(text, "_secrets", {})
    keep_secret(SECRET)


@pytest.mark.parametrize(
    "said",
    [
        SECRET,
        SECRET.lower(),
        "Sup3r%22S3cret%2FValue",
        'Sup3r\\"S3cret/Value',
        "Sup3r&quot;S3cret/Value",
        "Sup3r\x00\x1b" + SECRET[5:],
    ],
)
def test_a_secret_is_cut_out_however_it_is_written(secret, said):
    assert clean(f"before {said} after") == "before [token] after"


def test_control_characters_are_dropped():
    assert clean("a\x1b[31mb\x07\r\x9bc\u202ed\ud800e") == "a[31mbcde"
    assert clean("first\n\tsecond – é 日本") == "first\n\tsecond – é 日本"


def test_every_text_of_a_record(secret):
    record = {SECRET: [SECRET, ("x\x1b", 3.5)], "kept": np.ones(2)}
    cleaned = clean_all(record)
    assert cleaned["[token]"] == ["[token]", ("x", 3.5)]
    assert cleaned["kept"] is record["kept"]
    assert plain({SECRET: "\x1b"}) == {"[token]": ""}


def test_short_words_are_no_secrets(monkeypatch):
    monkeypatch.setattr(text, "_secrets", {})
    keep_secret("is")
    assert clean("this is it") == "this is it"


def test_errors_and_recoveries_are_clean(secret):
    assert str(keyhole.OracleError(f"it said {SECRET}\x1b")) == "it said [token]"
    assert keyhole.InvalidArgument("plain").args == ("plain",)
    run = Recovery(
        Outcome.ORACLE_FAILED,
        None,
        None,
        None,
        Ledger(),
        reason=SECRET,
        notes=(f"{SECRET}\x1b",),
        details={"name": SECRET},
        run={"box": f"http://{SECRET.lower()}/"},
    )
    assert (run.reason, run.notes, dict(run.details)) == (
        "[token]",
        ("[token]",),
        {"name": "[token]"},
    )
    assert run.run["box"] == "http://[token]/"
