import numpy as np

from keyhole.oracles.open import open_oracle
from keyhole.oracles.questions import Questions
from keyhole.oracles.wrappers.memory import KEPT, Memory


def test_questions_and_answers_are_kept_in_order() -> None:
    memory = Memory(open_oracle(lambda tokens: tokens[:, 0, 0], width=1))
    for start, count in ((0.0, 2), (5.0, 0), (7.0, 3)):
        memory.ask(Questions.of(start + np.arange(count).reshape(-1, 1, 1), "value"))
    assert [list(answers) for _, answers in memory.past] == [[0.0, 1.0], [7.0, 8.0, 9.0]]
    assert [len(questions) for questions, _ in memory.past] == [2, 3]
    assert (np.concatenate(memory.numbers).tolist(), memory.total) == ([0, 1, 2, 3, 4], 5)


def test_a_large_batch_is_kept_in_part_from_end_to_end() -> None:
    memory, count = Memory(open_oracle(lambda tokens: tokens[:, 0, 0], width=1)), 5 * KEPT
    answers = memory.ask(Questions.of(np.arange(count, dtype=float).reshape(-1, 1, 1), "value"))
    (questions, kept), (numbers,) = memory.past[0], memory.numbers
    assert len(answers) == memory.total == count
    assert len(questions) == len(kept) == KEPT
    assert (numbers[0], numbers[-1]) == (0, count - 1)
    np.testing.assert_array_equal(kept, numbers)
    np.testing.assert_array_equal(questions.tokens()[:, 0, 0], numbers)
