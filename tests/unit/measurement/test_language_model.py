"""`keyhole check` for language models: what it does, and what is odd about it."""

import numpy as np
import pytest

import keyhole
from completions_server import served
from keyhole.measurement.language_model import examine_language_model
from keyhole.oracles.language_model.interface import Interface
from prompted_models import TOKENS, LastTokens


def test_a_callable():
    found = examine_language_model(keyhole.open_language_model(LastTokens(logprobs=True)))
    assert found["answers"] == "logprobs"
    assert found["sum_of_probabilities"] == pytest.approx(1.0)
    assert found["questions_asked"] == 13
    assert found["warnings"] == []


def test_a_box_that_drops_tokens_or_is_noisy_is_warned_of():
    model, rng = LastTokens(), np.random.default_rng(0)
    dropping = keyhole.open_language_model(lambda prompts: model(prompts[:, -1:]))
    assert "drops tokens" in examine_language_model(dropping)["warnings"][0]
    cached = keyhole.open_language_model(lambda prompts: model(prompts[:, :1]))
    assert "cache" in examine_language_model(cached)["warnings"][0]
    noisy = keyhole.open_language_model(lambda prompts: model(prompts) + rng.random((1, TOKENS)))
    assert "differently" in examine_language_model(noisy)["warnings"][0]


def test_an_endpoint():
    with (
        served(LastTokens(), Interface(TOKENS, 5, "sampling", True), "ids") as server,
        keyhole.open_language_model(server.url, vocabulary=TOKENS) as box,
    ):
        found = examine_language_model(box)
        assert found["questions_asked"] == server.requests
    assert (found["top"], found["bias"], found["reading"]) == (5, "sampling", "forced")
    assert found["questions_for_one_answer"] == TOKENS
