"""Fresh questions off the learner's design: where would another box give itself away?

Long sequences (windows, masks), a few plain tokens, a common shift of all tokens (score caps, near
ties of large scores), long tokens (hard attention), repeated tokens (anything that is not a set),
and the same tokens in another order (positions).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.oracles.base import Spec

LONG = 96  # tokens of a long sequence: beyond the windows and ramps one meets in small models
SHORT = 7
SHIFT = 24.0  # length of the common shift in natural lengths: scores of several hundred
HARD = 5.0  # length of tokens that make attention hard, in natural lengths


@dataclass(frozen=True, eq=False)
class Fresh:
    """One question with the reason it is asked."""

    tokens: Float[Array, "length d"]
    reason: str


@dataclass(frozen=True, eq=False)
class Designer:
    """Draws questions of each kind for a model whose natural token length is known."""

    spec: Spec
    natural: float
    rng: np.random.Generator

    def stream(self, count: int) -> Iterator[Fresh]:
        """The first `count` questions of an endless round through the kinds."""
        kinds: tuple[Callable[[int], Fresh], ...] = (
            self.long,
            self.shifted,
            self.hard,
            self.repeated,
            self.short,
            self.reordered,
        )
        for number in range(count):
            lap, kind = divmod(number, len(kinds))
            yield kinds[kind](lap)

    def _length(self, wanted: int, lap: int) -> int:
        if lap:
            wanted = max(2, int(self.rng.integers(2, wanted + 1)))
        limit = self.spec.domain.max_length
        return wanted if limit is None else min(wanted, limit)

    def _tokens(self, length: int, size: float = 1.0) -> Array:
        """Random tokens inside the domain, of the given length in natural lengths."""
        domain, width = self.spec.domain, self.spec.width
        if domain.vocabulary is not None:
            chosen = self.rng.integers(len(domain.vocabulary), size=length)
            return np.array(domain.vocabulary[chosen], dtype=np.float64)
        tokens = size * self.natural * self.rng.standard_normal((length, width)) / np.sqrt(width)
        return self.spec.domain.drawn_in(tokens)

    def short(self, lap: int) -> Fresh:
        return Fresh(self._tokens(self._length(SHORT, lap)), "a few random tokens")

    def long(self, lap: int) -> Fresh:
        return Fresh(self._tokens(self._length(LONG, lap)), "a long sequence")

    def reordered(self, lap: int) -> Fresh:
        """Tokens in order of length, the query last: a box with positions cannot know them."""
        tokens = self._tokens(self._length(3 * SHORT, lap))
        order = np.argsort(np.linalg.norm(tokens[:-1], axis=1))[::-1]
        return Fresh(np.concatenate([tokens[:-1][order], tokens[-1:]]), "tokens sorted by length")

    def shifted(self, lap: int) -> Fresh:
        tokens = self._tokens(self._length(SHORT, lap))
        if self.spec.domain.vocabulary is None:
            shift = self._tokens(1, SHIFT)
            tokens = self.spec.domain.drawn_in(np.concatenate([tokens[:-1] + shift, tokens[-1:]]))
        return Fresh(tokens, "tokens with a large common part: near ties of large scores")

    def hard(self, lap: int) -> Fresh:
        return Fresh(self._tokens(self._length(2 * SHORT, lap), HARD), "long tokens")

    def repeated(self, lap: int) -> Fresh:
        length = self._length(2 * SHORT, lap)
        few = self._tokens(min(3, length))
        return Fresh(few[self.rng.integers(len(few), size=length)], "repeated tokens")
