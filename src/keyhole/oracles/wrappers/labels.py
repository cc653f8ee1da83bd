"""Answers reduced to labels: the sign of a number, the position of a vector's largest."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array
from keyhole.models.sign_attention import Coding
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch

SIGNS = Coding(-1.0, 0.0, 1.0)
BITS = Coding(0.0, 0.0, 1.0)  # the label of `f > 0`


@dataclass(frozen=True, eq=False)
class Labels(Wrapper):
    """Tells only the sign of the inner box's answer: -1, 0, 1, or 0 and 1 with `BITS`; of a vector
    the position of its largest number."""

    inner: Oracle
    coding: Coding = field(default=SIGNS)

    def ask(self, queries: QueryBatch) -> Array:
        answers = np.asarray(self.inner.ask(queries))
        if answers.ndim == 2:
            return np.argmax(answers, axis=1).astype(np.float64)
        return self.coding.encode(answers.astype(np.float64))
