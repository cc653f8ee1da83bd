"""Servers with OpenAI's API: what they do is found by asking, and read as log-probabilities."""

import json
import threading
from contextlib import contextmanager

import numpy as np
import pytest

import keyhole
from completions_server import served
from keyhole.oracles.http.client import Access, Answer, Endpoint
from keyhole.oracles.language_model.dialects import Completions, Request
from keyhole.oracles.language_model.endpoint import Examiner, QuestionEndpoint, put
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.opening import OpeningRecord
from keyhole.oracles.language_model.questions import Question
from keyhole.oracles.queries import QueryBatch
from prompted_models import TOKENS, WIDTH, LastTokens, Space

NAMES = [f"t{k}" for k in range(TOKENS)]
PROMPTS = QueryBatch.of(np.random.default_rng(5).integers(TOKENS, size=(2, 4, 1)).astype(float), "")
TRUTH = LastTokens(logprobs=True)(PROMPTS.tokens()[:, :, 0].astype(np.int64))
HASTE = keyhole.RetryPolicy(attempts=6, first=0.0, longest=0.0)
FAST = {"vocabulary": TOKENS, "max_length": 64, "patience": HASTE}


@contextmanager
def connected(interface, *habits, **options):
    """A server, and the box that it is opened as."""
    with (
        served(LastTokens(), interface, *habits) as server,
        keyhole.open_language_model(server.url, **FAST, **options) as box,
    ):
        yield server, box


@pytest.mark.parametrize(
    ("interface", "habits", "reading", "error"),
    [
        (Interface(TOKENS, TOKENS), ("ids",), "whole", 1e-12),
        (Interface(TOKENS, TOKENS, "reported"), ("legacy", "strict"), "whole", 1e-12),
        (Interface(TOKENS, 5, "reported", bias_entries=300), ("ids", "words"), "reference", 1e-12),
        (Interface(TOKENS, 20, "reported", bias_entries=5), ("legacy",), "reference", 1e-12),
        (Interface(TOKENS, 5, "sampling"), ("chat", "strict"), "forced", 1e-12),
        (Interface(TOKENS, 0, "sampling"), ("chat",), "race", 1.1e-2),
    ],
)
def test_what_a_server_does_is_found_and_used(interface, habits, reading, error):
    with connected(interface, *habits, names=NAMES) as (server, box):
        assert box.interface.reading == reading
        assert box.opening_queries == server.requests
        assert box.interface.numbers is not bool({"words", "chat"} & {*habits})
        assert box.interface.repeatable
        assert np.abs(box.ask(PROMPTS) - TRUTH).max() < error
    if reading == "reference":
        assert box.interface.bias_entries in (TOKENS - 1, 5)


def test_the_text_of_tokens_is_found_by_asking():
    with connected(Interface(TOKENS, 5, "sampling"), "chat") as (server, box):
        assert np.abs(box.ask(PROMPTS) - TRUTH).max() < 1e-12
        assert box.opening_queries == server.requests - 2 * TOKENS


def test_recover_counts_requests_and_money_and_survives_failures(tmp_path):
    with connected(Interface(TOKENS, 20, "reported"), "ids", "flaky") as (server, box):
        opened = server.requests
        run = keyhole.recover(box, Space(WIDTH + 1), journal=tmp_path / "j")
    ledger = run.ledger
    assert run.outcome is keyhole.Outcome.RECOVERED
    assert ledger.requests == server.requests - opened
    assert ledger.repeated > 0
    assert ledger.paid - ledger.by_purpose["opening"] == ledger.requests - ledger.repeated
    assert ledger.money(2.0) == pytest.approx(2e-6 * (ledger.prompt_tokens + ledger.paid))


def test_a_model_that_changes_on_the_way_is_noticed():
    with connected(Interface(TOKENS, TOKENS), "ids", "changes") as (_, box):
        run = keyhole.recover(box, Space(WIDTH + 1, queries=80), throw=False)
    assert run.outcome is keyhole.Outcome.REJECTED


def test_probabilities_that_do_not_sum_are_refused():
    with (
        connected(Interface(TOKENS, TOKENS), "ids", "unsummed") as (_, box),
        pytest.raises(keyhole.OracleError, match=r"sum to 0\.61"),
    ):
        box.ask(PROMPTS)


def test_an_interface_that_tells_too_little_is_still_described():
    with connected(Interface(TOKENS, 5), "ids") as (_, box):
        assert box.interface.reading == "closed"
        assert box.spec.answers == "top_k"
        with pytest.raises(keyhole.NotIdentifiable, match="takes no bias"):
            keyhole.recover(box, Space(WIDTH + 1))


