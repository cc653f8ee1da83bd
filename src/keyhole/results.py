"""What a recovery returns: outcome, model, errors, verdict and ledger. All frozen."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from keyhole.errors import Counterexample


class Outcome(enum.Enum):
    """How a recovery ended; the value is the advice shown to the user."""

    RECOVERED = "The model agrees with the box on every question, within the box's precision."
    REJECTED = (
        "The box is not a member of the assumed family: see the counterexample. Try another "
        "learner, or accept that the box is something else."
    )
    NOT_IDENTIFIABLE = "No number of questions can determine these parameters. The reason is given."
    BUDGET_EXHAUSTED = (
        "The budget was spent before the parameters were determined. Raise it, and pass the same "
        "journal to continue without paying twice."
    )
    ILL_CONDITIONED = (
        "The answers determine some parameters too weakly to be trusted. Read the error bars; a "
        "more precise box, a wider domain or more questions would help."
    )
    UNVERIFIED = "A model was fitted but not compared with fresh answers (verify=False)."
    ORACLE_FAILED = (
        "The box failed to answer. What was paid for is in the journal, if there is one."
    )
    INTERRUPTED = "Stopped on request. Run again with the same journal to continue."

    def __repr__(self) -> str:
        return f"Outcome.{self.name}"


@dataclass(frozen=True)
class Ledger:
    """Questions the box was paid for, by purpose, and the floor (the number of unknowns per
    number in an answer)."""

    by_purpose: Mapping[str, int] = field(default_factory=dict)
    floor: float | None = None
    replayed: int = 0  # of these, answered from the journal of an earlier run

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_purpose", MappingProxyType(dict(self.by_purpose)))

    @property
    def paid(self) -> int:
        return sum(self.by_purpose.values())


@dataclass(frozen=True, eq=False)
class Verdict:
    """Agreement with its bound, or a counterexample. Agreement is not equality: `bound` says in
    words what the agreements allow one to claim."""

    agrees: bool
    queries: int  # fresh questions asked
    replayed: int  # answers paid for during learning, compared for free
    worst: float  # largest deviation seen, in units of the tolerance (agreement: at most 1)
    tolerance: float  # allowed deviation relative to the scale of the answers
    bound: str
    counterexample: Counterexample | None = None


@dataclass(frozen=True, eq=False)
class Recovery:
    """Everything a recovery found out."""

    outcome: Outcome
    model: Any
    errors: Any
    verdict: Verdict | None
    ledger: Ledger
    reason: str = ""
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "details", MappingProxyType(dict(self.details)))
