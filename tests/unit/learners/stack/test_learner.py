"""Whole stacks from their answers."""

import numpy as np
import pytest

import keyhole
from keyhole.learners.stack.learner import StackLearner
from keyhole.models.random import block, stack
from keyhole.models.stack import Stack
from keyhole.results import Outcome


def fresh_error(model: Stack, secret: Stack) -> float:
    tokens = 3.0 * np.random.default_rng(99).standard_normal((40, 4, secret.width))
    return float(np.abs(model(tokens) - secret(tokens)).max())


def test_a_stack_is_recovered_with_nothing_given() -> None:
    secret = stack(np.random.default_rng(2), 6, layers=2, heads=1, neurons=4)
    found = keyhole.recover(secret, seed=1)
    assert found.outcome is Outcome.RECOVERED
    assert "a stack of blocks" in found.notes[0]
    assert len(found.model.blocks) == 2
    assert found.model.causal
    assert keyhole.distance(found.model, secret) < 1e-9
    assert fresh_error(found.model, secret) < 1e-9


@pytest.mark.slow
def test_a_repeated_block_is_told_as_such() -> None:
    own = block(np.random.default_rng(3), 6, heads=1, neurons=4, norm="pre")
    secret = Stack([own, own], causal=True)
    found = keyhole.recover(secret, StackLearner(), seed=1)
    assert found.outcome is Outcome.RECOVERED
    assert any("passed 2 times" in note for note in found.notes)
    assert fresh_error(found.model, secret) < 1e-9


@pytest.mark.slow
def test_a_stack_in_another_order_is_never_taken_for_the_claimed_one() -> None:
    rng = np.random.default_rng(5)
    one, two, three = (block(rng, 6, heads=1, neurons=4, norm="pre") for _ in range(3))
    claimed, swapped = Stack([one, two], causal=True), Stack([two, one], causal=True)
    assert not keyhole.verify(swapped, claimed, seed=1).agrees
    found = keyhole.recover(swapped, StackLearner(), seed=1)
    assert keyhole.distance(found.model, swapped) < 1e-9
    assert keyhole.distance(found.model, claimed) > 0.1
    deeper = keyhole.recover(
        Stack([one, two, three], causal=True), StackLearner(layers=2), seed=1, throw=False
    )
    assert deeper.outcome is Outcome.REJECTED
    assert "3 blocks" in deeper.reason


@pytest.mark.slow
def test_gated_networks_behind_rms_norms_are_recovered() -> None:
    secret = stack(np.random.default_rng(4), 6, layers=2, heads=1, neurons=3, kind="rms",
                   activation="silu", gated=True)  # fmt: skip
    found = keyhole.recover(secret, StackLearner(), seed=1)
    assert found.outcome is Outcome.RECOVERED
    assert found.model.blocks[0].mlp.gated
    assert keyhole.distance(found.model, secret) < 1e-9


def test_layers_must_be_a_number() -> None:
    with pytest.raises(keyhole.InvalidArgument, match="layers"):
        StackLearner(layers=0)


def test_post_norm_stacks_are_ill_conditioned_with_the_reason() -> None:
    rng = np.random.default_rng(4)
    secret = Stack([block(rng, 6, heads=1, neurons=4) for _ in range(2)])
    found = keyhole.recover(secret, StackLearner(), seed=1, throw=False)
    assert found.outcome is Outcome.ILL_CONDITIONED
    assert "norms behind the residual" in found.reason
