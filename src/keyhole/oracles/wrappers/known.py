"""A box together with what has been found out about it, so that it is not asked for again."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array
from keyhole.oracles.base import Oracle, Precision, Spec, Wrapper
from keyhole.oracles.queries import Questions


@dataclass(frozen=True, eq=False)
class Known(Wrapper):
    """The inner box; `precision`, where given, as if it had been stated, and `single`, where given,
    in place of the box for questions of one token, which then cost nothing."""

    inner: Oracle
    precision: Precision | None = None
    single: Callable[[Array], Array] | None = None

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        spec = self.inner.spec
        return spec if self.precision is None else replace(spec, precision=self.precision)

    def ask(self, questions: Questions) -> Array:
        if self.single is None or questions.length != 1:
            return self.inner.ask(questions)
        return np.asarray(self.single(questions.tokens()))
