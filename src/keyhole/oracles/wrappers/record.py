"""Keeps every query of a run with its answer, for the comparison with the hypothesis.

A batch that is described (unit vectors, sums of a few tokens) is kept as its description. Tokens
that were made for a batch are copied, for whoever made them may write to them again: into memory
up to a limit, then into a temporary file that has no name and ends with the process. Where the
disk is full, later batches are counted and not kept, and the verdict says how many were compared.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import IO, Any
from weakref import WeakKeyDictionary, finalize

import numpy as np

from keyhole.arrays import Array, Int
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import ArrayBank, QueryBatch, TokenBank, holds_table

IN_MEMORY = 2**20  # bytes of tokens that are held in memory before a file takes them


@dataclass(frozen=True, eq=False)
class Kept:
    """Queries of one batch with their answers, and their numbers in the run."""

    numbers: Int[Array, " n"]
    queries: QueryBatch
    answers: Array


class AnswerRecord(Wrapper):
    """Remembers all queries and answers of a run in bounded memory."""

    def __init__(self, inner: Oracle, in_memory: int = IN_MEMORY) -> None:
        self.inner, self.total = inner, 0
        self.kept: list[Kept] = []
        self.recording = True
        self._tables = _TableStore(in_memory)

    @property
    def past(self) -> list[tuple[QueryBatch, Array]]:
        return [(kept.queries, kept.answers) for kept in self.kept]

    def stop(self) -> None:
        """What comes now is counted and not kept: fresh queries are judged where they are asked."""
        self.recording = False

    def ask(self, queries: QueryBatch) -> Array:
        answers = self.inner.ask(queries)
        count = len(queries)
        if count:
            numbers = np.arange(self.total, self.total + count)
            self.total += count
            if self.recording and (copied := self._copy(queries)) is not None:
                self.kept.append(Kept(numbers, copied, np.array(answers)))
        return answers

    def _copy(self, queries: QueryBatch) -> QueryBatch | None:
        """The queries with tokens of their own; None where there is no room for them."""
        bank: Any = queries.bank
        if not holds_table(bank):
            return QueryBatch(bank, shortened(queries.index), queries.purpose)
        rows = _count_rows(bank)
        try:
            if queries.index.size < rows:  # of a large table few tokens were asked
                alone = QueryBatch.of(queries.tokens(), queries.purpose)
                bank = self._tables.copy(alone.bank)
                return QueryBatch(bank, shortened(alone.index), queries.purpose)
            return QueryBatch(self._tables.copy(bank), shortened(queries.index), queries.purpose)
        except OSError:  # no disk to write to
            return None


def shortened(index: Int[Array, "n length"]) -> Int[Array, "n length"]:
    """A copy in numbers of four bytes, where these are enough."""
    most = int(np.max(index, initial=0))
    return np.array(index, dtype=np.int32 if most < 2**31 else np.int64)


def _banks_inside(bank: Any) -> Iterator[tuple[str, Any]]:
    """The banks that a bank is made of, by the names of its fields."""
    for part in fields(bank):
        value = getattr(bank, part.name)
        if not isinstance(value, np.ndarray) and isinstance(value, TokenBank):
            yield part.name, value


def _count_rows(bank: Any) -> int:
    """Tokens in the arrays that a bank is made of."""
    if isinstance(bank, ArrayBank):
        return len(bank.table)
    return sum(_count_rows(part) for _, part in _banks_inside(bank))


class _TableStore:
    """Copies of token tables, each made once: batches often share a bank."""

    def __init__(self, in_memory: int) -> None:
        self.left = in_memory
        self._file: IO[bytes] | None = None
        self._size = 0
        self._copies: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def copy(self, bank: Any) -> Any:
        if bank not in self._copies:
            if isinstance(bank, ArrayBank):
                self._copies[bank] = ArrayBank(self._keep(np.ascontiguousarray(bank.table)))
            else:
                inside = {name: self.copy(part) for name, part in _banks_inside(bank)}
                self._copies[bank] = replace(bank, **inside)
        return self._copies[bank]

    def _keep(self, table: Array) -> Array:
        if table.nbytes <= self.left:
            self.left -= table.nbytes
            return table.copy()
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="keyhole-")  # noqa: SIM115
            finalize(self, self._file.close)
        start, aligned = self._size, -(-self._size // 64) * 64
        self._file.seek(aligned)
        table.tofile(self._file)
        self._file.flush()
        self._size = max(start, aligned + table.nbytes)
        return np.memmap(self._file, table.dtype, "r", aligned, table.shape)
