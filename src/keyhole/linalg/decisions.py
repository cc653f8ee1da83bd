"""How many decisions a computation took, and how close the closest one was.

A decision compares an estimate with a border. Its margin is the ratio (at least one) by which the
estimate lies above or below that border: near one it was a hair's breadth. Whoever decides calls
`note_decision`; whoever wants to know listens (`record_decisions`). Nobody listening costs nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array


@dataclass(frozen=True)
class Decision:
    """What was asked, what was decided, and how far the estimate was from the border, as a ratio
    of at least one."""

    question: str
    answer: int | bool
    margin: float

    def __str__(self) -> str:
        return f"{self.question}: {self.answer}, by a factor of {self.margin:.3g}"


@dataclass
class Tally:
    """Decisions so far: how many, and the one with the smallest margin. `note_decision` alone
    writes into it."""

    count: int = 0
    closest: Decision | None = None

    def add(self, decision: Decision) -> None:
        self.count += 1
        if self.closest is None or decision.margin < self.closest.margin:
            self.closest = decision


_LISTENERS: ContextVar[tuple[Tally, ...]] = ContextVar("decisions", default=())


@contextmanager
def record_decisions() -> Iterator[Tally]:
    """Counts the decisions that are taken inside.

    >>> with record_decisions() as tally:
    ...     note_decision("number of heads", 2, 7.5)
    >>> tally.count, str(tally.closest)
    (1, 'number of heads: 2, by a factor of 7.5')
    """
    tally = Tally()
    token = _LISTENERS.set((*_LISTENERS.get(), tally))
    try:
        yield tally
    finally:
        _LISTENERS.reset(token)


def note_decision(question: str, answer: int | bool, margin: float) -> None:
    """Reports a decision to everybody who listens.

    Args:
        question: What was decided, in the field's words.
        answer: What it came to.
        margin: Ratio of the estimate to the border, or its inverse: the larger of the two.
    """
    for tally in _LISTENERS.get():
        tally.add(Decision(question, answer, margin))


def margin_of(sizes: Array | float, border: Array | float) -> float:
    """The ratio, at least one, by which the nearest of these sizes lies above or below its border;
    infinite where there is nothing to compare."""
    ratios = np.log(np.maximum(np.abs(sizes), TINY)) - np.log(np.maximum(border, TINY))
    nearest = float(np.min(np.abs(ratios), initial=np.inf))
    return float(np.exp(min(nearest, np.log(np.finfo(float).max))))
