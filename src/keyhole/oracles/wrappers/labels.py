"""Answers reduced to labels: the side of a threshold, or the position of the largest number."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.questions import Questions


@dataclass(frozen=True, eq=False)
class Labels(Wrapper):
    """0 or 1 for a scalar box (is the answer above the threshold?), the class for a vector box."""

    inner: Oracle
    threshold: float = 0.0

    def ask(self, questions: Questions) -> Array:
        answers = self.inner.ask(questions)
        if answers.ndim == 2:
            return np.argmax(answers, axis=1).astype(np.float64)
        return np.asarray(answers > self.threshold, dtype=np.float64)
