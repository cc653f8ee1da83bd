"""A batch of queries, described: rows of a token bank, and which rows make up each sequence.

A million sequences over a few thousand distinct tokens are a small index matrix; they become
arrays only slice by slice, when they are asked. A slice is made block by block in the processor's
cache, so that little more is left to do than to write the tokens once.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import Array, Float, Int, digest

LIMITS = "limits"  # purpose of queries that only a refusal brings about
VERIFICATION = "verification"  # purpose of queries that compare a model with the box
BLOCK_BYTES = 2**18  # tokens made at once: they stay in the cache, and outweigh the calls
SELDOM = 32  # tokens that cost as much to copy as one more part costs


@runtime_checkable
class TokenBank(Protocol):
    """Tokens by number. Rows may be computed on demand."""

    @property
    def width(self) -> int: ...

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        """The tokens, not to be written to: they may be the bank's own memory."""
        ...

    def digest(self) -> bytes:
        """Names the contents: equal digests mean equal rows."""
        ...


def table_rows(table: Float[Array, "m d"], index: Int[Array, " n"]) -> Float[Array, "n d"]:
    """Rows of an array; a slice of it where many follow each other."""
    if (
        len(index) > SELDOM
        and index[-1] - index[0] == len(index) - 1
        and (np.diff(index) == 1).all()
    ):
        return table[index[0] : index[-1] + 1]
    return np.take(table, index, axis=0)


def _rows_once(bank: TokenBank, index: Int[Array, " n"]) -> Float[Array, "k d"]:
    """What broadcasts to the rows: a single one where all are the same."""
    repeated = len(index) > 1 and index[0] == index[-1] and (index == index[0]).all()
    return bank.rows(index[:1] if repeated else index)


def _parts(steady: Int[Array, " n"], step: int) -> Iterator[tuple[int, int]]:
    """Bounds of parts of at most `step` numbers, all the same where they seldom change."""
    turns = np.flatnonzero(steady[1:] != steady[:-1]) + 1
    seldom = turns.tolist() if len(turns) * SELDOM < len(steady) else []
    return pairwise(sorted({*range(0, len(steady), step), *seldom, len(steady)}))


@dataclass(frozen=True, eq=False)
class ArrayBank:
    """A bank that is an array, one token per row."""

    table: Float[Array, "m d"]

    @property
    def width(self) -> int:
        return int(self.table.shape[1])

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        return table_rows(self.table, index)

    @cached_property
    def _digest(self) -> bytes:
        return digest(self.table)

    def digest(self) -> bytes:
        return self._digest


@dataclass(frozen=True, eq=False)
class UnitVectorBank:
    """The unit vectors times a number."""

    width: int
    size: float

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        rows = np.zeros((len(index), self.width))
        rows[np.arange(len(index)), index] = self.size
        return rows

    def digest(self) -> bytes:
        return digest(np.array([self.width, self.size]))


@dataclass(frozen=True, eq=False)
class ScaledBank:
    """Another bank, every token times a number."""

    inner: TokenBank
    factor: float

    @property
    def width(self) -> int:
        return self.inner.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        return self.factor * self.inner.rows(index)

    def digest(self) -> bytes:
        return digest(self.inner.digest(), np.array([self.factor]))


@dataclass(frozen=True, eq=False)
class SubsetBank:
    """Some tokens of another bank, renumbered from zero."""

    inner: TokenBank
    numbers: Int[Array, " m"]

    @property
    def width(self) -> int:
        return self.inner.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        return self.inner.rows(self.numbers[index])

    def digest(self) -> bytes:
        return digest(self.inner.digest(), self.numbers)


@dataclass(frozen=True, eq=False)
class SumBank:
    """Sums of a token of one bank and a token of another: number i * count + j is a_i + b_j."""

    first: TokenBank
    second: TokenBank
    count: int  # tokens of the second bank

    @property
    def width(self) -> int:
        return self.first.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        high, low = np.divmod(index, self.count)
        return self.first.rows(high) + self.second.rows(low)

    def digest(self) -> bytes:
        return digest(self.first.digest(), self.second.digest(), np.array([self.count]))


