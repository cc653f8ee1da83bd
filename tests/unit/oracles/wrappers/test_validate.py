from typing import Any

import numpy as np
import pytest

from keyhole.errors import DomainError, InvalidArgument, OracleError
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.validate import Validator

TOKENS = np.ones((3, 2, 2))


def asked(answer: Any, **spec: Any) -> np.ndarray:
    return Validator(FunctionOracle(lambda tokens: answer, Spec(2, **spec))).ask(
        QueryBatch.of(TOKENS, "")
    )


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (1.0, r"shape \(\)"),
        (None, "answered None: it must return its answers"),
        (np.zeros((3, 2, 2)), r"shape \(3, 2, 2\); expected \(3,\) or \(3, outputs\). If it"),
        (np.zeros(2), "2 answers to 3 queries"),
        (np.zeros((2, 3)), "2 answers to 3 queries"),
        (np.zeros(0), "0 answers"),
        (np.zeros((3, 0)), "no number in an answer"),
        (np.array([1.0, np.nan, 0.0]), r"nan \(not finite\) to query 1 of 3"),
        (np.array([[1.0, 2.0], [0.0, 1.0], [np.inf, 0.0]]), "query 2 of 3"),
        (np.zeros(3, dtype=complex), "complex128"),
        (["a", "b", "c"], "dtype"),
        (np.array([None, 1, 2]), "object"),
        ([[1.0], [1.0, 2.0], [3.0]], "ValueError"),
    ],
)
def test_malformed_answers_do_not_come_in(answer: Any, words: str) -> None:
    with pytest.raises(OracleError, match=words):
        asked(answer)


def test_answers_keep_their_float_type_and_others_become_float64() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        assert asked(np.zeros(3, dtype)).dtype == dtype
    for dtype in (np.int8, np.uint64, np.bool_):
        assert asked(np.zeros(3, dtype)).dtype == np.float64


def test_the_spec_must_be_true() -> None:
    assert asked(np.zeros((3, 4)), outputs=4).shape == (3, 4)
    with pytest.raises(OracleError, match="4 outputs, its spec says 5"):
        asked(np.zeros((3, 4)), outputs=5)
    with pytest.raises(OracleError, match="None outputs"):
        asked(np.zeros(3), outputs=1)


def test_no_query_leaves_the_domain_and_the_box_does_not_see_it() -> None:
    seen = []
    box = FunctionOracle(seen.append, Spec(2, domain=Domain(max_norm=1.0)))
    with pytest.raises(DomainError):
        Validator(box).ask(QueryBatch.of(TOKENS, ""))
    with pytest.raises(InvalidArgument, match="queries of width 3, box of 2"):
        Validator(box).ask(QueryBatch.of(np.zeros((1, 1, 3)), ""))
    assert seen == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "limits", [{"max_length": 5}, {"max_norm": 5.0}, {"low": -5.0, "high": 5.0}]
)
def test_tokens_that_are_no_numbers_stay_inside(limits: Any, bad: float) -> None:
    tokens, seen = TOKENS.copy(), []
    tokens[1, 0, 1] = bad
    box = FunctionOracle(seen.append, Spec(2, domain=Domain(**limits)))
    with pytest.raises(DomainError):
        Validator(box).ask(QueryBatch.of(tokens, ""))
    assert seen == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda tokens: tokens[:, :, 0], "length 1 with 1 numbers and of length 2 with 2 numbers"),
        (lambda tokens: tokens.squeeze(1)[:, 0] if tokens.shape[1] == 1 else tokens[:, 0], "one"),
    ],
)
def test_answers_at_every_position_are_told_from_outputs(answer: Any, words: str) -> None:
    box = Validator(FunctionOracle(answer, Spec(2)))
    box.ask(QueryBatch.of(TOKENS[:, :1], ""))
    with pytest.raises(OracleError, match=words) as raised:
        box.ask(QueryBatch.of(TOKENS, ""))
    assert "[:, -1]" in str(raised.value)
