"""Keeps queries and answers of a run, for the free comparison with the hypothesis."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Int
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch, holds_table

DESCRIBED = 512  # queries of one batch that are kept, spread over it, where tokens need not be
LISTED = 128  # queries of the whole run that are kept with their tokens


@dataclass(frozen=True, eq=False)
class Kept:
    """Some queries of a batch, and their numbers in the run."""

    numbers: Int[Array, " n"]
    queries: QueryBatch
    answers: Array

    @property
    def size(self) -> int:
        """Bytes of the tokens."""
        return 8 * self.queries.index.size * self.queries.width

    def part(self, chosen: Array, tokens: bool) -> "Kept":
        index, purpose = self.queries.index[chosen], self.queries.purpose
        queries = QueryBatch(self.queries.bank, index, purpose)
        if tokens:
            queries = QueryBatch.of(queries.tokens(), purpose)
        return Kept(self.numbers[chosen], queries, self.answers[chosen])


class AnswerSample(Wrapper):
    """Remembers a sample of the run: where the tokens were made for a batch alone, every n-th
    query with its tokens, n growing with the run, and the first for each purpose; of all other
    batches the description."""

    def __init__(self, inner: Oracle) -> None:
        self.inner, self.total = inner, 0
        self._room = 2**24  # bytes of tokens that are held
        self._thins = True  # whether others leave for what has no room
        self._described: list[Kept] = []
        self._listed: list[Kept] = []
        self._held, self._bytes = 0, 0  # queries of these, and the size of their tokens
        self._stride = 1
        self._first: dict[str, int] = {}  # number of the first query for each purpose

    @property
    def kept(self) -> list[Kept]:
        return sorted([*self._described, *self._listed], key=lambda kept: int(kept.numbers[0]))

    @property
    def past(self) -> list[tuple[QueryBatch, Array]]:
        return [(kept.queries, kept.answers) for kept in self.kept]

    def ask(self, queries: QueryBatch) -> Array:
        answers = self.inner.ask(queries)
        count = len(queries)
        if not count:
            return answers
        batch = Kept(np.arange(self.total, self.total + count), queries, answers)
        self._first.setdefault(queries.purpose, self.total)
        self.total += count
        if holds_table(queries.bank):
            self._list(batch)
        else:
            spread = np.linspace(0, count - 1, min(count, DESCRIBED)).astype(np.int64)
            self._described.append(batch.part(np.unique(spread), tokens=False))
        return answers

    def narrow(self) -> None:
        """What comes now is no part of the learning: little of it is kept, and nothing leaves."""
        self._room, self._thins = min(self._room, self._bytes + 2**16), False

    def _list(self, batch: Kept) -> None:
        """Adds what the stride leaves of the batch; the stride grows until all of it fits."""
        chosen = self._chosen(batch)
        if not self._thins and not self._fits(batch, int(chosen.sum())):
            return
        while self._stride < self.total and not self._fits(batch, int(chosen.sum())):
            self._stride *= 2
            chosen = self._chosen(batch)
            masks = [self._chosen(kept) for kept in self._listed]
            self._listed = [
                kept if mask.all() else kept.part(mask, tokens=True)
                for kept, mask in zip(self._listed, masks, strict=True)
                if mask.any()
            ]
            self._held = sum(len(kept.numbers) for kept in self._listed)
            self._bytes = sum(kept.size for kept in self._listed)
        if chosen.any():
            self._listed.append(batch.part(chosen, tokens=True))
            self._held += len(self._listed[-1].numbers)
            self._bytes += self._listed[-1].size

    def _chosen(self, batch: Kept) -> Array:
        first = self._first[batch.queries.purpose]
        return np.asarray((batch.numbers % self._stride == 0) | (batch.numbers == first))

    def _fits(self, batch: Kept, count: int) -> bool:
        """Whether there is room for so many queries of the batch."""
        size = self._bytes + count * batch.size // len(batch.numbers)
        return self._held + count <= LISTED and size <= self._room
