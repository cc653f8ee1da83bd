"""Vectors that the box adds to its tokens."""

import numpy as np
import pytest

import keyhole
from keyhole.learners.block import Unclear, open_block
from keyhole.learners.stack.final_norm import read_final_norm
from keyhole.learners.stack.learner import StackLearner
from keyhole.learners.stack.positions import find_positions, has_positions
from keyhole.learners.stack.shallow import Shallow
from keyhole.models.norm import Norm, kept_plane
from keyhole.models.random import stack
from keyhole.models.stack import Stack
from keyhole.results import Outcome


def make(final: bool) -> Stack:
    rng = np.random.default_rng(0)
    inner = stack(rng, 8, layers=2, heads=1, neurons=4)
    norm = Norm(1.0 + 0.2 * rng.standard_normal(8), 0.3 * rng.standard_normal(8)) if final else None
    return inner.replace(final_norm=norm, positions=0.3 * rng.standard_normal((5, 8)))


@pytest.mark.parametrize("final", [False, True])
def test_differences_of_positions_show_in_the_limit(final: bool) -> None:
    secret, rng = make(final), np.random.default_rng(1)
    assert secret.positions is not None
    box = open_block(keyhole.open_oracle(secret, max_length=5))
    assert has_positions(box, rng)
    assert not has_positions(open_block(keyhole.open_oracle(secret.replace(positions=None))), rng)
    norm = read_final_norm(box, rng) if final else None
    found = find_positions(Shallow(box, kept_plane(8, "layer"), norm, True), rng)
    true = secret.positions - secret.positions[0]
    if final:
        true = true - true.mean(axis=1, keepdims=True)
    assert np.abs(found - true).max() < 1e-7


def test_a_box_must_tell_its_longest_sequence() -> None:
    box = open_block(keyhole.open_oracle(lambda tokens: tokens[:, -1], width=8))
    with pytest.raises(Unclear, match="max_length"):
        find_positions(Shallow(box, kept_plane(8, "layer")), np.random.default_rng(0))


def test_a_stack_with_positions_behind_a_norm_is_recovered() -> None:
    secret = make(final=True)
    found = keyhole.recover(keyhole.open_oracle(secret, max_length=5), StackLearner(), seed=1)
    assert found.outcome is Outcome.RECOVERED
    assert keyhole.distance(found.model, secret) < 1e-9
    tokens = 3.0 * np.random.default_rng(99).standard_normal((40, 5, 8))
    assert np.abs(found.model(tokens) - secret(tokens)).max() < 1e-11
