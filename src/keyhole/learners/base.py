"""What every learner is, what it returns, and how it tries one strategy after the other.

A learner is a frozen configuration with `learn(oracle, rng)`. A strategy inside it returns a
`Hypothesis`, `Refuted` or `Inconclusive`; exceptions leave a learner only at its border.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np

from keyhole.errors import Counterexample, IllConditioned, InvalidArgument, WrongFamily
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel

USELESS = 0.1  # standard errors beyond this fraction of a parameter block tell nothing of it


@dataclass(frozen=True, eq=False, kw_only=True)
class Diagnostics:
    """What a learner found out beside the model; each learner has a subclass with its fields."""

    def as_dict(self) -> dict[str, Any]:
        """The fields by their names, for reports and files; those that are None are left out."""
        named = ((part.name, getattr(self, part.name)) for part in fields(self))
        return {name: value for name, value in named if value is not None}


@dataclass(frozen=True)
class Attempt:
    """A strategy that was tried before the one that led to the hypothesis, and how it ended."""

    strategy: str
    ending: str

    @property
    def sentence(self) -> str:
        return f"Tried before: {self.strategy} ({self.ending.rstrip('.')})."


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """The model, standard errors in the model's own structure, and what to know about them."""

    model: Any
    errors: Any
    floor: float  # unknowns per number in an answer
    notes: tuple[str, ...] = ()  # sentences for the reader
    details: Mapping[str, Any] = field(default_factory=dict)  # of a foreign learner, for the report
    noise: NoiseModel | None = None  # of the box, as measured on the way
    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    tried: tuple[Attempt, ...] = ()  # strategies that failed before this one
    shortfall: str = ""  # why the model, which is the best that was reached, is no recovery
    refutes: bool = True  # False: answers that contradict the model say nothing about the box

    def report_details(self) -> dict[str, Any]:
        """All that the report shows beside the model."""
        return {**self.diagnostics.as_dict(), **self.details}

    def report_notes(self) -> tuple[str, ...]:
        """The notes, and a sentence for every strategy that was tried before."""
        return (*self.notes, *(attempt.sentence for attempt in self.tried))


@dataclass(frozen=True, eq=False)
class Refuted:
    """The box is no member of the family that the strategy assumes."""

    reason: str
    counterexample: Counterexample | None = None
    conclusive: bool = True  # False: one hypothesis was refuted, another of the family may hold
    stated: bool = False  # the caller stated what is not so: that needs no counterexample
    searched: bool = False  # by a search, which may have ended in a wrong place


@dataclass(frozen=True, eq=False)
class Inconclusive:
    """The strategy came to no hypothesis; the box may still be a member of the family."""

    reason: str


Result = Hypothesis | Refuted | Inconclusive


def run_strategies(strategies: Iterable[tuple[str, Callable[[], Result]]]) -> Hypothesis:
    """The first hypothesis, which says what was tried before it and why that failed.

    Where no strategy has one: WrongFamily if an answer contradicts the family, or if every strategy
    came to a hypothesis that answers contradict; else IllConditioned.
    """
    tried: list[Attempt] = []
    refutations: list[Refuted] = []
    for name, strategy in strategies:
        result = strategy()
        if isinstance(result, Hypothesis):
            return replace(result, tried=(*tried, *result.tried))
        if isinstance(result, Refuted):
            refutations.append(result)
        tried.append(Attempt(name, result.reason))
    conclusive = [each for each in refutations if each.conclusive]
    if refutations and (conclusive or len(refutations) == len(tried)):
        first = (conclusive or refutations)[0]
        searched = first.searched or not conclusive
        raise WrongFamily(
            first.reason, first.counterexample, stated=first.stated, searched=searched
        )
    if len(tried) == 1:
        raise IllConditioned(tried[0].ending)
    raise IllConditioned("; ".join(f"{each.strategy}: {each.ending}" for each in tried))


@runtime_checkable
class Learner(Protocol):
    """Anything that turns an oracle into a hypothesis. It sees `oracle.ask` and nothing else."""

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis: ...

    def expected_queries(self, spec: Spec) -> int | None:
        """A forecast for the progress bar and the plan; None where it cannot be known."""
        ...


def at_most_the_width(rank: int | None, width: int) -> None:
    """Refuses a rank that no score of this width has."""
    if rank is not None and rank > width:
        raise InvalidArgument(f"rank must be at most the width {width}, got {rank}")
