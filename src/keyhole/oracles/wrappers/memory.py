"""Keeps every question and answer of a run, for the free comparison with the hypothesis."""

from keyhole.arrays import Array
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.questions import Questions


class Memory(Wrapper):
    """Remembers descriptions and answers, not tokens: small beside what was computed."""

    def __init__(self, inner: Oracle) -> None:
        self.inner = inner
        self.past: list[tuple[Questions, Array]] = []

    def ask(self, questions: Questions) -> Array:
        answers = self.inner.ask(questions)
        if len(questions):
            self.past.append((questions, answers))
        return answers
