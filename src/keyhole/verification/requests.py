"""Fresh rows for boxes that take token numbers or texts, and which of them travel together.

Kinds. A server does things to a batch that it does not do to a row alone: it pads, masks, sorts,
cuts. So rows are asked alone, beside a longer one, in a batch of one length (where some servers
leave the mask out), and many of different lengths together; short ones, single tokens, one of the
longest length, one token again and again. Texts add what tokenizers differ in: capitals, accents,
other scripts, digits, punctuation, white space.

Everything is drawn from the generator: the same seed asks the same rows.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count as count_up

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.oracles.rows import Row

ALONE_SHORT, ALONE, BESIDE, EQUAL, MANY, AGAIN = (
    "a few tokens alone",
    "a row alone",
    "a row beside a longer one",
    "rows of one length together",
    "rows of different lengths together",
    "one token again and again",
)
LONGEST = 512  # tokens of the longest row, where a box that is longer is not asked for it

WORDS = re.findall(
    r"\w+",
    "the of and to in is for on that with as it was by are from at an be this which have not can "
    "model server answer question light water river stone winter morning paper number letter music "
    "machine energy market doctor window garden history science language memory colour mountain "
    "small large early late open closed quick slow bright dark simple careful public private every "
    "runs finds keeps writes carries moves reads builds measures returns between under after",
)
ODD = (
    "Straße naïve café Øresund",
    "質問と回答",
    "Вопрос и ответ",
    "مرحبا بالعالم",
    "E = mc^2; x_1 >= 3.14159e-5",
    "https://host.example/a?b=c&d=%20",
    "tabs\tand\n\nnew lines   and   spaces",
    "DON'T SHOUT (please)!!!",
    "naïve vs. naïve",  # composed and decomposed
    "😀 and ½ and ﬁ",
)


@dataclass(frozen=True, eq=False)
class RowRequest:
    """Rows that are asked together, and why."""

    rows: tuple[Row, ...]
    reason: str


@dataclass(frozen=True, eq=False)
class RowDesigner:
    """Draws rows of token numbers, or texts."""

    rng: np.random.Generator
    tokens: int = 0  # size of the vocabulary; 0: texts
    longest: int = LONGEST
    reserved: frozenset[int] = frozenset()  # tokens that are not drawn

    def __post_init__(self) -> None:
        if self.tokens and self.tokens - len(self.reserved) < 2:
            raise InvalidArgument("a vocabulary of fewer than two ordinary tokens")

    def stream(self, rows: int) -> Iterator[RowRequest]:
        """Requests of `rows` rows in all, going round the kinds."""
        kinds: tuple[Callable[[int], RowRequest], ...] = (
            self.draw_short,
            self.draw_many,
            self.draw_alone,
            self.draw_equal,
            self.draw_again,
            self.draw_beside,
        )
        left = rows
        for number in count_up():
            lap, kind = divmod(number, len(kinds))
            request = kinds[kind](lap)
            kept = request.rows[:left]
            left -= len(kept)
            yield RowRequest(kept, request.reason)
            if not left:
                return

    def draw_length(self, low: int, high: int) -> int:
        """A number of tokens between two, each factor as likely."""
        low, high = min(low, self.longest), min(high, self.longest)
        return min(int(low * ((high + 1) / low) ** self.rng.random()), high)

    def draw_row(self, length: int) -> Row:
        """A row of ordinary tokens, or a text of about so many."""
        if self.tokens:
            return self._draw_numbers(length)
        return self._draw_text(length)

    def _draw_numbers(self, length: int) -> Array:
        ordinary = np.setdiff1d(np.arange(self.tokens), np.array(sorted(self.reserved), dtype=int))
        return ordinary[self.rng.integers(len(ordinary), size=length)]

    def _draw_text(self, length: int) -> str:
        # a word is two tokens at most in most vocabularies, and the frame of a row takes two
        words = [WORDS[k] for k in self.rng.integers(len(WORDS), size=max(1, (length - 2) // 2))]
        text = " ".join(words)
        form = int(self.rng.integers(4))
        if form == 0:
            return text.upper()
        return f"{text.capitalize()}{('.', '?', '')[form - 1]}"

    def draw_short(self, lap: int) -> RowRequest:
        length = 1 if lap == 0 else self.draw_length(1, 8)
        return RowRequest((self.draw_row(length),), ALONE_SHORT)

    def draw_alone(self, lap: int) -> RowRequest:
        length = self.longest if lap == 1 else self.draw_length(9, 128)
        return RowRequest((self.draw_row(length),), ALONE)

    def draw_beside(self, lap: int) -> RowRequest:
        short = self.draw_length(2, 24)
        longer = min(self.longest, short + self.draw_length(1, 64))
        return RowRequest((self.draw_row(short), self.draw_row(longer)), BESIDE)

    def draw_equal(self, lap: int) -> RowRequest:
        length = self.draw_length(3, 32)
        return RowRequest(tuple(self.draw_row(length) for _ in range(3)), EQUAL)

    def draw_many(self, lap: int) -> RowRequest:
        rows = [self.draw_row(self.draw_length(1, 48)) for _ in range(5)]
        if not self.tokens:
            rows[2] = ODD[int(self.rng.integers(len(ODD)))]
        return RowRequest(tuple(rows), MANY)

    def draw_again(self, lap: int) -> RowRequest:
        length = self.draw_length(4, 40)
        if not self.tokens:
            word = WORDS[int(self.rng.integers(len(WORDS)))]
            return RowRequest((" ".join([word] * max(1, length // 2)),), AGAIN)
        return RowRequest((np.repeat(self._draw_numbers(1), length),), AGAIN)
