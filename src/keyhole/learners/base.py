"""What every learner is: a frozen configuration with `learn(oracle, rng)`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from keyhole.errors import InvalidArgument
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel


@dataclass(frozen=True, eq=False)
class Hypothesis:
    """A hypothesis: the model, standard errors in the model's own structure, and what to know."""

    model: Any
    errors: Any
    floor: float  # unknowns per number in an answer
    notes: tuple[str, ...] = ()  # sentences for the reader
    details: Mapping[str, Any] = field(default_factory=dict)  # numbers for the report
    precision: NoiseModel | None = None  # of the box, as measured on the way


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
