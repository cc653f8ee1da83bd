import numpy as np

from keyhole.oracles.open import open_oracle
from keyhole.oracles.questions import Questions
from keyhole.oracles.wrappers.memory import Memory


def test_questions_and_answers_are_kept_in_order() -> None:
    memory = Memory(open_oracle(lambda tokens: tokens[:, 0, 0], width=1))
    for start, count in ((0.0, 2), (5.0, 0), (7.0, 3)):
        memory.ask(Questions.of(start + np.arange(count).reshape(-1, 1, 1), "value"))
    assert [list(answers) for _, answers in memory.past] == [[0.0, 1.0], [7.0, 8.0, 9.0]]
    assert [len(questions) for questions, _ in memory.past] == [2, 3]
