"""Boxes that are asked rows: sequences of different lengths, travelling together in one request.

A row is an array of token numbers, a text, or an array of vectors (length, width). What is asked
together matters to embedding servers (padding, masks, batches), so that `ask` sends what it is
given as one request, and nothing is regrouped behind the caller's back.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array, Int
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import VERIFICATION, QueryBatch

NUMBERS, TEXT, VECTORS = "numbers", "text", "vectors"

Row = Any  # str | Int[Array, " length"] | Float[Array, "length width"]


@dataclass(frozen=True)
class RowSpec:
    """What is known about a box of rows before it is asked anything."""

    takes: tuple[str, ...]  # of NUMBERS, TEXT, VECTORS, the preferred first
    identity: str = "box"
    tokens: int | None = None  # size of the vocabulary
    max_length: int | None = None  # tokens of the longest row
    width: int | None = None  # of vectors


class RowBox(ABC):
    """A box that answers rows with one vector each."""

    spec: RowSpec

    @abstractmethod
    def ask(self, rows: Sequence[Row]) -> Array:
        """The answers (rows, outputs) to rows that are asked together, in one request."""

    @property
    def opening_queries(self) -> int:
        """Rows that were asked when it was opened, to find out what it takes."""
        return 0

    def close(self) -> None:  # noqa: B027 - most boxes hold nothing
        """Lets go of files and connections."""

    def __enter__(self) -> "RowBox":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def kind_of_row(row: Row) -> str:
    """Which of NUMBERS, TEXT, VECTORS a row is.

    >>> kind_of_row("a text"), kind_of_row([3, 1, 2]), kind_of_row(np.zeros((2, 5)))
    ('text', 'numbers', 'vectors')
    """
    if isinstance(row, str):
        return TEXT
    array = np.asarray(row)
    if array.ndim == 1 and array.dtype.kind in "iu" and array.size:
        return NUMBERS
    if array.ndim == 2 and array.dtype.kind in "fiu" and array.size:
        return VECTORS
    raise InvalidArgument(
        "a row is a text, an array of token numbers or an array of vectors (length, width), got "
        f"an array of shape {array.shape} and type {array.dtype}"
    )


def pad_rows(rows: Sequence[Row], padding: int = 0) -> tuple[Int[Array, "n m"], Int[Array, "n m"]]:
    """Rows of token numbers as one array padded at the end, and the mask: 1 for a token."""
    longest = max(len(row) for row in rows)
    tokens = np.full((len(rows), longest), padding, dtype=np.int64)
    mask = np.zeros_like(tokens)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = row
        mask[place, : len(row)] = 1
    return tokens, mask


def check_row_answers(answers: Any, count: int, who: str) -> Array:
    """Answers as finite numbers (count, outputs), or an OracleError that says what is wrong."""
    array = np.asarray(answers)
    if array.dtype.kind not in "fiu":
        raise OracleError(f"{who} answered with dtype {array.dtype}; real numbers are needed")
    array = array[:, None] if array.ndim == 1 else array
    if array.ndim != 2 or len(array) != count or not array.shape[1]:
        raise OracleError(
            f"{who} answered {count} rows with an array of shape {array.shape}; expected "
            f"({count}, outputs)"
        )
    if not np.isfinite(array).all():
        raise OracleError(f"{who} answered with a number that is not finite")
    return array


class CallableRows(RowBox):
    """A function (tokens, attention_mask) -> (batch, outputs) on token numbers padded at the end.
    One that takes no mask is asked rows of one length at a time."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        tokens: int | None = None,
        max_length: int | None = None,
        padding: int = 0,
        identity: str | None = None,
    ) -> None:
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        self.function, self.padding = function, padding
        self.masked = takes_mask(function)
        self.spec = RowSpec((NUMBERS,), identity or name, tokens, max_length)

    def ask(self, rows: Sequence[Row]) -> Array:
        if self.masked:
            tokens, mask = pad_rows(rows, self.padding)
            answers = self._call(tokens, attention_mask=mask)
            return check_row_answers(answers, len(rows), self.spec.identity)
        return ask_by_length(rows, self._ask_equal)

    def _ask_equal(self, rows: Sequence[Row]) -> Array:
        answers = self._call(np.stack([np.asarray(row, dtype=np.int64) for row in rows]))
        return check_row_answers(answers, len(rows), self.spec.identity)

    def _call(self, tokens: Array, **mask: Array) -> Array:
        try:
            return np.asarray(self.function(tokens, **mask))
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except Exception as error:
            raise OracleError(
                f"{self.spec.identity} raised {type(error).__name__} on token numbers of shape "
                f"{tokens.shape}: {str(error).strip()[:500] or 'without a word'}"
            ) from error


def takes_mask(function: Callable[..., Any]) -> bool:
    """Whether a function has an argument attention_mask (or takes any)."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.name == "attention_mask" or p.kind is p.VAR_KEYWORD for p in parameters)


class OracleRows(RowBox):
    """An oracle of vectors, or of token numbers, as a box of rows. Rows of one length that are
    asked together go to it as one batch."""

    def __init__(self, oracle: Oracle, purpose: str = VERIFICATION) -> None:
        self.oracle, self.purpose = oracle, purpose
        domain = oracle.spec.domain
        kind = VECTORS if domain.tokens is None else NUMBERS
        self.spec = RowSpec(
            (kind,), oracle.spec.identity, domain.tokens, domain.max_length, oracle.spec.width
        )

    def ask(self, rows: Sequence[Row]) -> Array:
        return ask_by_length(rows, self._ask_equal)

    def _ask_equal(self, rows: Sequence[Row]) -> Array:
        tokens = np.stack([np.asarray(row, dtype=np.float64) for row in rows])
        tokens = tokens[:, :, None] if tokens.ndim == 2 else tokens
        answers = self.oracle.ask(QueryBatch.of(tokens, self.purpose))
        return check_row_answers(answers, len(rows), self.spec.identity)

    @property
    def opening_queries(self) -> int:
        return self.oracle.opening_queries

    def close(self) -> None:
        self.oracle.close()


def ask_by_length(rows: Sequence[Row], ask: Callable[[Sequence[Row]], Array]) -> Array:
    """The answers where only rows of one length can be asked together, in the order of rows."""
    lengths = np.array([len(row) for row in rows])
    answers: Array | None = None
    for length in dict.fromkeys(lengths.tolist()):
        places = np.flatnonzero(lengths == length)
        part = ask([rows[int(place)] for place in places])
        if answers is None:
            answers = np.zeros((len(rows), part.shape[1]), dtype=part.dtype)
        if part.shape[1] != answers.shape[1]:
            raise OracleError(
                f"the box answers with {answers.shape[1]} numbers at one length and with "
                f"{part.shape[1]} at another"
            )
        answers[places] = part
    if answers is None:
        raise InvalidArgument("no rows to ask")
    return answers
