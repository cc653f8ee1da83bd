"""A described batch becomes arrays chunk by chunk, never all at once."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch

CHUNK_BYTES = 16 * 2**20  # token memory of one chunk: fits the cache hierarchy, feeds a GEMM
CHUNK_QUERIES = 256  # what an interruption can lose, and how often progress moves
FLOAT_BYTES = 8


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
        size = FLOAT_BYTES * max(1, queries.length) * queries.width
        return max(1, min(self.chunk_queries, self.chunk_bytes // size))

    def ask(self, queries: QueryBatch) -> Array:
        step = self.chunk(queries)
        parts = [self.inner.ask(part) for part in queries.slices(step)]
        if len({part.shape[1:] for part in parts}) > 1:
            raise OracleError("the box changed the shape of its answers between two batches")
        return np.concatenate(parts) if parts else np.zeros(0)
