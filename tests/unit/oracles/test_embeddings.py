"""Embedding endpoints in the dialects in use: one request for rows that are asked together."""

import numpy as np
import pytest

from embedding_server import served
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.embeddings import (
    by_label,
    find_dialects,
    in_order,
    open_embedding_endpoint,
    own_dialect,
)
from keyhole.oracles.http.retry import RetryPolicy

TABLE = np.random.default_rng(0).standard_normal((30, 4))
HASTY = RetryPolicy(attempts=2, first=0.01)


def embed(tokens, attention_mask):
    """The mean of the vectors of the tokens of each row."""
    weights = attention_mask / attention_mask.sum(axis=1, keepdims=True)
    return np.einsum("nl,nld->nd", weights, TABLE[tokens])


def encode(text):
    return [len(word) for word in text.split()]


ROWS = [np.array([3, 1, 2]), np.array([5]), np.array([7, 7])]
MEANS = np.stack([TABLE[row].mean(axis=0) for row in ROWS])


@pytest.mark.parametrize("dialect", ["openai", "tei"])
def test_rows_asked_together_travel_in_one_request(dialect):
    with served(embed, dialects=(dialect,)) as server, open_embedding_endpoint(server.url) as box:
        assert box.dialect.name == dialect
        assert box.spec.takes == ("numbers",)
        before = len(server.requests)
        np.testing.assert_allclose(box.ask(ROWS), MEANS, rtol=1e-15)
        assert len(server.requests) == before + 1
        assert [len(row) for row in server.requests[-1]] == [3, 1, 2]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embed", "/v1", ""])
def test_an_address_may_name_the_endpoint(path):
    dialects = ("tei",) if path == "/embed" else ("openai",)
    with (
        served(embed, dialects=dialects) as server,
        open_embedding_endpoint(server.url + path) as box,
    ):
        np.testing.assert_allclose(box.ask(ROWS[:1]), MEANS[:1])


def test_answers_are_put_into_the_order_of_their_index():
    with served(embed, "shuffled") as server, open_embedding_endpoint(server.url) as box:
        np.testing.assert_allclose(box.ask(ROWS), MEANS)
    with pytest.raises(ValueError, match="indices"):
        in_order([{"index": 0}, {"index": 0}])


def test_the_model_is_named_where_the_server_lists_one():
    with served(embed, "named") as server, open_embedding_endpoint(server.url) as box:
        assert box.model == "small"
        assert box.ask(ROWS).shape == (3, 4)


def test_texts_go_to_servers_that_take_nothing_else():
    with (
        served(embed, encode=encode, takes=("text",)) as server,
        open_embedding_endpoint(server.url) as box,
    ):
        assert box.spec.takes == ("text",)
        expected = TABLE[[1, 3]].mean(axis=0)
        np.testing.assert_allclose(box.ask(["a bcd"])[0], expected)
        with pytest.raises(InvalidArgument, match="takes text, and was given numbers"):
            box.ask(ROWS)


def test_scores_of_a_classifier_come_in_the_order_of_its_labels():
    options = {"encode": encode, "takes": ("text",), "dialects": ("predict",)}
    with served(embed, **options) as server, open_embedding_endpoint(server.url) as box:
        assert box.dialect.name == "predict"
        np.testing.assert_allclose(box.ask(["a bcd", "ab"]), [TABLE[[1, 3]].mean(axis=0), TABLE[2]])
    scores = [{"label": "yes", "score": 2.0}, {"label": "no", "score": 1.0}]
    assert by_label(scores, ("no", "yes")) == [1.0, 2.0]
    assert by_label(scores, ("yes", "no")) == [2.0, 1.0]


def test_a_json_of_its_own():
    with served(embed, dialects=("own",)) as server:
        options = {"request": {"ask": {"these": "$tokens"}}, "answer": "result.vectors"}
        with open_embedding_endpoint(f"{server.url}/own", **options) as box:
            np.testing.assert_allclose(box.ask(ROWS), MEANS)
            assert len(server.requests) == 1
    with pytest.raises(InvalidArgument, match="once"):
        own_dialect({"a": "$tokens", "b": "$texts"}, "")
    assert own_dialect({"a": "$text"}, "").single


def test_a_server_of_something_else_is_said_so():
    with (
        served(embed, dialects=()) as server,
        pytest.raises(OracleError, match="serves no embeddings"),
    ):
        open_embedding_endpoint(server.url)


def test_missing_answers_are_an_error_and_not_shifted():
    with served(embed) as server, open_embedding_endpoint(server.url, patience=HASTY) as box:
        server.habits.add("few")
        with pytest.raises(OracleError, match="2 answers to 3 rows"):
            box.ask(ROWS)


def test_what_makes_no_sense_is_said():
    with pytest.raises(InvalidArgument, match="dialect must be one of"):
        find_dialects("http://host", "grpc")
    with pytest.raises(InvalidArgument, match="no option retries"):
        open_embedding_endpoint("http://127.0.0.1:1", retries=3)
