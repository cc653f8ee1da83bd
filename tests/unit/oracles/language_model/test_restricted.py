"""Few log-probabilities, or none, made whole by biases; what is paid is counted question by
question."""

import numpy as np
import pytest

import keyhole
from keyhole.oracles.base import Wrapper
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.questions import UNTOLD, pack, unpack
from keyhole.oracles.language_model.restricted import (
    RaceReader,
    choose_tokens,
    pick_skeleton,
    read_logprobs,
)
from keyhole.oracles.language_model.simulated import Simulated
from keyhole.oracles.queries import QueryBatch
from prompted_models import TOKENS, WIDTH, LastTokens, Space
from token_models import LanguageModel

PROMPTS = QueryBatch.of(np.random.default_rng(5).integers(TOKENS, size=(3, 4, 1)).astype(float), "")
TOP = Interface(TOKENS, 5, "reported")
FORCED = Interface(TOKENS, 5, "sampling", sampled=True)
LABELS = Interface(TOKENS, 0, "sampling", bias_entries=16)
WHOLE = Interface(TOKENS, TOKENS)


class Watched(Wrapper):
    def __init__(self, inner):
        self.inner, self.seen = inner, 0

    def ask(self, queries):
        self.spec.domain.check(queries.tokens())
        self.seen += len(queries)
        return self.inner.ask(queries)


def simulated(interface, **options):
    return Watched(Simulated(LastTokens(), interface, **options))


def logprobs(queries):
    return LastTokens(logprobs=True)(queries.tokens()[:, :, 0].astype(np.int64))


@pytest.mark.parametrize(
    ("interface", "questions", "error"),
    [(TOP, 3 * 10, 1e-12), (FORCED, 3 * TOKENS, 1e-12), (WHOLE, 3, 1e-12)],
)
def test_log_probabilities_are_exact_at_the_price_that_is_told(interface, questions, error):
    box = simulated(interface)
    reader = read_logprobs(box, interface)
    assert np.abs(reader.ask(PROMPTS) - logprobs(PROMPTS)).max() < error
    assert box.seen == questions == 3 * reader.price
    assert reader.spec.outputs == TOKENS


class Silent(Wrapper):
    """Tells nothing where every third token is sampled, as llama.cpp does for half characters."""

    def __init__(self, inner):
        self.inner, self.seen = inner, 0

    def ask(self, queries):
        self.seen += len(queries)
        rows = self.inner.ask(queries)
        silent = rows[:, 0] % 3 == 0
        rows[silent, 2::2], rows[silent, 3::2] = -1.0, UNTOLD
        return rows


def test_what_is_not_told_is_asked_for_beside_other_tokens():
    for interface in (TOP, Interface(TOKENS, TOKENS, "sampling")):
        box = Silent(Simulated(LastTokens(), interface))
        found = read_logprobs(box, interface).ask(PROMPTS)
        assert np.abs(found - logprobs(PROMPTS)).max() < 1e-12
        assert box.seen < 2.5 * 3 * read_logprobs(box, interface).price


def test_labels_race_to_within_epsilon():
    for epsilon, most in ((1e-2, 4.5), (1e-4, 6.5)):  # of few tokens each costs more
        box = simulated(LABELS)
        found = RaceReader(box, LABELS, epsilon=epsilon).ask(PROMPTS)
        truth = logprobs(PROMPTS)
        ranks = [z - z.max(axis=1, keepdims=True) for z in (found, truth)]
        assert np.abs(ranks[0] - ranks[1]).max() <= epsilon
        assert box.seen < most * 3 * TOKENS


def test_labels_of_300_tokens_cost_at_most_2_3_questions_a_logit():
    count, rng = 301, np.random.default_rng(8)
    logits = rng.uniform(-20.0, 0.0, size=(1, count))
    interface = Interface(count, 0, "sampling", bias_entries=300)
    box = Watched(Simulated(lambda prompts: logits[np.zeros(len(prompts), int)], interface))
    found = read_logprobs(box, interface).ask(QueryBatch.of(np.zeros((1, 1, 1)), ""))
    assert np.abs((found - found.max()) - (logits - logits.max())).max() <= 1e-2
    assert box.seen <= 2.3 * (count - 1)


def test_logits_far_below_the_likeliest_are_found():
    logits = np.array([[0.0, -3.0, -35.0, -70.0]])
    interface = Interface(4, 0, "sampling")
    box = Simulated(lambda prompts: logits[np.zeros(len(prompts), int)], interface)
    found = read_logprobs(box, interface).ask(QueryBatch.of(np.zeros((1, 1, 1)), ""))
    assert np.abs((found - found.max()) - logits).max() <= 1e-2


