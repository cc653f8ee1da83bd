"""A box with what the anchor adds past its attention taken out."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class WithoutSkip(Wrapper):
    """The inner box minus x_N . skip, of which (d,) belongs to scalar answers."""

    inner: Oracle
    skip: Float[Array, "d *out"]

    def ask(self, queries: QueryBatch) -> Array:
        answers = np.asarray(self.inner.ask(queries), dtype=np.float64)
        anchors = queries.bank.rows(queries.index[:, -1])
        return np.asarray(answers - anchors @ self.skip)
