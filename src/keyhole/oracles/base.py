"""The black box as the rest of the project sees it: a spec, and one method that asks a batch.

To connect a new kind of box, subclass `Oracle`: describe it in `spec`, answer in `ask`. Checks,
counting, budget, chunks and the journal are wrappers that any oracle gets for free.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from keyhole.arrays import (
    TINY,
    Array,
    Float,
    finite_array,
    frozen,
    real_number,
    whole_number,
)
from keyhole.errors import DomainError, InvalidArgument
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

ANSWERS = ("logits", "logprobs", "top_k", "labels")  # of language models

INSIDE = 1.0 - 1e-12  # rounding must not take a token out of its domain


@dataclass(frozen=True)
class Domain:
    """What the box accepts. Where nothing is stated, anything.

    Args:
        max_length: Tokens in a sequence, at most.
        max_norm: Euclidean norm of a token, at most.
        low: Smallest entry of a token.
        high: Largest entry of a token.
        vocabulary: The only tokens that are accepted, a row each.
        sphere: The one norm that all tokens have (a box behind a norm sees them so).
        tokens: Size of a language model's vocabulary: a token is then a vector of width 1 whose
            only entry is its number, and the vocabulary is made of these.
        bias: Where an interface also takes a bias on tokens, the largest: a query then holds
            vectors of width 2, the tokens of the prompt as (number, 0), biases behind.
    """

    max_length: int | None = None
    max_norm: float | None = None
    low: float | None = None
    high: float | None = None
    vocabulary: Float[Array, "m d"] | None = field(default=None, compare=False)
    sphere: float | None = None
    tokens: int | None = None
    bias: float | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None:
            longest = whole_number("max_length", self.max_length, 1)
            object.__setattr__(self, "max_length", longest)
        if self.max_norm is not None:
            real_number("max_norm", self.max_norm, 0.0)
        for name in ("low", "high"):
            if getattr(self, name) is not None:
                real_number(name, getattr(self, name))
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise InvalidArgument(f"low must be below high, got {self.low} and {self.high}")
        if self.sphere is not None:
            real_number("sphere", self.sphere, 0.0)
            others = (self.max_norm, self.low, self.high, self.vocabulary, self.tokens)
            if any(other is not None for other in others):
                raise InvalidArgument(
                    "sphere already says which tokens are accepted; leave out max_norm, low, high "
                    "and vocabulary"
                )
        if self.tokens is not None:
            self._number_tokens()
        if self.vocabulary is not None:
            table = frozen(finite_array("vocabulary", self.vocabulary, ndim=2))
            object.__setattr__(self, "vocabulary", table)

    def _number_tokens(self) -> None:
        """The vocabulary of a language model: the numbers of its tokens."""
        count = whole_number("tokens", self.tokens, 2)
        numbers = np.arange(count, dtype=np.float64)[:, None]
        others = (self.max_norm, self.low, self.high)
        same = self.vocabulary is None or np.array_equal(self.vocabulary, numbers)
        if not same or any(other is not None for other in others):
            raise InvalidArgument(
                "tokens already says that tokens are numbers, and how many there are; leave out "
                "max_norm, low, high, sphere and vocabulary"
            )
        object.__setattr__(self, "tokens", count)
        if self.bias is None:
            object.__setattr__(self, "vocabulary", numbers)

    def accepts_the_same_as(self, other: "Domain") -> bool:
        return self == other and (self.tokens is not None or self._words == other._words)

    @property
    def unbounded(self) -> bool:
        """Whether tokens may be any vectors (the length may still be limited)."""
        return (
            self.max_norm is None
            and self.low is None
            and self.high is None
            and self.sphere is None
            and self.vocabulary is None
            and self.tokens is None
        )

    @property
    def radius(self) -> float:
        """Every token up to this norm is accepted (the vocabulary apart)."""
        if self.sphere is not None or self.tokens is not None:
            return 0.0
        low = np.inf if self.low is None else -self.low
        high = np.inf if self.high is None else self.high
        norm = np.inf if self.max_norm is None else self.max_norm
        return float(max(0.0, min(low, high, norm)))

    def drawn_in(self, tokens: Float[Array, "*shape d"]) -> Float[Array, "*shape d"]:
        """Every token drawn towards the one nearest to zero until entries and norm are allowed
        (the vocabulary apart); on a sphere, moved to it."""
        if self.sphere is not None:
            tokens = np.where((tokens == 0).all(axis=-1, keepdims=True), 1.0, tokens)
            norms = np.linalg.norm(tokens, axis=-1, keepdims=True)
            return np.asarray(tokens * (self.sphere / norms))
        if self.max_norm is None and self.low is None and self.high is None:
            return tokens
        low = -np.inf if self.low is None else self.low
        high = np.inf if self.high is None else self.high
        tokens = np.clip(tokens, low, high)
        if self.max_norm is None:
            return tokens
        corner = np.full(tokens.shape[-1], np.clip(0.0, low, high))
        room = self.max_norm**2 - float(corner @ corner)
        if room <= 0:
            raise DomainError(
                f"no token has entries in [{low}, {high}] and a norm of at most {self.max_norm}"
            )
        steps = tokens - corner
        square = np.maximum(np.sum(steps**2, axis=-1), TINY)
        along = steps @ corner
        furthest = (-along + np.sqrt(along**2 + square * room)) / square
        reach = np.minimum(1.0, INSIDE * furthest)
        return np.asarray(corner + steps * reach[..., None])

    def check(self, tokens: Float[Array, "n length d"]) -> None:
        """Raises DomainError if a token or the length lies outside."""
        self._check_length(tokens)
        if not np.isfinite(tokens).all():
            raise DomainError("a token holds NaN or infinity")
        self._check_norms(tokens)
        self._check_entries(tokens)
        self._check_words(tokens)

    def _check_length(self, tokens: Float[Array, "n length d"]) -> None:
        if self.max_length is None:
            return
        length = tokens.shape[1]
        if self.bias is not None:
            length = int(np.max(np.sum(tokens[:, :, 1] == 0, axis=1), initial=0))
        if length > self.max_length:
            raise DomainError(f"a query of length {length} exceeds max_length={self.max_length}")

    def _check_norms(self, tokens: Float[Array, "n length d"]) -> None:
        if self.sphere is not None:
            off = np.abs(np.sqrt(np.einsum("nld,nld->nl", tokens, tokens)) / self.sphere - 1.0)
            if off.max(initial=0.0) > 1e-6:  # tokens may be numbers of single precision
                raise DomainError(
                    f"a token's norm differs from sphere={self.sphere} by {off.max():.1e} of it"
                )
        if self.max_norm is not None:
            worst = float(np.sqrt(np.einsum("nld,nld->nl", tokens, tokens).max(initial=0.0)))
            if worst > self.max_norm * (1 + 1e-9):  # what is less is rounding
                raise DomainError(f"a token of norm {worst:.6g} exceeds max_norm={self.max_norm}")

    def _check_entries(self, tokens: Float[Array, "n length d"]) -> None:
        if self.low is not None and tokens.min(initial=np.inf) < self.low:
            raise DomainError(f"a token entry {tokens.min():.6g} lies below low={self.low}")
        if self.high is not None and tokens.max(initial=-np.inf) > self.high:
            raise DomainError(f"a token entry {tokens.max():.6g} lies above high={self.high}")
        if self.bias is not None and np.abs(tokens[:, :, 1]).max(initial=0.0) > self.bias:
            raise DomainError(f"a bias on a token exceeds {self.bias:g}")

    def _check_words(self, tokens: Float[Array, "n length d"]) -> None:
        if self.tokens is not None:
            numbers = tokens[:, :, 0]
            numbered = (numbers == np.rint(numbers)) & (numbers >= 0) & (numbers < self.tokens)
            if not numbered.all():
                odd = numbers[~numbered][0]
                raise DomainError(
                    f"a token has the number {odd:g}; the vocabulary has the whole numbers 0 … "
                    f"{self.tokens - 1}"
                )
        elif self.vocabulary is not None:
            for row in np.unique(tokens.reshape(-1, tokens.shape[2]).astype(np.float64), axis=0):
                if (row + 0.0).tobytes() not in self._words:
                    raise DomainError("a token is not in the declared vocabulary")

    @cached_property
    def _words(self) -> frozenset[bytes]:
        """The vocabulary's tokens as bytes; adding zero makes the two zeros one."""
        table = np.zeros((0, 0)) if self.vocabulary is None else self.vocabulary
        return frozenset((row + 0.0).tobytes() for row in table.astype(np.float64))


