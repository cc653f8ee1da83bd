"""Keeps questions and answers of a run, for the free comparison with the hypothesis."""

import numpy as np

from keyhole.arrays import Array
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.questions import Questions

KEPT = 512  # questions of a batch, spread over it: more than are ever compared


class Memory(Wrapper):
    """Remembers descriptions and answers, not tokens, of all small batches and a sample of large
    ones: little beside what is computed from them."""

    def __init__(self, inner: Oracle) -> None:
        self.inner = inner
        self.past: list[tuple[Questions, Array]] = []
        self.numbers: list[Array] = []  # of the questions kept of each batch, in the whole run
        self.total = 0

    def ask(self, questions: Questions) -> Array:
        answers = self.inner.ask(questions)
        count = len(questions)
        if count:
            kept = np.unique(np.linspace(0, count - 1, min(count, KEPT)).astype(np.int64))
            sample = Questions(questions.bank, questions.index[kept], questions.purpose)
            self.past.append((sample, answers[kept]))
            self.numbers.append(self.total + kept)
            self.total += count
        return answers
