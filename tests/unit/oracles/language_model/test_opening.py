"""What finds out what a server does is asked once, however often a run is continued."""

import numpy as np
import pytest

import keyhole
from completions_server import served
from keyhole.oracles.language_model.dialects import Told
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.opening import OpeningRecord
from prompted_models import TOKENS, WIDTH, LastTokens, Space

BODY = {"prompt": [1, 2, 3]}


def test_replies_and_refusals_are_kept_in_the_order_they_were_asked(tmp_path):
    first = OpeningRecord(tmp_path / "run")
    replies = [Told(4, -0.5, {4: -0.5, "x": -1.5}), Told("y", None, {}), "answered 400: no"]
    for told in replies:
        assert first.recall("http://host", "/v1/completions", BODY) is None
        first.keep(told)
    again = OpeningRecord(tmp_path / "run")
    found = [again.recall("http://host", "/v1/completions", BODY) for _ in range(4)]
    assert found[2:] == ["answered 400: no", None]
    for told, kept in zip(replies[:2], found[:2], strict=True):
        assert (kept.sampled, kept.logprob, kept.likeliest) == (
            told.sampled,
            told.logprob,
            told.likeliest,
        )
    assert again.replayed == 3
    assert again.recall("http://other", "/v1/completions", BODY) is None


def test_a_damaged_line_counts_as_not_written(tmp_path):
    first = OpeningRecord(tmp_path / "run")
    first.recall("http://host", "/completion", BODY)
    first.keep(Told(1, None, {}))
    text = first.path.read_text()
    for damaged in (text[:-20], '{"asked": 3, "told": 4}', "[]", text.replace("1", "true")):
        first.path.write_text(damaged)
        assert OpeningRecord(tmp_path / "run").recall("http://host", "/completion", BODY) is None


def test_without_a_journal_nothing_is_kept(tmp_path):
    record = OpeningRecord(None)
    assert record.recall("http://host", "/completion", BODY) is None
    record.keep("answered 400")
    assert record.path is None


def test_a_place_that_cannot_be_written_is_an_error_with_its_name(tmp_path):
    record = OpeningRecord(tmp_path / "nowhere" / "run")
    record.recall("http://host", "/completion", BODY)
    with pytest.raises(keyhole.KeyholeError, match="nowhere"):
        record.keep("answered 400")


def test_a_run_that_is_continued_pays_for_opening_once(tmp_path):
    journal = tmp_path / "journal"
    interface = Interface(TOKENS, TOKENS)
    with served(LastTokens(), interface, "ids") as server:
        runs = []
        for _ in range(2):
            seen = server.requests
            with keyhole.open_language_model(
                server.url, vocabulary=TOKENS, max_length=16, journal=journal
            ) as box:
                opening = box.opening_queries
                runs.append(keyhole.recover(box, Space(WIDTH + 1), journal=journal))
            paid = server.requests - seen
        assert opening > 5
        assert paid == 1  # the box is asked whether it is still the same
    first, second = runs
    assert (first.ledger.replayed, second.ledger.replayed) == (0, first.ledger.paid)
    assert second.ledger.paid - first.ledger.paid == paid
    assert np.array_equal(first.model.basis, second.model.basis)
