"""Boxes that give themselves away on one kind of fresh query alone: all kinds must be compared,
also by learners that do not know how exact the box is."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keyhole
from keyhole.models.random import attention
from keyhole.verification.exactness import REPEATS
from networks import layer

Function = Callable[[np.ndarray], np.ndarray]
WIDTH = 6


def merging_repeats(model: Function) -> Function:
    """Tokens that come three times or more count once."""

    def box(tokens: np.ndarray) -> np.ndarray:
        answers = np.array(model(tokens))
        for k, sequence in enumerate(tokens):
            different, counts = np.unique(sequence[:-1], axis=0, return_counts=True)
            if counts.max(initial=0) >= 3:
                answers[k] = model(np.concatenate([different, sequence[-1:]])[None])[0]
        return answers

    return box


def forgetting_the_first(model: Function) -> Function:
    """Sequences of 12 to 20 tokens lose the first."""
    return lambda tokens: model(tokens[:, 1:] if 12 <= tokens.shape[1] <= 20 else tokens)


RNG = np.random.default_rng(0)
CASES = {
    "several heads": (attention(RNG, WIDTH, heads=2), keyhole.MultiHead()),
    "a layer": (attention(RNG, WIDTH, heads=2, outputs=WIDTH), keyhole.MultiHead()),
    "a Transformer": (layer(0, WIDTH, 5), keyhole.Transformer()),
}


@pytest.mark.parametrize("lie", [merging_repeats, forgetting_the_first])
@pytest.mark.parametrize("case", CASES)
def test_four_kinds_of_fresh_queries_are_compared(case: str, lie: Any) -> None:
    model, learner = CASES[case]
    box = keyhole.open_oracle(lie(model), width=WIDTH)
    recovery = keyhole.recover(box, learner, throw=False)
    assert recovery.outcome is keyhole.Outcome.REJECTED
    honest = keyhole.recover(model, learner)
    assert honest.verdict is not None
    assert honest.verdict.queries == 4
    assert honest.ledger.by_purpose["verification"] == 4 + REPEATS
    assert honest.verdict.bound.startswith("All 4 fresh answers agree")
