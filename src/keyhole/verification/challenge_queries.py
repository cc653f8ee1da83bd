"""Fresh queries off the learner's design: where would another box give itself away?

Long sequences (windows, masks), a few plain tokens, a common shift of all tokens (score caps, near
ties of large scores), long tokens (hard attention), repeated tokens (anything that is not a set),
and the same tokens in another order (positions). After the first lap, which is made of the most
telling sizes, lengths and sizes are drawn over decades: a box that differs only beyond some length
or size is met there, and some are chosen of a few for what would show on them (sensitivity).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.oracles.base import Spec
from keyhole.verification.sensitivity import can_tell, most_telling

LONG = 96  # tokens of a long sequence: beyond the windows and ramps one meets in small models
LONGEST = 512  # of later laps
SHORT = 7
SHIFT = 24.0  # length of the common shift in natural lengths: near ties of large scores
SHIFTS = 4.0, 400.0  # of later laps: scores up to several hundred
HARD = 5.0  # length of tokens that make attention hard, in natural lengths
HARDS = 1.5, 16.0
HARD_ANCHOR = 4.0  # and of their anchor, relative to them: a box may look at its length
ANCHORS = 1 / 8, 8.0  # lengths of the anchor relative to the other tokens, in later laps
CANDIDATES = 6  # of which the most telling is asked
SIZES = 0.25, 3.0  # natural lengths of plain tokens in later laps


@dataclass(frozen=True, eq=False)
class Fresh:
    """One query with the reason it is asked."""

    tokens: Float[Array, "length d"]
    reason: str


@dataclass(frozen=True, eq=False)
class Designer:
    """Draws queries of each kind for a model whose natural token length is known."""

    spec: Spec
    natural: float
    rng: np.random.Generator
    model: Any = None  # where given, some queries are chosen for what would show on them

    def stream(self, count: int) -> Iterator[Fresh]:
        """The first `count` queries of an endless round through the kinds."""
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
        return self._allowed(wanted)

    def _allowed(self, length: int) -> int:
        limit = self.spec.domain.max_length
        return length if limit is None else min(length, limit)

    def _between(self, bounds: tuple[float, float]) -> float:
        """A size drawn evenly over the decades between two."""
        low, high = np.log(bounds)
        return float(np.exp(self.rng.uniform(low, high)))

    def _size(self, first: float, later: tuple[float, float], lap: int) -> float:
        return self._between(later) if lap else first

    def _anchor(self, tokens: Array, lap: int, first: float = 1.0) -> Array:
        """The same tokens with a longer or shorter anchor."""
        if self.spec.domain.vocabulary is not None:
            return tokens
        factor = self._size(first, ANCHORS, lap)
        return self.spec.domain.drawn_in(np.concatenate([tokens[:-1], factor * tokens[-1:]]))

    def _tokens(self, length: int, size: float = 1.0) -> Array:
        """Random tokens inside the domain, of the given length in natural lengths."""
        domain, width = self.spec.domain, self.spec.width
        if domain.vocabulary is not None:
            chosen = self.rng.integers(len(domain.vocabulary), size=length)
            return np.array(domain.vocabulary[chosen], dtype=np.float64)
        tokens = size * self.natural * self.rng.standard_normal((length, width)) / np.sqrt(width)
        return self.spec.domain.drawn_in(tokens)

    def short(self, lap: int) -> Fresh:
        if lap and self.model is not None and can_tell(self.model):
            return self._telling()
        tokens = self._tokens(self._length(SHORT, lap), self._size(1.0, SIZES, lap))
        return Fresh(tokens, "a few random tokens")

    def _telling(self) -> Fresh:
        candidates = [
            self._anchor(self._tokens(self._length(SHORT, 1), self._between(SIZES)), 1)
            for _ in range(CANDIDATES)
        ]
        chosen = candidates[most_telling(self.model, candidates, self.rng)]
        return Fresh(chosen, "tokens on which a change of one parameter shows")

    def long(self, lap: int) -> Fresh:
        """Later laps: any length, each decade as likely, with an anchor of any length."""
        length = int(self._between((SHORT, LONGEST))) if lap else LONG
        tokens = self._tokens(self._allowed(length), self._size(1.0, SIZES, lap))
        return Fresh(self._anchor(tokens, lap), "a long sequence")

    def reordered(self, lap: int) -> Fresh:
        """Tokens in order of length, the anchor last: a box with positions cannot know them."""
        tokens = self._tokens(self._length(3 * SHORT, lap))
        order = np.argsort(np.linalg.norm(tokens[:-1], axis=1))[::-1]
        return Fresh(np.concatenate([tokens[:-1][order], tokens[-1:]]), "tokens sorted by length")

    def shifted(self, lap: int) -> Fresh:
        tokens = self._tokens(self._length(SHORT, lap))
        if self.spec.domain.vocabulary is None:
            shift = self._tokens(1, self._size(SHIFT, SHIFTS, lap))
            tokens = self.spec.domain.drawn_in(np.concatenate([tokens[:-1] + shift, tokens[-1:]]))
        return Fresh(tokens, "tokens with a large common part: near ties of large scores")

    def hard(self, lap: int) -> Fresh:
        tokens = self._tokens(self._length(2 * SHORT, lap), self._size(HARD, HARDS, lap))
        return Fresh(self._anchor(tokens, lap, HARD_ANCHOR), "long tokens")

    def repeated(self, lap: int) -> Fresh:
        length = self._length(2 * SHORT, lap)
        few = self._tokens(min(3, length))
        return Fresh(few[self.rng.integers(len(few), size=length)], "repeated tokens")
