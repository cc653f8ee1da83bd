"""The queries of a diagnosis: rows that show one thing and hide another.

A single token has no other to attend to and nothing to pool: what it shows is embedding, norms,
networks, weights. A row alone needs no padding: what is wrong with it is not the mask. The same row
beside a longer one, and in a batch of equal lengths, shows what company does. This is what makes
two faults at a time separable.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keyhole.diagnosis.reference import Reference
from keyhole.diagnosis.simulate import Row


@dataclass(frozen=True, eq=False)
class Call:
    """Rows that are asked together, in one request."""

    rows: tuple[Row, ...]
    purpose: str


@dataclass
class RowMaker:
    """Makes rows that a reference accepts.

    Attributes:
        reference: whose rows.
        rng: where chance comes from.
        texts: for endpoints that take text alone, words that are one token each: token number
            to word. Rows then carry the tokens that the tokenizer puts around a text.
    """

    reference: Reference
    rng: np.random.Generator
    texts: dict[int, str] | None = None
    _pool: Any = field(default=None, init=False)

    def make(self, length: int) -> Row:
        """A random row of so many tokens; special tokens at its ends where there is room."""
        if not self.reference.tokens:
            return self.rng.standard_normal((length, self.reference.width))
        start, end = self.reference.start, self.reference.end
        inner = length - len(start) - len(end)
        if inner >= 1:
            return np.array([*start, *self._tokens(inner), *end], dtype=np.int64)
        if self.texts is not None:  # no text is shorter
            return np.array([*start, *self._tokens(1), *end], dtype=np.int64)
        return self._tokens(length)

    def _tokens(self, count: int) -> Row:
        if self._pool is None:
            allowed = np.ones(self.reference.vocabulary, dtype=bool)
            allowed[[n for n in self.reference.forbidden if n < len(allowed)]] = False
            self._pool = np.flatnonzero(allowed)
            if self.texts is not None:
                self._pool = np.array(sorted(self.texts), dtype=np.int64)
        return self.rng.choice(self._pool, count)


def first_calls(maker: RowMaker) -> list[Call]:
    """Thirteen rows that every visit begins with."""
    six, five = maker.make(6), maker.make(5)
    calls = [
        Call((six,), "a row alone"),
        Call((six,), "the same row again"),
        Call((maker.make(1), maker.make(1)), "single tokens"),
        Call((maker.make(3),), "three tokens"),
        Call((maker.make(11),), "eleven tokens"),
    ]
    if maker.reference.tokens:
        calls.append(Call((six, maker.make(14)), "a row beside a longer one"))
    return [
        *calls,
        Call((five, maker.make(5), maker.make(5)), "a batch of equal lengths"),
        Call((five,), "a row of that batch alone"),
        Call((maker.make(20),), "twenty tokens"),
    ]


def fresh_calls(maker: RowMaker) -> list[Call]:
    """Rows that no hypothesis has been chosen by."""
    if not maker.reference.tokens:
        return [Call((maker.make(4),), "fresh"), Call((maker.make(9), maker.make(9)), "fresh")]
    return [Call((maker.make(4),), "fresh"), Call((maker.make(9), maker.make(13)), "fresh")]


def long_lengths(reference: Reference) -> list[int]:
    """Lengths of long rows: one in the middle, one at the limit."""
    if not reference.tokens:
        return [64]
    most = min(reference.max_length or 512, 512)
    return [length for length in (140, most - 2) if 20 < length <= most]
