"""Questions to a restricted interface as queries of an oracle.

A question is a prompt and a bias on some tokens. As a query it is a sequence of vectors of width 2:
(number, 0) is a token of the prompt, (number, bias) a bias on a token. An answer is a row: the
sampled token, its log-probability, then number and log-probability of the likeliest tokens. So
journal, ledger and budget see what the interface sees, one question at a time.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.oracles.queries import QueryBatch

UNTOLD = 1.0  # in place of a log-probability that was not told: no logarithm of one is positive


@dataclass(frozen=True, eq=False)
class Question:
    """What one request asks."""

    prompt: Int[Array, " length"]
    bias: dict[int, float]


def pack(
    prompts: Int[Array, "n length"],
    tokens: Int[Array, "n k"],
    bias: Float[Array, "n k"],
    purpose: str,
) -> QueryBatch:
    """Questions as queries; a bias of zero says nothing and repeats another entry instead."""
    count, length = prompts.shape
    rows = np.zeros((count, length + tokens.shape[1], 2))
    rows[:, :length, 0] = prompts
    if tokens.shape[1]:
        idle = bias == 0.0
        first = np.argmin(idle, axis=1)  # an entry that says something, if any
        every = np.arange(count)
        rows[:, length:, 0] = np.where(idle, tokens[every, first][:, None], tokens)
        rows[:, length:, 1] = np.where(idle, bias[every, first][:, None], bias)
    return QueryBatch.of(rows, purpose)


def unpack(queries: QueryBatch) -> Iterator[Question]:
    """The questions behind the queries."""
    for rows in queries.tokens():
        biased = rows[:, 1] != 0.0
        bias = {int(number): float(value) for number, value in rows[biased]}
        yield Question(rows[~biased, 0].astype(np.int64), bias)


@dataclass(frozen=True, eq=False)
class Replies:
    """Answers to questions."""

    rows: Float[Array, "n k"]

    @property
    def sampled(self) -> Int[Array, " n"]:
        return self.rows[:, 0].astype(np.int64)

    @property
    def sampled_logprob(self) -> Float[Array, " n"]:
        """UNTOLD where it was not told."""
        return self.rows[:, 1]

    def told(self, tokens: Int[Array, "n k"]) -> Float[Array, "n k"]:
        """Log-probabilities of these tokens, UNTOLD where an answer does not hold them."""
        numbers, values = self.rows[:, 2::2], self.rows[:, 3::2]
        found = np.full(tokens.shape, UNTOLD)
        for k in range(tokens.shape[1]):
            same = numbers == tokens[:, k : k + 1]
            here = np.flatnonzero(same.any(axis=1))
            found[here, k] = values[here, np.argmax(same[here], axis=1)]
        return found


def reply(
    top: int, sampled: int, logprob: float | None, likeliest: dict[int, float]
) -> Float[Array, " k"]:
    """One answer as a row for `top` log-probabilities, in the order of the tokens' numbers: that
    of near ties would change with noise."""
    row = np.full(2 + 2 * top, UNTOLD)
    row[2::2] = -1.0
    row[0] = sampled
    row[1] = UNTOLD if logprob is None else logprob
    best = sorted(likeliest.items(), key=lambda item: -item[1])[:top]
    for k, (number, value) in enumerate(sorted(best)):
        row[2 + 2 * k : 4 + 2 * k] = number, value
    return row
