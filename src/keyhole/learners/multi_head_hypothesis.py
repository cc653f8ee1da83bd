"""What both ways of learning several heads share: the claims, and the hypothesis' own test."""

from typing import Protocol

import numpy as np

from keyhole.models.attention import Attention
from keyhole.oracles.base import UNIT_ROUNDOFF
from keyhole.probes.asking import Asker
from keyhole.results import Counterexample

VALIDATIONS = 2  # own fresh questions; a later verification asks more
VALIDATION_LENGTH = 7
VALID = 1e-8  # deviation, relative to the answers' scale, that a float64 hypothesis may show


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


def validated(
    ask: Asker, model: Attention, errors: Attention, rng: np.random.Generator
) -> Counterexample | None:
    """Fresh random questions with scores of order one; the first that disagrees."""
    width = model.width
    norms = [float(np.linalg.norm(head.score)) for head in model.heads]
    typical = float(np.median([n for n in norms if n > 0] or [1.0]))
    size = np.sqrt(1.5 / typical)
    limit = ask.oracle.spec.domain.max_length
    length = VALIDATION_LENGTH if limit is None else min(limit, VALIDATION_LENGTH)
    tokens = size * rng.standard_normal((VALIDATIONS, length, width))
    answers = ask(tokens, "validation") + ask.offset
    guesses = model(tokens).reshape(answers.shape)
    allowed = 0.0
    for head, error in zip(model.heads, errors.heads, strict=True):
        loud = float(np.linalg.norm(head.value)) * size * np.sqrt(width)
        doubt = float(np.linalg.norm(error.score)) * size**2 + float(
            np.linalg.norm(error.key_bias)
        ) * size
        allowed += loud * (VALID * max(1.0, ask.unit / UNIT_ROUNDOFF * 1e-3) + 3 * doubt)
        allowed += 3 * float(np.linalg.norm(error.value)) * size * np.sqrt(width)
    allowed += 5 * ask.additive
    wrong = np.abs(answers - guesses).max(axis=1) > allowed
    if not wrong.any():
        return None
    worst = int(np.argmax(np.abs(answers - guesses).max(axis=1)))
    return Counterexample(
        tokens[worst],
        np.squeeze(answers[worst]),
        np.squeeze(guesses[worst]),
        "random tokens, scores of order one",
    )
