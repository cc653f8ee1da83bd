"""A batch of questions, described: rows of a token bank, and which rows make up each sequence.

A million sequences over a few thousand distinct tokens are a small index matrix; they become
arrays only slice by slice, when they are asked.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import Array, Float, Int, digest


@runtime_checkable
class Bank(Protocol):
    """Tokens by number. Rows may be computed on demand."""

    @property
    def width(self) -> int: ...

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]: ...

    def digest(self) -> bytes:
        """Names the contents: equal digests mean equal rows."""
        ...


@dataclass(frozen=True, eq=False)
class Listed:
    """A bank that is an array, one token per row."""

    table: Float[Array, "m d"]

    @property
    def width(self) -> int:
        return int(self.table.shape[1])

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        return np.take(self.table, index, axis=0)

    @cached_property
    def _digest(self) -> bytes:
        return digest(self.table)

    def digest(self) -> bytes:
        return self._digest


@dataclass(frozen=True, eq=False)
class Scaled:
    """Another bank, every token times a number."""

    inner: Bank
    factor: float

    @property
    def width(self) -> int:
        return self.inner.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        rows = self.inner.rows(index)
        rows *= self.factor
        return rows

    def digest(self) -> bytes:
        return digest(self.inner.digest(), np.array([self.factor]))


@dataclass(frozen=True, eq=False)
class Summed:
    """Sums of a token of one bank and a token of another: number i * count + j is a_i + b_j."""

    first: Bank
    second: Bank
    count: int  # tokens of the second bank

    @property
    def width(self) -> int:
        return self.first.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        high, low = np.divmod(index, self.count)
        rows = self.first.rows(high)
        rows += self.second.rows(low)
        return rows

    def digest(self) -> bytes:
        return digest(self.first.digest(), self.second.digest(), np.array([self.count]))


@dataclass(frozen=True, eq=False)
class Joined:
    """Two banks under one numbering: `first` up to `split`, then `second` from its own zero."""

    first: Bank
    second: Bank
    split: int

    @property
    def width(self) -> int:
        return self.first.width

    def rows(self, index: Int[Array, " n"]) -> Float[Array, "n d"]:
        rows = np.empty((len(index), self.width))
        early = index < self.split
        rows[early] = self.first.rows(index[early])
        rows[~early] = self.second.rows(index[~early] - self.split)
        return rows

    def digest(self) -> bytes:
        return digest(self.first.digest(), self.second.digest(), np.array([self.split]))


@dataclass(frozen=True, eq=False)
class Questions:
    """Sequences of equal length, asked for one purpose (the ledger's heading)."""

    bank: Bank
    index: Int[Array, "n length"]
    purpose: str

    @classmethod
    def of(cls, tokens: Float[Array, "n length d"], purpose: str) -> "Questions":
        """Questions given as the plain array of their tokens."""
        n, length, width = tokens.shape
        bank = Listed(np.ascontiguousarray(tokens).reshape(n * length, width))
        return cls(bank, np.arange(n * length, dtype=np.int64).reshape(n, length), purpose)

    def __len__(self) -> int:
        return int(self.index.shape[0])

    @property
    def length(self) -> int:
        return int(self.index.shape[1])

    @property
    def width(self) -> int:
        return self.bank.width

    def __getitem__(self, part: slice) -> "Questions":
        return Questions(self.bank, self.index[part], self.purpose)

    def tokens(self) -> Float[Array, "n length d"]:
        rows = self.bank.rows(self.index.ravel())
        return rows.reshape(len(self), self.length, self.width)

    def digest(self) -> bytes:
        """Names the questions: same digest, same tokens, same order."""
        return digest(self.bank.digest(), np.asarray(self.index, dtype=np.int64))