def test_secrets_and_addresses(monkeypatch):
    with served(LastTokens(), Interface(TOKENS, 5), "ids") as server:
        server.token = "sesame"
        with pytest.raises(keyhole.OracleError, match="401"):
            keyhole.open_language_model(server.url, vocabulary=TOKENS)
        monkeypatch.setenv("KEYHOLE_TOKEN", "sesame")
        keyhole.open_language_model(server.url, vocabulary=TOKENS).close()
        monkeypatch.delenv("KEYHOLE_TOKEN")
        server.token = None
        with pytest.raises(keyhole.InvalidArgument, match="pass vocabulary="):
            keyhole.open_language_model(server.url)
        with pytest.raises(keyhole.OracleError, match="serves neither"):
            keyhole.open_language_model(f"{server.url}/completion", vocabulary=TOKENS)
        with pytest.raises(keyhole.InvalidArgument, match="no option colour"):
            keyhole.open_language_model(server.url, colour=3)
    with pytest.raises(keyhole.OracleError, match="failed"):
        keyhole.open_language_model("http://127.0.0.1:9", **FAST)


class Says(Endpoint):
    """An endpoint that answers everything with the same bytes."""

    def __init__(self, body):
        super().__init__("http://127.0.0.1:9", Access())
        self.said = Answer(json.dumps(body).encode(), {})

    def ask(self, *_, read=None, **__):
        return self.said if read is None else read(self.said)


HUGE = 10**400  # more digits than a number has


@pytest.mark.parametrize("claimed", [10**12, HUGE, 2**22 + 1, 1, 0, -5], ids=lambda n: str(n)[:9])
def test_a_vocabulary_that_no_model_has_is_refused_before_it_costs_memory(claimed):
    endpoint = Says({"data": [{"id": "model", "meta": {"n_vocab": claimed}}]})
    examiner = Examiner(endpoint, None, None, OpeningRecord(None))
    with pytest.raises(keyhole.OracleError, match="vocabulary that no model has"):
        examiner.find_model()
    given = Examiner(endpoint, None, 50, OpeningRecord(None))
    given.find_model()
    assert given.vocabulary == 50


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), HUGE, "much"], ids=["nan", "inf", "huge", "text"]
)
@pytest.mark.parametrize("form", ["older", "newer"])
def test_a_log_probability_that_is_no_number_is_an_error_of_the_endpoint(value, form):
    entry = {"token": "a", "id": 1, "logprob": -1.0}
    newer = {"content": [{**entry, "top_logprobs": [{**entry, "logprob": value}]}]}
    older = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": value}]}
    told = {"choices": [{"text": "a", "logprobs": newer if form == "newer" else older}]}
    question = Question(np.array([1, 2]), {})
    with pytest.raises(keyhole.OracleError, match="form that"):
        put(Says(told), Completions(), question, Request(1))


def test_tokens_that_the_vocabulary_does_not_have_are_no_tokens():
    entry = {"token": "a", "id": HUGE, "logprob": -1.0}
    content = [{**entry, "top_logprobs": [{**entry, "id": -7}, {**entry, "id": 3}]}]
    endpoint = Says({"choices": [{"text": "a", "logprobs": {"content": content}}]})
    interface = Interface(TOKENS, 2)
    box = QuestionEndpoint(endpoint, Completions(), Request(2), interface, None, 64, 0)
    row = box.answer(QueryBatch.of(np.array([[[1.0, 0.0]]]), ""), threading.Event())[0]
    assert row[0] == -1
    assert row[2::2].tolist() == [3, -1]


def test_the_likeliest_tokens_are_not_taken_for_the_vocabulary():
    with (
        served(LastTokens(), Interface(TOKENS, 5), "ids", "clips") as server,
        pytest.raises(keyhole.InvalidArgument, match="--tokens"),
    ):
        keyhole.open_language_model(server.url)


def test_a_server_that_tells_all_tokens_tells_the_vocabulary():
    with (
        served(LastTokens(), Interface(TOKENS, TOKENS), "ids", "clips") as server,
        keyhole.open_language_model(server.url) as box,
    ):
        assert box.interface.vocabulary == TOKENS


def test_single_precision_behind_numbers_of_double_precision():
    def logits(prompts):
        return LastTokens()(prompts).astype(np.float32)

    with (
        served(logits, Interface(TOKENS, TOKENS), "ids") as server,
        keyhole.open_language_model(server.url, vocabulary=TOKENS, max_length=9) as box,
    ):
        assert box.interface.number_format == "float32"
        assert box.spec.precision.format == "float32"
        found = keyhole.recover(box, keyhole.OutputLayerLearner())
        assert found.details["rank"] == WIDTH
        again = keyhole.verify(box, found, seed=7)
        assert again.agrees, again.bound
        assert again.bound.startswith("Only the space of answers was compared")
