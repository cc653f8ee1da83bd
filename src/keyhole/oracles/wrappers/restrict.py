"""A box seen in part: what is known of it already, one subspace, single tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import DomainError
from keyhole.oracles.base import Oracle, Spec, Wrapper
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class WithPrior(Wrapper):
    """The inner box; `precision`, where given, as if it had been stated, and `single`, where given,
    in place of the box for queries of one token, which then cost nothing."""

    inner: Oracle
    precision: NoiseModel | None = None
    single: Callable[[Array], Array] | None = None

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        spec = self.inner.spec
        return spec if self.precision is None else replace(spec, precision=self.precision)

    def ask(self, queries: QueryBatch) -> Array:
        if self.single is None or queries.length != 1:
            return self.inner.ask(queries)
        return np.asarray(self.single(queries.tokens()))


@dataclass(frozen=True, eq=False)
class Subspace(Oracle):
    """`basis` has orthonormal columns; a query of width k becomes one of the box's width."""

    inner: Oracle
    basis: Float[Array, "d k"]

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return replace(self.inner.spec, width=self.basis.shape[1])

    def ask(self, queries: QueryBatch) -> Array:
        tokens = queries.tokens() @ self.basis.T
        return self.inner.ask(QueryBatch.of(tokens, queries.purpose))

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True, eq=False)
class SingleToken(Oracle):
    """The network inside a Transformer layer: the box, limited to queries of length one.

    A single token attends to itself with weight one, so f([x]) is the network at x, whatever the
    attention. Longer queries are refused: they would not be answered by the network alone.
    """

    inner: Oracle
    further: int = 0  # queries that will be asked of the layer afterwards, for the forecast

    def expect(self, queries: int | None, at_most: int | None = None) -> None:
        self.inner.expect(*(n if n is None else n + self.further for n in (queries, at_most)))

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        spec = self.inner.spec
        return replace(spec, domain=replace(spec.domain, max_length=1))

    def ask(self, queries: QueryBatch) -> Array:
        if queries.length != 1:
            raise DomainError(
                f"the network alone answers queries of length 1, not {queries.length}"
            )
        return self.inner.ask(queries)

    def close(self) -> None:
        self.inner.close()
