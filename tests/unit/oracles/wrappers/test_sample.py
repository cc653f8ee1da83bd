import numpy as np

from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch, ScaledBank, UnitVectorBank
from keyhole.oracles.wrappers.sample import DESCRIBED, LISTED, AnswerSample


def box(width: int = 1) -> AnswerSample:
    return AnswerSample(open_oracle(lambda tokens: tokens[:, 0].sum(axis=1), width=width))


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


def test_of_a_large_described_batch_a_part_is_kept_from_end_to_end() -> None:
    memory, count = box(5 * DESCRIBED), 5 * DESCRIBED
    bank = ScaledBank(UnitVectorBank(count, 1.0), 2.0)
    answers = memory.ask(QueryBatch(bank, np.arange(count)[:, None], "value"))
    (kept,) = memory.kept
    assert len(answers) == memory.total == count
    assert len(kept.queries) == len(kept.answers) == DESCRIBED
    assert kept.queries.bank is bank
    assert (kept.numbers[0], kept.numbers[-1]) == (0, count - 1)
    np.testing.assert_array_equal(kept.queries.index[:, 0], kept.numbers)


def test_tokens_are_kept_of_a_bounded_number_of_queries_from_all_over_the_run() -> None:
    memory = box()
    for number in range(50):
        memory.ask(listed(100.0 * number, 100, f"purpose {number}" if number < 3 else "many"))
    numbers = np.concatenate([kept.numbers for kept in memory.kept])
    assert len(numbers) <= LISTED
    assert np.diff(numbers).max() <= 2 * 5000 / LISTED * 2
    assert {0, 100, 200, 300} <= set(numbers.tolist())  # the first for every purpose
    for kept in memory.kept:
        np.testing.assert_array_equal(kept.queries.tokens()[:, 0, 0], kept.numbers)
        np.testing.assert_array_equal(kept.answers, kept.numbers)
    held = sum(kept.queries.bank.rows(kept.queries.index.ravel()).size for kept in memory.kept)
    assert held == len(numbers)  # no batch is held as a whole
