"""Suspects: callables, modules, endpoints of numbers and of texts; answers are checked."""

import numpy as np
import pytest

import embedding_server
import keyhole
from keyhole.diagnosis.reference import open_reference
from keyhole.diagnosis.suspects import Counted, TokenFunction, find_words, open_suspect
from keyhole.errors import BudgetExhausted, InvalidArgument, OracleError
from keyhole.oracles.token_models import load_tokenizer
from sentence_folders import write_sentence
from suspects import serve_bert, small_bert

ROWS = [np.array([5, 9, 7]), np.array([11, 4, 8, 30, 17])]


def test_rows_are_padded_at_the_end() -> None:
    seen = []

    def function(tokens, attention_mask=None):
        seen.append((tokens.tolist(), attention_mask.tolist()))
        return np.ones((2, 3))

    TokenFunction(function, 0).ask(ROWS)
    assert seen == [([[5, 9, 7, 0, 0], [11, 4, 8, 30, 17]], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])]


@pytest.mark.parametrize(
    "answer", [np.ones(2), np.ones((3, 2)), np.array([["a"], ["b"]]), np.full((2, 2), np.nan)]
)
def test_strange_answers_are_refused(answer) -> None:
    with pytest.raises(OracleError):
        Counted(TokenFunction(lambda *_, **__: answer, 0), 10).ask(ROWS)


def test_the_budget_is_asked_first() -> None:
    counted = Counted(TokenFunction(lambda *_, **__: np.ones((2, 2)), 0), 3)
    counted.ask(ROWS)
    with pytest.raises(BudgetExhausted):
        counted.ask(ROWS)
    assert counted.asked == 2


def test_a_module_is_read_as_the_reference_is() -> None:
    model = small_bert()
    reference = open_reference(model, "mean", True)
    answers = open_suspect(model, reference).ask(ROWS)
    expected = TokenFunction(serve_bert(model), 0).ask(ROWS)
    assert np.allclose(answers, expected, atol=1e-6)


def test_what_cannot_be_asked_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="callable"):
        open_suspect(3, open_reference(small_bert(), "mean", True))


@pytest.mark.parametrize("takes", [("numbers",), ("text",)])
def test_endpoints_of_numbers_and_of_texts(tmp_path, takes) -> None:
    folder = write_sentence(tmp_path / "m")
    reference = open_reference(f"hf:{folder}")
    served = serve_bert(reference.model, causal=True)
    encode = lambda text: reference.tokenizer(text)["input_ids"]  # noqa: E731
    with embedding_server.served(served, encode=encode, takes=takes) as server:
        diagnosis = keyhole.doctor(f"hf:{folder}", server.url)
        asked = sum(map(len, server.requests))
    assert [cause.name for cause in diagnosis.causes] == ["attention is causal"]
    assert asked <= diagnosis.queries  # refused rows count as asked


def test_words_stand_for_one_token_each(tmp_path) -> None:
    tokenizer = load_tokenizer(write_sentence(tmp_path / "m"))
    words, joint = find_words(tokenizer)
    assert len(words) >= 20
    text = joint.join(list(words.values())[:5])
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == list(words)[:5]
