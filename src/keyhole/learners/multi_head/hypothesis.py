"""What the ways of learning several heads share: the claims, and the hypothesis' own test."""

from typing import Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF
from keyhole.errors import Counterexample
from keyhole.measurement.asking import Asker
from keyhole.measurement.noise import inside
from keyhole.models.attention import Attention

VALIDATION_LENGTHS = (7, 300)  # own fresh queries, the long one longer than any bag of tokens
SINGLE_SHARE = 1e-5  # a float32 box is trusted with fewer digits in proportion to this
DOUBT_LIMIT = 1e-5  # error bars of a float64 box excuse a deviation only up to here
MOST_EXCUSED = 1e3  # for a coarser box more, up to so many times
SCORE = 1.5  # typical score of a validating query
BARS = 3  # error bars that a deviation may have
VALID = 1e-8  # deviation, relative to the answers' scale, that a float64 hypothesis may show


@runtime_checkable
class Claims(Protocol):
    """What the user said about the box."""

    @property
    def heads(self) -> int | None: ...
    @property
    def rank(self) -> int | None: ...
    @property
    def bias(self) -> bool | None: ...
    @property
    def attempts(self) -> int: ...


def fewer_than_claimed(claimed: int | None, found: int) -> tuple[str, ...]:
    """The note for a reader who expected more heads than the box shows."""
    if claimed is None or found >= claimed:
        return ()
    return (
        f"{claimed} heads were claimed, {found} can be told apart: the others equal one of "
        "them or have no value, and nobody can know their parameters",
    )


def validated(
    ask: Asker,
    model: Attention,
    errors: Attention,
    rng: np.random.Generator,
    radius: float = np.inf,
    slack: float = DOUBT_LIMIT,
) -> Counterexample | None:
    """Fresh random queries, short and long, scores of order one; the first that disagrees."""
    scales = [float(np.linalg.norm(head.score)) for head in model.heads]
    typical = float(np.median([scale for scale in scales if scale > 0] or [1.0]))
    size = min(float(np.sqrt(SCORE / typical)), radius / np.sqrt(model.width))
    allowed = tolerance(ask, model, errors, size, slack)
    domain = ask.oracle.spec.domain
    limit = domain.max_length
    for length in VALIDATION_LENGTHS:
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


def tolerance(ask: Asker, model: Attention, errors: Attention, size: float, slack: float) -> float:
    """Deviation that rounding and the error bars, up to `slack`, allow for tokens with entries of
    `size`."""
    norm = size * np.sqrt(model.width)
    precision = VALID * max(1.0, SINGLE_SHARE * ask.unit / UNIT_ROUNDOFF)
    limit = slack * min(np.sqrt(max(1.0, ask.unit / UNIT_ROUNDOFF)), MOST_EXCUSED)
    allowed = ask.noise
    for head, error in zip(model.heads, errors.heads, strict=True):
        loud = float(np.linalg.norm(head.value)) * norm / np.sqrt(model.outputs or 1)
        doubt = float(np.linalg.norm(error.score)) * size**2
        doubt += float(np.linalg.norm(error.key_bias)) * size
        allowed += loud * (precision + BARS * min(doubt, limit))
        allowed += BARS * float(np.linalg.norm(error.value)) * norm
    return float(allowed)
