"""Is it still the same box? A few old questions, asked again as the run goes on.

Sits above the counter: a question asked again is paid for and stands in the ledger as "recall".
"""

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import Counterexample, Inconsistent, InvalidArgument
from keyhole.oracles.base import Oracle, Precision, Wrapper
from keyhole.oracles.questions import Questions

PURPOSE = "recall"
RECALLED = 3  # old questions asked again at a time
UNSTATED = 1e-4  # relative change that is not noise, where the box does not state its precision
DEVIATIONS = 8.0  # standard deviations of stated noise that two answers may be apart
ROUNDINGS = 64.0  # stated roundoffs that two answers in different batches may be apart


class DriftWatch(Wrapper):
    """Asks `RECALLED` old questions again after every `every` new ones."""

    def __init__(self, inner: Oracle, every: int) -> None:
        if every < 1:
            raise InvalidArgument(f"every must be at least 1, got {every}")
        self.inner, self.every = inner, every
        self._since = 0
        self._kept: list[tuple[Questions, Array]] = []

    def ask(self, questions: Questions) -> Array:
        answers = self.inner.ask(questions)
        if len(questions) and len(self._kept) < 2 * RECALLED:
            first = Questions(questions.bank, questions.index[:1], PURPOSE)
            self._kept.append((first, np.asarray(answers[0])))
        self._since += len(questions)
        if self._since >= self.every:
            self._since = 0
            self._look()
        return answers

    def _look(self) -> None:
        """The longest sequences say most about a model; among equals, the oldest."""
        order = sorted(range(len(self._kept)), key=lambda k: -self._kept[k][0].length)
        for k in order[:RECALLED]:
            question, before = self._kept[k]
            now = np.asarray(self.inner.ask(question)[0])
            if differ(before, now, self.spec.precision):
                raise Inconsistent(
                    "the box changed while it was asked: it answers a question differently than "
                    "before (new weights, or another replica?). What was learned mixes two "
                    "models; start again with another journal",
                    Counterexample(question.tokens()[0], now, before, "asked twice"),
                )


def differ(before: Array, now: Array, precision: Precision | None) -> bool:
    """Whether two answers to one question cannot come from one box."""
    scale = float(np.max(np.abs(before), initial=0.0))
    if precision is None:
        allowed = UNSTATED * scale
    else:
        allowed = ROUNDINGS * precision.relative * scale
        allowed += DEVIATIONS * precision.additive + precision.step
    return float(np.max(np.abs(now - before), initial=0.0)) > max(allowed, np.finfo(float).tiny)
