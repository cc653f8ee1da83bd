from typing import Any

import numpy as np
import pytest

from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import ArrayBank, QueryBatch, ScaledBank, UnitVectorBank
from keyhole.oracles.wrappers import record
from keyhole.oracles.wrappers.record import AnswerRecord


def box(width: int = 1, **options: Any) -> AnswerRecord:
    return AnswerRecord(
        open_oracle(lambda tokens: tokens[:, 0].sum(axis=1), width=width), **options
    )


def listed(start: float, count: int, purpose: str = "value") -> QueryBatch:
    return QueryBatch.of(start + np.arange(count, dtype=float).reshape(-1, 1, 1), purpose)


def test_queries_and_answers_are_kept_in_order() -> None:
    memory = box()
    for start, count in ((0.0, 2), (5.0, 0), (7.0, 3)):
        memory.ask(listed(start, count))
    assert [list(answers) for _, answers in memory.past] == [[0.0, 1.0], [7.0, 8.0, 9.0]]
    assert [len(queries) for queries, _ in memory.past] == [2, 3]
    assert [kept.numbers.tolist() for kept in memory.kept] == [[0, 1], [2, 3, 4]]
    assert memory.total == 5


def test_a_described_batch_is_kept_as_its_description() -> None:
    memory, count = box(2000), 2000
    bank = ScaledBank(UnitVectorBank(count, 1.0), 2.0)
    memory.ask(QueryBatch(bank, np.arange(count)[:, None], "value"))
    (kept,) = memory.kept
    assert len(kept.queries) == len(kept.answers) == count
    assert kept.queries.bank is bank
    assert kept.queries.index.dtype == np.int32
    np.testing.assert_array_equal(kept.queries.index[:, 0], kept.numbers)


@pytest.mark.parametrize("room", [0, 1000, 2**20])
def test_every_token_is_kept_in_memory_or_in_a_file(room: int) -> None:
    memory = box(in_memory=room)
    for number in range(50):
        memory.ask(listed(100.0 * number, 100))
    assert sum(len(kept.answers) for kept in memory.kept) == memory.total == 5000
    for kept in memory.kept:
        np.testing.assert_array_equal(kept.queries.tokens()[:, 0, 0], kept.numbers)
        np.testing.assert_array_equal(kept.answers, kept.numbers)
    in_memory = sum(not isinstance(k.queries.bank.table, np.memmap) for k in memory.kept)
    assert in_memory == min(room // 800, 50)


def test_what_is_written_to_later_is_kept_as_it_was() -> None:
    memory, tokens = box(), np.ones((2, 1, 1))
    answers = memory.ask(QueryBatch.of(tokens, "value"))
    tokens[:], answers[:] = 5.0, 7.0
    (kept,) = memory.kept
    np.testing.assert_array_equal(kept.queries.tokens(), np.ones((2, 1, 1)))
    np.testing.assert_array_equal(kept.answers, np.ones(2))


def test_a_table_is_copied_once_and_of_a_large_one_only_what_was_asked() -> None:
    memory, table = box(3), np.random.default_rng(0).standard_normal((40, 3))
    inside = ArrayBank(table)
    bank = ScaledBank(inside, 2.0)
    for first in (0, 20):
        index = np.arange(first, first + 40).reshape(20, 2) % 40
        memory.ask(QueryBatch(bank, index, "pairs"))
    memory.ask(QueryBatch(bank, np.array([[7, 9]]), "one pair"))
    first, second, last = (kept.queries for kept in memory.kept)
    assert first.bank is second.bank
    assert first.bank.inner.table is not table
    assert len(last.bank.table) == 2
    np.testing.assert_array_equal(last.tokens()[0], 2.0 * table[[7, 9]])


def test_without_a_disk_later_batches_are_counted_and_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(**_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.tempfile, "TemporaryFile", full)
    memory = box(in_memory=1000)
    for number in range(3):
        memory.ask(listed(0.0, 100, str(number)))
    assert [kept.queries.purpose for kept in memory.kept] == ["0"]
    assert memory.total == 300