@dataclass(frozen=True, eq=False)
class ProbeAnchorBank:
    """Tokens of queries [probe + anchor; …; anchor]: number i * count + j is probe_i + anchor_j,
    and with i one beyond the last probe it is anchor_j alone."""

    probes: TokenBank
    anchors: TokenBank
    size: int  # probes
    count: int  # anchors

    @property
    def width(self) -> int:
        return self.anchors.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        probe, anchor = np.divmod(index, self.count)
        rows, summed = np.array(self.anchors.rows(anchor)), probe < self.size
        rows[summed] += self.probes.rows(probe[summed])
        return rows

    def tokens(self, index: Int[Array, "n length"]) -> Float[Array, "n length d"]:
        """Tokens of whole queries. An anchor is made once for all its tokens, and for all
        queries if it stays while the probes run, as is a probe if that stays."""
        anchor = index[:, -1] - self.size * self.count
        probe = (index[:, :-1] - anchor[:, None]) // self.count
        count, places = probe.shape
        tokens = np.empty((count, places + 1, self.width))
        size = max(1, BLOCK_BYTES // (8 * self.width))
        steady = anchor if places > 1 or (anchor[:2] == anchor[:1]).all() else probe[:, 0]
        for start, stop in _parts(steady, max(1, size // (places + 1))):
            own = _rows_once(self.anchors, anchor[start:stop])
            tokens[start:stop, -1] = own
            step = max(1, size // (stop - start))
            for first in range(0, places, step):
                part = probe[start:stop, first : first + step]
                rows = _rows_once(self.probes, part.ravel())
                rows = rows if len(rows) == 1 else rows.reshape(*part.shape, self.width)
                here = tokens[start:stop, first : first + part.shape[1]]
                np.add(rows, own[:, None], out=here)
        return tokens

    def digest(self) -> bytes:
        return digest(
            self.probes.digest(), self.anchors.digest(), np.array([self.size, self.count])
        )


def holds_table(bank: object) -> bool:
    """Whether some of its tokens are an array, made for these queries."""
    parts = (
        getattr(bank, name, None) for name in ("inner", "first", "second", "probes", "anchors")
    )
    return isinstance(bank, ArrayBank) or any(holds_table(p) for p in parts if p is not None)


@dataclass(frozen=True, eq=False)
class QueryBatch:
    """Sequences of equal length, asked for one purpose.

    Args:
        bank: Where the tokens come from: an array, or a description that makes them.
        index: Places in the bank, a row per sequence.
        purpose: The heading in the ledger.
    """

    bank: TokenBank
    index: Int[Array, "n length"]
    purpose: str

    @classmethod
    def of(cls, tokens: Float[Array, "n length d"], purpose: str) -> "QueryBatch":
        """Queries given as the plain array of their tokens."""
        n, length, width = tokens.shape
        bank = ArrayBank(np.ascontiguousarray(tokens).reshape(n * length, width))
        return cls(bank, np.arange(n * length, dtype=np.int64).reshape(n, length), purpose)

    def __len__(self) -> int:
        return int(self.index.shape[0])

    @property
    def length(self) -> int:
        return int(self.index.shape[1])

    @property
    def different(self) -> int:
        """Different tokens of the first query: copies of one tell nothing of the scores."""
        return len({hash(token.tobytes()) for token in self[:1].shared_tokens()[0]})

    @property
    def width(self) -> int:
        return self.bank.width

    def __getitem__(self, part: slice) -> "QueryBatch":
        return QueryBatch(self.bank, self.index[part], self.purpose)

    def slices(self, step: int) -> Iterator["QueryBatch"]:
        """Consecutive parts of `step` queries. Where the tokens of one are asked for, those of
        the next are made meanwhile."""
        starts = range(0, len(self), step)
        # up to a megabyte of tokens is made about as fast as a thread is woken
        if len(starts) < 2 or 8 * step * self.length * self.width <= 2**20:
            yield from (self[start : start + step] for start in starts)
            return
        with ThreadPoolExecutor(1, "tokens") as pool:
            ahead = _Ahead(self, step, pool)
            for start in starts:
                part = self[start : start + step]
                yield _Part(part.bank, part.index, part.purpose, start, ahead)

    def tokens(self) -> Float[Array, "n length d"]:
        if isinstance(self.bank, ProbeAnchorBank):
            return self.bank.tokens(self.index)
        tokens = np.empty((*self.index.shape, self.width))
        flat, index = tokens.reshape(-1, self.width), self.index.ravel()
        step = max(1, BLOCK_BYTES // (8 * self.width))
        for start in range(0, len(index), step):
            flat[start : start + step] = self.bank.rows(index[start : start + step])
        return tokens

    def shared_tokens(self) -> Float[Array, "n length d"]:
        """The tokens, not to be written to: where they lie one after the other in an array, that
        array itself."""
        flat = self.index.ravel()
        if isinstance(self.bank, ArrayBank) and len(flat) and (np.diff(flat) == 1).all():
            table = self.bank.table[flat[0] : flat[-1] + 1]
            return table.astype(np.float64, copy=False).reshape(*self.index.shape, self.width)
        return self.tokens()

    def digest(self) -> bytes:
        """Names the queries: same digest, same tokens, same order."""
        return digest(self.bank.digest(), np.asarray(self.index, dtype=np.int64))


class _Ahead:
    """Tokens of the parts of one batch, one part ahead of the box."""

    def __init__(self, queries: QueryBatch, step: int, pool: ThreadPoolExecutor) -> None:
        self.queries, self.step, self.pool = queries, step, pool
        self.ready: dict[int, Future[Array]] = {}

    def take(self, start: int) -> Array:
        made, following = self.ready.pop(start, None), start + self.step
        if made is None or made.cancel():  # on a busy machine the thread may not have begun
            tokens = self.queries[start:following].tokens()
        else:
            tokens = made.result()
        if following < len(self.queries) and following not in self.ready:
            later = self.queries[following : following + self.step]
            self.ready = {following: self.pool.submit(later.tokens)}
        return tokens


@dataclass(frozen=True, eq=False)
class _Part(QueryBatch):
    start: int
    ahead: _Ahead

    def tokens(self) -> Float[Array, "n length d"]:
        return self.ahead.take(self.start)
