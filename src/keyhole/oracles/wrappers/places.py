"""A box with its places taken out: a token means the same wherever it stands, or all are seen."""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.oracles.base import Oracle, Spec, Wrapper
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class WithoutPlaces(Wrapper):
    """The inner box, asked with the vector of its place subtracted from every token."""

    inner: Oracle
    vectors: Float[Array, "places d"]

    def ask(self, queries: QueryBatch) -> Array:
        tokens = queries.tokens() - self.vectors[: queries.length]
        return np.asarray(self.inner.ask(QueryBatch.of(tokens, queries.purpose)))


@dataclass(frozen=True, eq=False)
class BehindMasked(Wrapper):
    """The inner box behind so many tokens at places that no anchor sees."""

    inner: Oracle
    masked: int

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        spec = self.inner.spec
        longest = spec.domain.max_length
        if longest is None:
            return spec
        return replace(spec, domain=replace(spec.domain, max_length=max(1, longest - self.masked)))

    def ask(self, queries: QueryBatch) -> Array:
        before = np.zeros((len(queries), self.masked, queries.width))
        tokens = np.concatenate([before, queries.tokens()], axis=1)
        return np.asarray(self.inner.ask(QueryBatch.of(tokens, queries.purpose)))
