"""What the strategies share: prior knowledge, diagnostics, and a test on fresh queries."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF
from keyhole.errors import Counterexample, WrongFamily
from keyhole.learners.base import Diagnostics
from keyhole.measurement.asker import Asker
from keyhole.measurement.noise import inside
from keyhole.models.attention import Attention

EXCUSED = 1e-5  # error of the log-odds, by the standard errors, that may excuse a deviation


class Disagreement(WrongFamily):
    """A hypothesis answers a fresh query otherwise than the box: the hypothesis may be to blame,
    as where nearly equal heads were taken for one."""


@runtime_checkable
class PriorKnowledge(Protocol):
    """What the user said about the box."""

    @property
    def heads(self) -> int | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def bias(self) -> bool | None: ...
    @property
    def attempts(self) -> int: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class MultiHeadDiagnostics(Diagnostics):
    """What a strategy for several heads found out beside the model."""

    heads: int
    ranks: tuple[int, ...] | None = None  # of the scores; a head with score zero is left out
    key_ranks: tuple[int, ...] | None = None  # of [W | c]: one more, if c is outside W's range
    value_ranks: tuple[int, ...] | None = None
    separator_norm: float | None = None  # of the longest separating token, in units of its margin
    unit: float | None = None  # relative rounding error of an answer
    condition: float | None = None  # of the output maps that keep the heads apart
    key_value_groups: int | None = None  # sets of keys and values, where heads share them
    misfit: float | None = None  # of a least-squares refinement, in standard errors


def graver(trouble: Exception | None, error: Exception) -> Exception:
    """What is said if no attempt succeeds: a contradiction outlives later trouble."""
    return trouble if isinstance(trouble, WrongFamily) else error


def note_missing_heads(claimed: int | None, found: int) -> tuple[str, ...]:
    """The note for a reader who expected more heads than the box shows."""
    if claimed is None or found >= claimed:
        return ()
    return (
        f"{claimed} heads were claimed, {found} can be told apart: the others equal one of "
        "them or have no value, and nobody can know their parameters",
    )


def find_counterexample(
    ask: Asker,
    model: Attention,
    errors: Attention,
    rng: np.random.Generator,
    radius: float = np.inf,
    excused: float = EXCUSED,
) -> Counterexample | None:
    """Fresh random queries, one short and one longer than any set of candidate tokens, with
    log-odds of order one; the first that the model answers otherwise."""
    scales = [float(np.linalg.norm(head.score)) for head in model.heads]
    typical = float(np.median([scale for scale in scales if scale > 0] or [1.0]))
    size = min(float(np.sqrt(1.5 / typical)), radius / np.sqrt(model.width))
    allowed = tolerate(ask, model, errors, size, excused)
    domain = ask.oracle.spec.domain
    limit = domain.max_length
    for length in (7, 300):
        count = length if limit is None else min(limit, length)
        tokens = size * rng.standard_normal((1, count, model.width))
        norms = np.linalg.norm(tokens, axis=2, keepdims=True)
        tokens = tokens * np.minimum(1.0, radius / norms)
        if domain.vocabulary is not None or domain.radius <= 0:
            tokens = inside(ask.oracle, tokens.reshape(count, 1, -1), rng).reshape(tokens.shape)
        answer = ask(tokens, "validation")[0] + ask.offset
        guess = model(tokens).reshape(answer.shape)
        if np.abs(answer - guess).max() > allowed:
            reason = f"{count} random tokens, scores of order one"
            return Counterexample(tokens[0], np.squeeze(answer), np.squeeze(guess), reason)
    return None


def tolerate(ask: Asker, model: Attention, errors: Attention, size: float, excused: float) -> float:
    """Deviation that rounding and three standard errors, as far as they are excused, allow for
    tokens with entries of this size."""
    norm = size * np.sqrt(model.width)
    roundings = ask.unit / UNIT_ROUNDOFF
    precision = 1e-8 * max(1.0, 1e-5 * roundings)  # a float64 model has eight digits at least
    limit = excused * min(np.sqrt(max(1.0, roundings)), 1e3)
    allowed = ask.undetected
    for head, error in zip(model.heads, errors.heads, strict=True):
        scale = float(np.linalg.norm(head.value)) * norm / np.sqrt(model.outputs or 1)
        doubt = float(np.linalg.norm(error.score)) * size**2
        doubt += float(np.linalg.norm(error.key_bias)) * size
        allowed += scale * (precision + 3 * min(doubt, limit))
        allowed += 3 * float(np.linalg.norm(error.value)) * norm
    return float(allowed)
