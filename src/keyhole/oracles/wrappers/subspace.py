"""A box seen through one subspace: queries are coordinates, tokens stay inside the subspace."""

from dataclasses import dataclass, replace

from keyhole.arrays import Array, Float
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import QueryBatch


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
