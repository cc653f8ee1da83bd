"""Everything Keyhole raises on purpose, one tree.

Each message says what was wrong, what was expected and what to do. An error raised by
`keyhole.recover` carries the unfinished `recovery`: what was learned before it stopped. What a
message quotes of a box or a file is cleaned (`keyhole.text`).
"""

from dataclasses import dataclass
from typing import Any

from keyhole.text import clean_all


@dataclass(frozen=True, eq=False)
class Counterexample:
    """A query on which box and model differ, or on which the box differs from itself.

    Attributes:
        input: Its tokens, (length, width).
        box_answer: Of the box.
        model_answer: Of the model, or the box's own earlier one.
        reason: What kind of query it is.
    """

    input: Any
    box_answer: Any
    model_answer: Any
    reason: str = ""


class KeyholeError(Exception):
    """Root of all errors that Keyhole raises on purpose."""

    recovery: Any = None  # the Recovery at the moment of the error, set by recover()
    findings: tuple[str, ...] = ()  # what was found out about the box before, in sentences
    family: str | None = None  # what the box was taken for, where that was decided

    def __init__(self, *parts: Any) -> None:
        super().__init__(*(clean_all(part) for part in parts))


class InvalidArgument(KeyholeError, ValueError):
    """An argument of a public call does not make sense."""


class NotFinite(InvalidArgument):
    """An array that must hold numbers holds NaN or infinity."""


class ImpossibleModel(InvalidArgument):
    """Parameters that no model has, as a norm with a negative epsilon."""


class DomainError(KeyholeError, ValueError):
    """A query would leave the domain the oracle declared (norm, box, vocabulary, length)."""


class OracleError(KeyholeError):
    """The box failed: it raised, or answered with the wrong shape, kind or number of answers."""


class Inconsistent(OracleError):
    """The box answered the same query differently than its stated precision allows."""

    def __init__(self, message: str, counterexample: Counterexample | None = None) -> None:
        super().__init__(message)
        self.counterexample = counterexample


class BudgetExhausted(KeyholeError):
    """The next query would exceed the budget. Nothing beyond it was asked."""


class NotIdentifiable(KeyholeError):
    """No number of queries can determine these parameters; the message says why."""


class IllConditioned(KeyholeError):
    """The answers do not determine the parameters to any useful accuracy."""

    @classmethod
    def after(cls, broken: Exception) -> "IllConditioned":
        """Where a division by zero or a factorisation that fails ended the run."""
        error = cls(
            f"the arithmetic broke down ({type(broken).__name__}: {broken}), as it does where "
            "numbers are very large or very small: scale tokens and answers to about one"
        )
        error.__cause__ = broken
        return error


class WrongFamily(KeyholeError):
    """The box is not a member of the model class the learner assumes.

    A run ends REJECTED for it only with a counterexample, or where what the caller stated of the
    box is not so; else no answer contradicts the class, and the run ends ILL_CONDITIONED.
    """

    certain: bool = False  # two answers of the box contradict each other, whatever was learned

    def __init__(
        self,
        message: str,
        counterexample: Counterexample | None = None,
        *,
        stated: bool = False,
        searched: bool = False,
    ) -> None:
        super().__init__(message)
        self.counterexample = counterexample
        self.stated = stated  # the caller stated what is not so, a number of neurons for example
        self.searched = searched  # models that were searched for were refuted: others may hold


class Unsupported(KeyholeError):
    """The box was recognised, and there is no learner for it, or none at this size or precision.

    The message says what the box looks like, what is missing and what can be opened instead;
    `findings` hold what was found out.
    """


class JournalError(KeyholeError):
    """The journal cannot be read or written (full disk, read-only folder, another process)."""


class JournalMismatch(JournalError):
    """The journal belongs to another box, learner or seed."""


class FileFormatError(KeyholeError):
    """A model file is truncated, of the wrong kind, or claims impossible things."""


class MissingExtra(KeyholeError, ImportError):
    """An optional dependency is needed; the message holds the command that installs it."""


class Interrupted(KeyholeError):
    """The user asked to stop. The journal, if any, holds everything that was paid for."""