@dataclass(frozen=True)
class Spec:
    """What is known about a box before asking it anything.

    Args:
        width: Numbers in a token.
        outputs: Numbers in an answer, where the box tells.
        domain: What it accepts.
        precision: How exact its answers are; None where that is to be measured.
        identity: Names the box in reports, and keeps journals of two boxes apart.
        answers: What a language model answers with, one of ANSWERS.
    """

    width: int
    outputs: int | None = None
    domain: Domain = Domain()
    precision: NoiseModel | None = None
    identity: str = "box"
    answers: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "width", whole_number("width", self.width, 1))
        if self.outputs is not None:
            object.__setattr__(self, "outputs", whole_number("outputs", self.outputs, 1))
        if not isinstance(self.precision, NoiseModel | None):
            raise InvalidArgument(
                f"precision must be a NoiseModel, as in NoiseModel(additive=1e-3), got "
                f"{self.precision!r}"
            )
        if self.answers not in (None, *ANSWERS):
            raise InvalidArgument(f"answers must be one of {ANSWERS}, got {self.answers!r}")
        words = self.domain.vocabulary
        if words is not None and words.shape[1] != self.width:
            raise InvalidArgument(
                f"the vocabulary's tokens have width {words.shape[1]}, the box {self.width}"
            )


class Oracle(ABC):
    """A box that answers queries. `ask` returns (n,) for scalar and (n, D) for vector boxes.

    Attributes:
        spec: What is known of it before it is asked.
    """

    spec: Spec

    @abstractmethod
    def ask(self, queries: QueryBatch) -> Array:
        """One answer per query, in their order."""

    @property
    def remaining(self) -> int | None:
        """Queries left in the budget; None where there is no budget."""
        return None

    @property
    def opening_queries(self) -> int:
        """Queries that were asked when it was opened, to find out what it is."""
        return 0

    @property
    def opening_replayed(self) -> int:
        """Of these, answered from the record of an earlier opening."""
        return 0

    def expect(self, queries: int | None, at_most: int | None = None) -> None:  # noqa: B027
        """Told by a learner that so many queries are still to come, as far as it knows (None: it
        does not), and never more than `at_most`. For the progress bar: nothing depends on it."""

    def note(self, words: str) -> None:  # noqa: B027
        """Told by a learner what it has reached where it computes for long between queries. For
        the progress bar: nothing depends on it."""

    def close(self) -> None:  # noqa: B027 - most boxes hold nothing
        """Lets go of files and connections. Asking afterwards is an error."""

    def __enter__(self) -> "Oracle":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Wrapper(Oracle):
    """An oracle around another: the same box, seen through something."""

    inner: Oracle

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return self.inner.spec

    @property
    def remaining(self) -> int | None:
        return self.inner.remaining

    @property
    def opening_queries(self) -> int:
        return self.inner.opening_queries

    @property
    def opening_replayed(self) -> int:
        return self.inner.opening_replayed

    def expect(self, queries: int | None, at_most: int | None = None) -> None:
        self.inner.expect(queries, at_most)

    def note(self, words: str) -> None:
        self.inner.note(words)

    def close(self) -> None:
        self.inner.close()
