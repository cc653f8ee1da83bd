"""Prompts as counted tokens: the order does not matter to attention without positions, and how
often a token occurs is the continuous dial that token numbers otherwise lack.

A context is an anchor (the last token) with other tokens, each with its multiplicity. Attention
gives a token that occurs k times k times the weight: its score is larger by log k.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import InvalidArgument
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import NoiseModel


@dataclass(frozen=True, eq=False)
class Contexts:
    """`tokens`[:, 0] are the anchors; where `counts` is zero a token is absent."""

    tokens: Int[Array, "n m"]
    counts: Float[Array, "n m"]

    @classmethod
    def of(cls, rows: list[list[tuple[int, int]]]) -> "Contexts":
        """From lists of (token, multiplicity), the anchor first."""
        width = max(len(row) for row in rows)
        padded = [[*row, *[(row[0][0], 0)] * (width - len(row))] for row in rows]
        both = np.array(padded)
        return cls(both[:, :, 0].astype(np.int64), both[:, :, 1].astype(np.float64))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def anchors(self) -> Int[Array, " n"]:
        return self.tokens[:, 0]

    def sequences(self) -> list[Int[Array, " length"]]:
        """The prompts: other tokens first, the anchor and its copies last."""
        return [
            np.repeat(row[::-1], count[::-1].astype(np.int64))
            for row, count in zip(self.tokens, self.counts, strict=True)
        ]

    def joined(self, other: "Contexts") -> "Contexts":
        """These and others, padded to one width."""
        width = max(self.tokens.shape[1], other.tokens.shape[1])
        tokens, counts = [], []
        for part in (self, other):
            missing = width - part.tokens.shape[1]
            copies = np.repeat(part.tokens[:, :1], missing, axis=1)
            tokens.append(np.hstack([part.tokens, copies]))
            counts.append(np.pad(part.counts, ((0, 0), (0, missing))))
        return Contexts(np.concatenate(tokens), np.concatenate(counts))


@dataclass(frozen=True, eq=False)
class CountedPrompts:
    """Prompts of any lengths as batches of one length each; answers in the prompts' order, centred
    where they are known up to a constant."""

    asker: Asker
    shifted: bool
    noise: NoiseModel

    @property
    def tokens(self) -> int:
        return int(self.asker.oracle.spec.domain.tokens or 0)

    @property
    def longest(self) -> int:
        """Tokens of a prompt, at most."""
        limit = self.asker.oracle.spec.domain.max_length
        return 48 if limit is None else min(limit, 48)

    def ask(self, contexts: Contexts, purpose: str) -> Float[Array, "n V"]:
        return self.ask_sequences(contexts.sequences(), purpose)

    def ask_sequences(self, prompts: list[Array], purpose: str) -> Float[Array, "n V"]:
        found = np.zeros((len(prompts), self.tokens))
        lengths = np.array([len(prompt) for prompt in prompts])
        for length in np.unique(lengths):
            places = np.flatnonzero(lengths == length)
            batch = np.array([prompts[k] for k in places], dtype=np.float64)[:, :, None]
            found[places] = self.asker(batch, purpose)
            if self.asker.scalar:
                raise InvalidArgument(
                    "this box answers with one number; attention on tokens is learned from the "
                    "logits of all tokens"
                )
        return found - found.mean(axis=1, keepdims=True) if self.shifted else found
