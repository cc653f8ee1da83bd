"""A box seen in part: what is known of it already, one subspace, single tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
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
class AffineSingles(Wrapper):
    """The inner box, whose answers to single tokens are affine in them: tokens that those asked
    before, zero among them, combine to cost nothing."""

    inner: Oracle
    tokens: Float[Array, "n d"]
    answers: Float[Array, "n *out"]

    def ask(self, queries: QueryBatch) -> Array:
        if queries.length != 1:
            return self.inner.ask(queries)
        wanted = queries.tokens()[:, 0]
        corners = np.column_stack([self.tokens, np.ones(len(self.tokens))])
        goals = np.column_stack([wanted, np.ones(len(wanted))])
        shares = np.linalg.lstsq(corners.T, goals.T, rcond=None)[0].T
        for number, token in enumerate(self.tokens):  # the same token has the very same answer
            shares[(wanted == token).all(axis=1)] = np.eye(len(self.tokens))[number]
        off = np.abs(shares @ corners - goals).max(axis=1)
        known = off <= 64.0 * UNIT_ROUNDOFF * np.abs(goals).max(axis=1)  # rounding of a few terms
        known &= np.abs(shares).max(axis=1) <= 2.0  # farther out their own rounding would grow
        found = np.tensordot(shares, self.answers, axes=1).astype(self.answers.dtype)
        rest = QueryBatch(queries.bank, queries.index[~known], queries.purpose)
        if len(rest):
            found[~known] = self.inner.ask(rest)
        return found


def find_known_directions(oracle: Oracle) -> Float[Array, "n d"]:
    """Directions in which single tokens cost nothing: orthonormal, possibly none."""
    while isinstance(oracle, Wrapper):
        if isinstance(oracle, AffineSingles):
            _, sizes, rows = np.linalg.svd(oracle.tokens, full_matrices=False)
            return np.asarray(rows[sizes > 1e-3 * sizes[0]])
        oracle = oracle.inner
    return np.zeros((0, oracle.spec.width))


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
