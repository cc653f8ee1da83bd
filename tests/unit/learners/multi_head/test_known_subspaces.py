"""Heads in known orthogonal subspaces cost what single heads of that width cost."""

import numpy as np
import pytest

from keyhole.errors import InvalidArgument, WrongFamily
from keyhole.learners.multi_head.known_subspaces import OrthogonalHeads, lift_head
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import distance
from keyhole.models.random import attention
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.wrappers.count import QueryCounter


def planted(seed: int) -> tuple[Attention, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    frame = np.linalg.qr(rng.standard_normal((12, 12)))[0]
    bases = [frame[:, :3], frame[:, 3:8], frame[:, 8:]]
    heads = [lift_head(attention(rng, b.shape[1]).heads[0], b) for b in bases]
    return Attention(heads), bases


def test_cost_and_error() -> None:
    secret, bases = planted(0)
    oracle = QueryCounter(FunctionOracle(secret, Spec(12)))
    learner = OrthogonalHeads(bases)
    learned = learner.learn(oracle, np.random.default_rng(0))
    assert learned.floor == 3 * 4 + 5 * 6 + 4 * 5
    assert oracle.paid <= learned.floor + 3 * 4 + 2
    assert distance(learned.model, secret) < 1e-12


def test_a_head_that_looks_outside_is_rejected() -> None:
    secret, bases = planted(1)
    first = secret.heads[0]
    rng = np.random.default_rng(2)
    outside = Head(first.score + 0.1 * rng.standard_normal((12, 12)), None, first.value)
    oracle = FunctionOracle(Attention([outside, *secret.heads[1:]]), Spec(12))
    with pytest.raises(WrongFamily) as caught:
        OrthogonalHeads(bases).learn(oracle, np.random.default_rng(0))
    assert caught.value.counterexample is not None


def test_bases_must_be_orthogonal() -> None:
    with pytest.raises(InvalidArgument, match="pairwise orthogonal"):
        OrthogonalHeads([np.eye(4)[:, :2], np.eye(4)[:, 1:3]])
    with pytest.raises(InvalidArgument):
        OrthogonalHeads([])
