"""The network inside a Transformer layer as an oracle: sequences of length one.

A single token attends to itself with weight one, so f([x]) is the network at x, whatever the
attention. Longer queries are refused: they would not be answered by the network alone.
"""

from dataclasses import dataclass, replace

from keyhole.arrays import Array
from keyhole.errors import DomainError
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class SingleToken(Oracle):
    """The box, limited to queries of length one."""

    inner: Oracle

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
