"""Answers with seeded noise: what a box that blurs its answers looks like."""

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch


class Noisy(Wrapper):
    """Adds independent normal noise: `additive` in the answer's units, `relative` to its size."""

    def __init__(
        self, inner: Oracle, additive: float = 0.0, relative: float = 0.0, seed: int = 0
    ) -> None:
        if additive < 0 or relative < 0:
            raise InvalidArgument("noise levels must not be negative")
        self.inner, self.additive, self.relative = inner, additive, relative
        self._rng = np.random.default_rng(seed)

    def ask(self, queries: QueryBatch) -> Array:
        answers = self.inner.ask(queries)
        noise = self._rng.standard_normal((2, *answers.shape))
        return answers + self.additive * noise[0] + self.relative * np.abs(answers) * noise[1]
