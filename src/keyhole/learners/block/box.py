"""The oracle as the block's algorithms see it, and how they end."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.measurement.asker import Asker
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch

ANSWER = {"answer": True}  # metadata of fields, in the record of a run, that hold answers


class NotThisBlock(Exception):
    """The answers contradict the form of block that an algorithm assumes."""


class OtherShape(NotThisBlock):
    """Answers of another shape than a block's: no choice of parameters helps."""


class Unclear(Exception):
    """An algorithm came to no result; the box may still be of the form it assumes."""


@dataclass(eq=False)
class OfItsWidth(Wrapper):
    """Answers with a vector of its width, as a block does; everything else is refused."""

    inner: Oracle

    def ask(self, queries: QueryBatch) -> Array:
        answers = np.asarray(self.inner.ask(queries))
        width = self.inner.spec.width
        if answers.shape != (len(queries), width):
            raise OtherShape(
                f"a block answers with a vector of its width {width}, got answers of shape "
                f"{answers.shape[1:]}"
            )
        return answers


class SearchLimit(Wrapper):
    """Ends the search for a start that has asked as much as this; raises Unclear."""

    def __init__(self, inner: Oracle, most: int) -> None:
        self.inner, self.most, self.asked = inner, most, 0

    def ask(self, queries: QueryBatch) -> Array:
        self.asked += len(queries)
        if self.asked > self.most:
            raise Unclear(f"no start was found within {self.most} queries")
        return self.inner.ask(queries)


def open_block(oracle: Oracle) -> Asker:
    """The box as algorithms for blocks ask it: with tokens that it can represent."""
    return Asker(OfItsWidth(oracle), rounding=True)


@dataclass(eq=False)
class Paid(Wrapper):
    """Remembers all queries of up to so many tokens with their answers, those of attempts that
    failed among them: a refinement uses them again."""

    inner: Oracle
    longest: int
    batches: list[tuple[Array, Array]] = field(default_factory=list)

    def ask(self, queries: QueryBatch) -> Array:
        answers = np.asarray(self.inner.ask(queries))
        if queries.length <= self.longest:
            self.batches.append((queries.tokens(), answers.astype(np.float64)))
        return answers

    def pairs(self) -> list[tuple[Float[Array, "n length d"], Float[Array, "n d"]]]:
        """Queries and answers, by the length of the queries."""
        found = []
        for length in sorted({tokens.shape[1] for tokens, _ in self.batches}):
            alike = [pair for pair in self.batches if pair[0].shape[1] == length]
            tokens, answers = zip(*alike, strict=True)
            found.append((np.concatenate(tokens), np.concatenate(answers)))
        return found

    def singles_apart(self, largest: float) -> tuple[Float[Array, "n 1 d"], Float[Array, "n d"]]:
        """Single tokens up to this size that do not lie beside an earlier one."""
        tokens, answers = self.pairs()[0]
        points = tokens[:, 0]
        sizes = np.linalg.norm(points, axis=1)
        kept: list[int] = []
        for i in np.flatnonzero(np.abs(points).max(axis=1) < largest):
            gaps = np.linalg.norm(points[kept] - points[i], axis=1)
            if not kept or (gaps > 0.1 * sizes[i]).all():
                kept.append(int(i))
        return tokens[kept], answers[kept]
