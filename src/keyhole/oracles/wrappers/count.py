"""The one counter: how many queries the box was paid for, by purpose, with a hard budget.

A query that must be sent again because a connection or an endpoint failed is paid for once, and
counted apart: what a run plans must not depend on the weather. So that a budget limits what is sent
all the same, no more queries are sent again than the budget has, and the box never sees more than
twice the budget.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import BudgetExhausted, DomainError, InvalidArgument
from keyhole.oracles.base import Domain, Oracle, Wrapper
from keyhole.oracles.http.retry import Repeats
from keyhole.oracles.queries import QueryBatch

OPENING = "opening"  # what was asked before the run, to find out what the box is


def senders(oracle: Any) -> Iterator[Any]:
    """Whatever sends queries again inside an oracle: endpoints, and replicas that take over."""
    if hasattr(oracle, "repeats"):
        yield oracle
    inside = [getattr(oracle, name, None) for name in ("inner", "endpoint")]
    for part in (*inside, *getattr(oracle, "members", ())):
        if part is not None:
            yield from senders(part)


def count_prompt_tokens(queries: QueryBatch, domain: Domain) -> int:
    """Tokens in the prompts of a language model; biases are none."""
    if domain.tokens is None:
        return 0
    if domain.bias is None:
        return len(queries) * queries.length
    return int(np.sum(queries.tokens()[:, :, 1] == 0.0))


@dataclass(frozen=True)
class Forecast:
    """Queries of a whole run, verification apart: expected, and at most; None where unknown."""

    expected: int | None
    at_most: int | None = None


class QueryCounter(Wrapper):
    """Counts every query on its way to the box; refuses the first that exceeds the budget."""

    def __init__(
        self,
        inner: Oracle,
        budget: int | None = None,
        listener: Callable[[str, int], None] | None = None,
        opening: Callable[[str, int], None] | None = None,
    ) -> None:
        self.inner = inner
        self.budget = budget
        self.listener = listener  # told purpose and queries paid for, after each batch
        self.opening = opening  # told purpose and size of a batch before it goes out
        self.noting: Callable[[str], None] | None = None  # told what a learner computes
        self.by_purpose = +Counter({OPENING: inner.opening_queries})  # no purpose without queries
        self.prompt_tokens = inner.opening_queries  # of a language model, in all prompts
        self.forecast: Forecast | None = None  # what the learner said last
        self.outputs = inner.spec.outputs  # numbers in an answer, known after the first
        self.repeats = Repeats(budget)
        self._senders = [(sender, sender.repeats) for sender in senders(inner)]
        for sender, _ in self._senders:
            sender.repeats = self.repeats

    def release(self) -> None:
        """Lets the box send again as it did before."""
        for sender, before in self._senders:
            sender.repeats = before

    def expect(self, queries: int | None, at_most: int | None = None) -> None:
        ends = (None if more is None else self.paid + more for more in (queries, at_most))
        self.forecast = Forecast(*ends)

    def note(self, words: str) -> None:
        if self.noting is not None:
            self.noting(words)

    @property
    def paid(self) -> int:
        return sum(self.by_purpose.values())

    @property
    def remaining(self) -> int | None:
        return None if self.budget is None else self.budget - self.paid

    def ask(self, queries: QueryBatch) -> Array:
        count = len(queries)
        if self.budget is not None and self.paid + count > self.budget:
            raise BudgetExhausted(
                f"the next {count} queries ({queries.purpose}) would exceed the budget of "
                f"{self.budget}; {self.paid} were asked. Raise budget=, and pass the same "
                "journal= to continue without paying twice (a learner that plans with its budget, "
                "as for noise in a bounded domain, needs another journal)"
            )
        if self.opening is not None:
            self.opening(queries.purpose, count)
        self.by_purpose[queries.purpose] += count
        try:
            answers = self.inner.ask(queries)
        except (DomainError, InvalidArgument):  # the border let none of them out to the box
            self.by_purpose[queries.purpose] -= count
            self.by_purpose += Counter()  # drops a purpose without queries
            raise
        if self.outputs is None:
            self.outputs = 1 if answers.ndim == 1 else int(answers.shape[1])
        self.prompt_tokens += count_prompt_tokens(queries, self.spec.domain)
        if self.listener is not None:
            self.listener(queries.purpose, self.paid)
        return answers
