"""Norms behind the last block."""

import numpy as np
import pytest

import keyhole
from keyhole.learners.block import open_block
from keyhole.learners.stack.final_norm import read_final_norm
from keyhole.learners.stack.heads import find_heads
from keyhole.learners.stack.learner import StackLearner
from keyhole.learners.stack.shallow import Shallow, measure_doubt
from keyhole.models.canonical import canonical_stack
from keyhole.models.norm import Norm, kept_plane
from keyhole.models.random import block, stack
from keyhole.models.stack import Stack
from keyhole.results import Outcome


def make(kind: str) -> Stack:
    rng = np.random.default_rng(0)
    inner = stack(rng, 6, layers=2, heads=1, neurons=4, kind=kind)
    bias = 0.3 * rng.standard_normal(6) if kind == "layer" else None
    return Stack(inner.blocks, Norm(1.0 + 0.2 * rng.standard_normal(6), bias, 1e-5, kind),
                 causal=True)  # fmt: skip


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_final_norm_and_the_heads_behind_it_are_read(kind: str) -> None:
    secret = make(kind)
    box = open_block(keyhole.open_oracle(secret))
    rng = np.random.default_rng(1)
    norm = read_final_norm(box, rng)
    assert norm is not None
    assert secret.final_norm is not None
    assert norm.kind == kind
    assert np.abs(norm.gain - secret.final_norm.gain).max() < 1e-14
    assert np.abs(norm.bias - secret.final_norm.bias).max() < 1e-14
    shallow = Shallow(box, kept_plane(6, kind), norm)
    doubt = measure_doubt(shallow, rng)
    assert doubt < 1e-10
    found = find_heads(shallow, doubt, rng)
    for block_ in (canonical_stack(secret) if kind == "layer" else secret).blocks:
        assert block_.attention is not None
        (head,) = block_.attention.heads
        # an RMSNorm's gain is inside the map
        gain = np.ones(6) if kind == "layer" else block_.gain[0]
        true = (gain[:, None] * head.value).T @ shallow.plane
        assert np.abs(found.maps - true).max(axis=(1, 2)).min() < 1e-8


@pytest.mark.slow
def test_a_stack_behind_a_norm_is_recovered() -> None:
    secret = make("rms")
    found = keyhole.recover(secret, StackLearner(), seed=1)
    assert found.outcome is Outcome.RECOVERED
    assert keyhole.distance(found.model, secret) < 1e-9
    tokens = 3.0 * np.random.default_rng(99).standard_normal((40, 4, 6))
    assert np.abs(found.model(tokens) - secret(tokens)).max() < 1e-11


def test_post_norm_blocks_have_no_norm_at_the_end() -> None:
    rng = np.random.default_rng(2)
    secret = Stack([block(rng, 8, heads=2, neurons=8) for _ in range(2)])
    assert read_final_norm(open_block(keyhole.open_oracle(secret)), rng) is None
