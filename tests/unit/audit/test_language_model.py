"""What interfaces of a language model give away, by attacks that are carried out."""

import json
from dataclasses import replace

import pytest

import keyhole
from completions_server import served
from keyhole.audit.language_model import audit_language_model, list_interfaces, price_levels
from keyhole.audit.language_model_page import render, write_page
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.restricted import read_logprobs
from keyhole.oracles.language_model.simulated import Simulated
from token_models import LanguageModel

TOKENS, WIDTH = 90, 22
MODEL = LanguageModel(3, tokens=TOKENS, width=WIDTH)


@pytest.fixture(scope="module")
def found():
    return audit_language_model(MODEL.box(), logits=MODEL, price=2.0, most=2500)


def test_attacks_find_the_width_where_they_are_affordable(found):
    assert found.width == WIDTH
    whole, rounded, top, forced, labels, closed = found.exposures
    assert [whole.found, rounded.found, top.found] == [WIDTH] * 3
    assert whole.space.error < 1e-10
    assert rounded.space.error < 5e-2
    assert top.space.error < 1e-10
    assert whole.width.questions < top.width.questions < forced.width.questions
    assert [one.outcome for one in (forced, labels)] == ["RECOVERED", "COMPUTED"]
    assert closed.holds
    assert not closed.width.reachable
    assert not any(one.holds for one in found.exposures[:-1])
    assert whole.geometry.measured
    assert whole.geometry.error < 1e-6


def test_the_account_is_json_and_a_page(found, tmp_path):
    told = json.loads(json.dumps(found.to_json()))
    assert told["exposures"][-1]["width"]["questions"] is None
    text = write_page(replace(found, box="<b>mine</b>"), tmp_path / "page.html").read_text()
    assert "&lt;b&gt;mine&lt;/b&gt;" in text
    assert "no number of questions" in text
    assert "rotating sets of tokens" in text
    assert "http://" not in render(found)


def test_questions_are_paid_as_computed(found):
    """Within half of it: verification and growing batches come on top."""
    top = list_interfaces(TOKENS)[2][1]
    computed = price_levels(top, WIDTH, 2.0)[1]
    assert 1.0 <= found.exposures[2].space.questions / computed.questions < 1.5


def test_an_endpoint_is_attacked_as_it_is():
    with (
        served(MODEL, Interface(TOKENS, 20, "reported"), "ids") as server,
        keyhole.open_language_model(server.url, vocabulary=TOKENS, max_length=32) as box,
    ):
        found = audit_language_model(box, price=1.0)
    first, *others = found.exposures
    assert (first.found, first.reading, first.outcome) == (WIDTH, "reference", "RECOVERED")
    assert {one.outcome for one in others} == {"COMPUTED", "HOLDS"}
    assert any("20 likeliest" in sentence for sentence in found.interface)


def test_a_top_above_the_width_is_not_called_safe():
    small = LanguageModel(1, tokens=60, width=12)
    found = audit_language_model(small.box(), logits=small, most=1000)
    assert found.exposures[-1].outcome == "NOT ATTACKED"
    assert any("Tell fewer" in line for line in found.advice)


def test_the_space_behind_top_20_costs_at_most_1_4_times_the_floor():
    tokens, width = 600, 40
    model = LanguageModel(5, tokens=tokens, width=width)
    interface = Interface(tokens, 20, "reported")
    box = read_logprobs(Simulated(model, interface, max_length=32), interface)
    run = keyhole.recover(box, keyhole.OutputLayerLearner(), verify=False)
    assert run.model.width == width
    assert run.ledger.paid <= 1.4 * width * (tokens - width) / 19
