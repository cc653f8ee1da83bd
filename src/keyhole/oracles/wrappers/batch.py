"""A described batch becomes arrays chunk by chunk, never all at once."""

from collections.abc import Iterator
from dataclasses import dataclass

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.parts import assembled

CHUNK_BYTES = 16 * 2**20  # token memory of one chunk: fits the cache hierarchy, feeds a GEMM
CHUNK_QUERIES = 256  # what an interruption can lose, and how often progress moves


@dataclass(frozen=True, eq=False)
class Batcher(Wrapper):
    """Splits by memory and by number. The split depends on the queries alone, so that a
    resumed run asks the very same chunks."""

    inner: Oracle
    chunk_bytes: int = CHUNK_BYTES
    chunk_queries: int = CHUNK_QUERIES

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or self.chunk_queries < 1:
            raise InvalidArgument("chunk_bytes and chunk_queries must be positive")

    def chunk(self, queries: QueryBatch) -> int:
        size = 8 * max(1, queries.length) * queries.width
        return max(1, min(self.chunk_queries, self.chunk_bytes // size))

    def ask(self, queries: QueryBatch) -> Array:
        found = {}
        for start, part in self.split(queries):
            found[start] = self.inner.ask(part)
        return assembled(len(queries), found)

    def stream(self, queries: QueryBatch) -> Iterator[tuple[int, Array]]:
        """(number of the first query, answers) of each chunk, as soon as it is answered: a journal
        keeps it before the next one is asked."""
        for start, part in self.split(queries):
            yield start, self.inner.ask(part)

    def split(self, queries: QueryBatch) -> Iterator[tuple[int, QueryBatch]]:
        """The chunks, each with the number of its first query."""
        start = 0
        for part in queries.slices(self.chunk(queries)):
            yield start, part
            start += len(part)
