"""Callables on token numbers: what they answer with is found by asking, everything else is the
stack of any oracle."""

import numpy as np
import pytest

import keyhole
from prompted_models import TOKENS, WIDTH, LastTokens, Space


def test_the_vocabulary_and_the_kind_of_answers_are_found_by_asking():
    for logprobs, kind in ((False, "logits"), (True, "logprobs")):
        box = keyhole.open_language_model(LastTokens(logprobs))
        assert box.spec.width == 1
        assert box.spec.domain.tokens == box.spec.outputs == TOKENS
        assert box.spec.answers == kind
        assert box.opening_queries == 1


def test_nothing_is_asked_where_everything_is_told():
    function = LastTokens()
    box = keyhole.open_language_model(function, vocabulary=TOKENS, answers="logits")
    assert function.seen == box.opening_queries == 0


def test_the_ledger_counts_what_the_box_saw_and_verification_asks_fresh_prompts():
    function = LastTokens()
    recovery = keyhole.recover(keyhole.open_language_model(function), Space())
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.paid == function.seen
    assert recovery.ledger.by_purpose["opening"] == 1
    assert recovery.ledger.by_purpose["verification"] >= 6


def test_an_answer_outside_the_space_rejects():
    recovery = keyhole.recover(
        keyhole.open_language_model(LastTokens()), Space(WIDTH - 1), throw=False
    )
    assert recovery.outcome is keyhole.Outcome.REJECTED


def test_a_journal_resumes_without_asking_again(tmp_path):
    first = LastTokens()
    path = tmp_path / "run.journal"
    before = keyhole.recover(keyhole.open_language_model(first), Space(), journal=path)
    again = LastTokens()
    after = keyhole.recover(keyhole.open_language_model(again), Space(), journal=path)
    assert after.ledger.paid == before.ledger.paid + 1  # asked the box whether it is the same
    assert again.seen == 2  # this, and the opening
    assert np.array_equal(after.model.basis, before.model.basis)


def test_numbers_outside_the_vocabulary_never_leave():
    box = keyhole.open_language_model(LastTokens())
    for number in (-1.0, 40.0, 1.5):
        with pytest.raises(keyhole.DomainError, match=r"whole numbers 0 … 39"):
            box.spec.domain.check(np.full((1, 2, 1), number))
    box.spec.domain.check(np.full((1, 2, 1), 39.0))


def test_budget_and_length_hold():
    function = LastTokens()
    box = keyhole.open_language_model(function, max_length=4)
    recovery = keyhole.recover(box, Space(), budget=12, throw=False)
    assert recovery.outcome is keyhole.Outcome.BUDGET_EXHAUSTED
    assert function.seen <= 12
    assert box.spec.domain.max_length == 4


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda prompts: np.full((len(prompts), 4), 0.25), "probabilities"),
        (lambda prompts: np.zeros((len(prompts), 3, 4)), "last position alone"),
        (lambda prompts: np.zeros(len(prompts)), "pass vocabulary="),
        (lambda prompts: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_said(answer, message):
    with pytest.raises(keyhole.KeyholeError, match=message):
        keyhole.open_language_model(answer)


def test_arguments_are_checked():
    with pytest.raises(keyhole.InvalidArgument, match="one of logits"):
        keyhole.open_language_model(LastTokens(), answers="words")
    with pytest.raises(keyhole.InvalidArgument, match="cannot open 3"):
        keyhole.open_language_model(3)
    with pytest.raises(keyhole.OracleError, match="answers with 40 numbers"):
        keyhole.open_language_model(LastTokens(), vocabulary=50)
    with pytest.raises(keyhole.InvalidArgument, match="leave out"):
        keyhole.Domain(tokens=5, max_norm=1.0)
    with pytest.raises(keyhole.InvalidArgument, match="numbers of tokens"):
        keyhole.recover(keyhole.open_language_model(LastTokens()))
