"""Heads that are nearly equal or proportional: members of the family, however hard to tell."""

import numpy as np
import pytest

import keyhole
from keyhole.models.attention import Attention, Head


def pair_of_heads(seed: int, outputs: int | None, gap: float, proportional: bool) -> Attention:
    rng = np.random.default_rng(seed)
    score, other = rng.standard_normal((2, 6, 6)) / np.sqrt(6)
    second = score * (1.0 + gap) if proportional else score + gap * other
    shape = (2, 6) if outputs is None else (2, 6, outputs)
    values = rng.standard_normal(shape)
    offset = 0.0 if outputs is None else np.zeros(outputs)
    return Attention([Head(score, None, values[0]), Head(second, None, values[1])], offset)


@pytest.mark.parametrize("proportional", [False, True])
@pytest.mark.parametrize("outputs", [None, 6])
@pytest.mark.parametrize("gap", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("learner", [keyhole.MultiHead(), keyhole.Auto()])
def test_a_member_of_the_family_is_never_called_something_else(
    learner: object, gap: float, outputs: int | None, proportional: bool
) -> None:
    model = pair_of_heads(0, outputs, gap, proportional)
    recovery = keyhole.recover(model, learner, throw=False)
    assert recovery.outcome in (keyhole.Outcome.RECOVERED, keyhole.Outcome.ILL_CONDITIONED)
    if recovery.outcome is keyhole.Outcome.RECOVERED:
        tokens = np.random.default_rng(1).standard_normal((50, 9, 6))
        off = np.abs(recovery.model(tokens) - model(tokens)).max()
        assert off <= 10 * max(recovery.verdict.tolerance, 1e-9) * np.abs(model(tokens)).max()


def test_proportional_heads_are_recovered_from_random_queries() -> None:
    model = pair_of_heads(1, 6, 0.1, proportional=True)
    recovery = keyhole.recover(model, keyhole.MultiHead())
    assert keyhole.distance(recovery.model, model) < 1e-6
    assert any("Tried before" in note for note in recovery.notes)
