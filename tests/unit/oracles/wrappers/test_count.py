import numpy as np
import pytest

from boxes import CountingBox
from keyhole.errors import BudgetExhausted, DomainError, InvalidArgument, OracleError
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.count import QueryCounter
from keyhole.oracles.wrappers.validate import Validator


def queries(count: int, purpose: str) -> QueryBatch:
    return QueryBatch.of(np.zeros((count, 1, 2)), purpose)


def test_counts_by_purpose_and_tells_the_listener() -> None:
    heard: list[tuple[str, int]] = []
    counting = QueryCounter(
        open_oracle(lambda t: np.zeros(len(t)), width=2),
        listener=lambda purpose, paid: heard.append((purpose, paid)),
    )
    for count, purpose in ((3, "value"), (4, "score"), (2, "value")):
        counting.ask(queries(count, purpose))
    assert counting.by_purpose == {"value": 5, "score": 4}
    assert counting.paid == 9
    assert heard == [("value", 3), ("score", 7), ("value", 9)]


def test_the_budget_is_hard_and_nothing_beyond_it_is_asked() -> None:
    box = CountingBox(lambda t: np.zeros(len(t)), 2)
    counting = QueryCounter(open_oracle(box), budget=5)
    counting.ask(queries(5, "value"))
    with pytest.raises(BudgetExhausted, match=r"next 1 queries \(score\).*budget of 5; 5 were"):
        counting.ask(queries(1, "score"))
    assert counting.paid == box.seen == 5


def test_a_query_the_box_failed_on_was_asked() -> None:
    def broken(tokens: np.ndarray) -> np.ndarray:
        raise RuntimeError

    counting = QueryCounter(open_oracle(broken, width=2))
    with pytest.raises(OracleError):
        counting.ask(queries(3, "value"))
    assert counting.paid == 3


def test_what_the_border_refuses_was_not_asked() -> None:
    box = CountingBox(lambda t: np.zeros(len(t)), 2)
    counting = QueryCounter(Validator(open_oracle(box, max_length=2)), budget=4)
    counting.ask(queries(3, "value"))
    with pytest.raises(DomainError):
        counting.ask(QueryBatch.of(np.zeros((1, 3, 2)), "score"))
    with pytest.raises(InvalidArgument):
        counting.ask(QueryBatch.of(np.zeros((1, 1, 3)), "value"))
    assert counting.by_purpose == {"value": 3}
    assert box.seen == 3
    assert counting.remaining == 1
