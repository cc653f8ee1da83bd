"""Answers reduced to their sign: what a classifier's label tells."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import OracleError
from keyhole.models.labelled import Coding
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.questions import Questions

SIGNS = Coding(-1.0, 0.0, 1.0)
BITS = Coding(0.0, 0.0, 1.0)  # the label of `f > 0`


@dataclass(frozen=True, eq=False)
class Labels(Wrapper):
    """Tells only the sign of the inner box's answer: -1, 0, 1, or 0 and 1 with `BITS`."""

    inner: Oracle
    coding: Coding = field(default=SIGNS)

    def ask(self, questions: Questions) -> Array:
        answers = np.asarray(self.inner.ask(questions))
        if answers.ndim != 1:
            raise OracleError(
                f"a label is the sign of one number, this box answers with shape {answers.shape}"
            )
        return self.coding.encode(answers.astype(np.float64))
