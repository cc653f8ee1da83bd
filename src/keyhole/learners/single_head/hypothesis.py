"""One head in the shape of the box's answers, with its standard errors and what was found out."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.linalg.low_rank_fit import count_unknowns
from keyhole.models.attention import Attention, Head
from keyhole.oracles.noise import NoiseModel

Matrix = Any
"""A (d, d) array, or two factors whose product it is: (d, r) and (r, d)."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SingleHeadDiagnostics(Diagnostics):
    """What was found out beside one head; None where a way to learn it does not tell."""

    precision: str | None = None  # number format of the box; "stated" or "measured" for noise
    key_bias: bool | None = None  # whether there is one
    rank: int | None = None  # of the score, where it was looked for,
    rank_reason: str | None = None
    singular_values: Float[Array, " r"] | None = None
    truncation: float | None = None  # rms of unit direction · (what was left out) · unit direction
    measurements: int | None = None  # of a fixed set of queries,
    program_rank: int | None = None  # and what the nuclear norm program says of it
    program_gap: float | None = None
    noise: float | None = None  # standard deviation of additive errors,
    passes: int | None = None  # how often every pair was asked because of them,
    rigorous: bool | None = None  # whether errors are bounds,
    cramer_rao: float | None = None  # and the relative standard error of the score


@dataclass(frozen=True, eq=False)
class Score:
    """A measured score."""

    matrix: Matrix
    error: Matrix  # standard errors
    unknowns: int  # numbers that determine the score
    notes: tuple[str, ...] = ()
    diagnostics: SingleHeadDiagnostics = field(default_factory=SingleHeadDiagnostics)

    @classmethod
    def of_rank(
        cls,
        rank: int,
        matrix: Matrix,
        error: Matrix,
        *,
        reason: str,
        singular: Float[Array, " r"],
        truncation: float,
        **details: Any,
    ) -> "Score":
        """A score whose rank was found out. `truncation` is what it leaves out: the root mean
        square of unit direction · score · unit direction."""
        width = len(matrix[0] if isinstance(matrix, tuple) else matrix)
        found = SingleHeadDiagnostics(
            rank=rank,
            rank_reason=reason,
            singular_values=singular,
            truncation=truncation,
            **details,
        )
        note = f"Rank {rank}: {reason}."
        return cls(matrix, error, count_unknowns(width, rank), (note,), found)

    @classmethod
    def zero(cls, width: int, below: float = 0.0, **details: Any) -> "Score":
        """Where no score was seen: its entries are `below` that."""
        zero = (np.zeros((width, 1)), np.zeros((1, width)))
        error = (np.ones((width, 1)), np.full((1, width), below))
        note = "No query showed a score: attention is uniform up to the key bias."
        return cls(zero, error, 0, (note,), SingleHeadDiagnostics(**details))


@dataclass(frozen=True, eq=False)
class Parameters:
    """Parameters of one head, or their standard errors, with an axis of outputs."""

    score: Matrix
    key_bias: Float[Array, " d"]
    value: Float[Array, "d D"]
    offset: Float[Array, " D"]

    def attention(self, scalar: bool) -> Attention:
        """A layer of one head; a scalar box has no axis of outputs."""
        value, offset = self.value, self.offset
        if scalar:
            value, offset = value[:, 0], offset.reshape(())
        return Attention([Head(self.score, self.key_bias, value)], offset)


def assemble(
    scalar: bool,
    parameters: Parameters,
    errors: Parameters,
    *,
    unknowns: int,
    noise: NoiseModel | None = None,
    notes: tuple[str, ...] = (),
    diagnostics: SingleHeadDiagnostics,
) -> Hypothesis:
    """The hypothesis in the shape of the box's answers; `unknowns` are those of the score alone.
    A key bias and an offset count as unknowns where there is one."""
    model = parameters.attention(scalar)
    (head,) = model.heads
    total = unknowns + head.value.size
    total += sum(part.size for part in (head.key_bias, model.offset) if part.any())
    floor = total / model.offset.size
    return Hypothesis(
        model, errors.attention(scalar), floor, notes, noise=noise, diagnostics=diagnostics
    )
