"""A box with the vectors of its places taken out: a token means the same wherever it stands."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class WithoutPlaces(Wrapper):
    """The inner box, asked with the vector of its place subtracted from every token."""

    inner: Oracle
    vectors: Float[Array, "places d"]

    def ask(self, queries: QueryBatch) -> Array:
        tokens = queries.tokens() - self.vectors[: queries.length]
        return np.asarray(self.inner.ask(QueryBatch.of(tokens, queries.purpose)))