def test_chosen_tokens_cost_less():
    chosen = [7, 3, 30, 31, 32]
    box = simulated(TOP)
    found = choose_tokens(read_logprobs(box, TOP), chosen).ask(PROMPTS)
    truth = logprobs(PROMPTS)[:, chosen]
    assert np.abs(found - (truth - truth[:, :1])).max() < 1e-12
    assert box.seen == 3
    whole = keyhole.open_language_model(LastTokens(logprobs=True))
    assert np.allclose(choose_tokens(whole, chosen).ask(PROMPTS), truth)


def test_a_skeleton_carries_few_logits_to_all():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((50, 6)))[0]
    chosen, carry = pick_skeleton(basis)
    assert len(chosen) == 10
    answers = rng.standard_normal((4, 6)) @ basis.T
    told = answers[:, chosen] - answers[:, chosen].mean(axis=1, keepdims=True)
    assert np.abs(told @ carry - answers).max() < 1e-12


def test_the_geometry_behind_top_20_is_read_through_a_skeleton():
    tokens, width = 200, 10
    model = LanguageModel(5, tokens=tokens, width=width)
    interface = Interface(tokens, 11, "reported")
    box = Watched(Simulated(model, interface, max_length=32))
    learner = keyhole.OutputLayerLearner(level="gram")
    run = keyhole.recover(read_logprobs(box, interface), learner)
    assert run.outcome is keyhole.Outcome.RECOVERED
    found, truth = (m - m.mean(axis=0) for m in (run.model.matrix, model.truth.matrix))
    assert np.allclose(found @ found.T, truth @ truth.T, atol=1e-8)
    # two questions a prompt, not twenty
    assert run.ledger.by_purpose["output geometry"] == 2 * 72


@pytest.mark.parametrize("interface", [TOP, FORCED, WHOLE])
def test_recover_counts_questions_and_prompt_tokens(interface, tmp_path):
    box = simulated(interface)
    journal = tmp_path / "run.journal"
    recovery = keyhole.recover(read_logprobs(box, interface), Space(WIDTH + 1), journal=journal)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.paid == box.seen
    assert recovery.ledger.prompt_tokens > 3 * box.seen - 10
    again = simulated(interface)
    same = keyhole.recover(read_logprobs(again, interface), Space(WIDTH + 1), journal=journal)
    assert again.seen <= 3
    assert np.array_equal(same.model.basis, recovery.model.basis)


def test_a_budget_limits_questions():
    box = simulated(TOP)
    recovery = keyhole.recover(read_logprobs(box, TOP), Space(WIDTH + 1), budget=50, throw=False)
    assert recovery.outcome is keyhole.Outcome.BUDGET_EXHAUSTED
    assert box.seen <= 50


def test_without_bias_nothing_determines_the_rest():
    with pytest.raises(keyhole.NotIdentifiable, match="takes no bias"):
        read_logprobs(simulated(Interface(TOKENS, 5)), Interface(TOKENS, 5))


def test_interfaces_that_do_not_do_what_they_said():
    with pytest.raises(keyhole.OracleError, match="does not act on what it tells"):
        read_logprobs(simulated(Interface(TOKENS, 5, "sampling")), TOP).ask(PROMPTS)
    with pytest.raises(keyhole.OracleError, match="does not sample token"):
        read_logprobs(simulated(Interface(TOKENS, 5, sampled=True)), FORCED).ask(PROMPTS)
    with pytest.raises(keyhole.OracleError, match=r"contradicts itself|neither was biased"):
        read_logprobs(simulated(LABELS, noise=1.0), LABELS).ask(PROMPTS)
    short = Interface(TOKENS - 1, TOKENS - 1)
    with pytest.raises(keyhole.OracleError, match="leaves out 1 of 40"):
        read_logprobs(Simulated(lambda p: LastTokens()(p)[:, 1:], short), WHOLE).ask(PROMPTS)


def test_questions_survive_the_way_into_queries():
    prompts = np.array([[1, 2], [3, 4]])
    bias = np.array([[5.0, -2.5], [7.0, 0.0]])
    first, second = unpack(pack(prompts, np.array([[8, 9], [8, 9]]), bias, "x"))
    assert first.prompt.tolist() == [1, 2]
    assert first.bias == {8: 5.0, 9: -2.5}
    assert second.bias == {8: 7.0}


def test_interfaces_are_told_in_words_and_checked():
    assert [i.reading for i in (TOP, FORCED, LABELS, WHOLE)] == [
        "reference",
        "forced",
        "race",
        "whole",
    ]
    assert [i.answers for i in (TOP, LABELS, WHOLE)] == ["top_k", "labels", "logprobs"]
    assert any("5 likeliest" in text for text in TOP.sentences())
    with pytest.raises(keyhole.InvalidArgument, match="bias must be one of"):
        Interface(5, 2, "strange")
