import numpy as np
import pytest

import keyhole
from keyhole.learners.block.box import open_block
from keyhole.learners.block.pre_norm_mlp import (
    OnSphere,
    find_kind,
    lift_errors,
    lift_network,
    measure_epsilon,
    share_of,
)
from keyhole.models.canonical import canonical_block
from keyhole.models.mlp import Mlp
from keyhole.models.norm import kept_plane
from keyhole.models.random import block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.queries import QueryBatch


def sublayer(**options):
    return block(np.random.default_rng(0), 8, neurons=6, norm="pre", **options)


def on_plane(secret, scale=1.0):
    """The network as it is on points of the norm's plane, which it divides by `scale`."""
    plane, network = secret.norms[0].plane, canonical_block(secret).mlp
    small = Mlp(
        network.inner @ plane / scale, network.inner_bias, network.outer, offset=network.offset
    )
    return small, plane


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_the_kind_of_the_norm(kind):
    box = open_block(FunctionOracle(sublayer(kind=kind), Spec(8)))
    assert find_kind(box, np.random.default_rng(1)) == kind


def test_the_box_without_residual_on_a_sphere():
    secret = sublayer(epsilon=1e-3)
    small, plane = on_plane(secret, np.sqrt(1.001))
    oracle = OnSphere(FunctionOracle(secret, Spec(8)), plane)
    assert (oracle.spec.width, oracle.spec.outputs) == (7, 8)
    points = oracle.spec.domain.drawn_in(np.random.default_rng(0).standard_normal((3, 1, 7)))
    assert np.allclose(oracle.ask(QueryBatch.of(points, "test")), small(points), atol=1e-13)


@pytest.mark.parametrize("epsilon", [1e-3, 1e-5, 1e-8])
def test_epsilon_from_small_tokens(epsilon):
    secret = sublayer(epsilon=epsilon)
    small, plane = on_plane(secret, np.sqrt(1.0 + epsilon))
    box = open_block(FunctionOracle(secret, Spec(8)))
    found = measure_epsilon(box, small, plane, np.random.default_rng(2))
    assert found == pytest.approx(epsilon, rel=1e-9)


def test_the_length_of_a_point():
    small, _ = on_plane(sublayer())
    point = np.random.default_rng(0).standard_normal(7)
    found = share_of(lambda part: small(part[:, None] * point), small(0.37 * point[None])[0])
    assert found == pytest.approx(0.37, abs=1e-12)


def test_weights_and_their_errors_are_lifted():
    small, plane = on_plane(sublayer())
    points = np.random.default_rng(0).standard_normal((4, 7))
    wide = lift_network(small, plane, 2.0)
    assert np.allclose(wide(points @ plane.T), small(2.0 * points), atol=1e-13)
    same = Mlp.from_arrays({name: np.ones_like(a) for name, a in small.to_arrays().items()})
    doubts = lift_errors(same, kept_plane(8, "layer"))
    assert np.allclose((doubts.inner**2).sum(axis=1), 7.0)


@pytest.mark.parametrize(("kind", "activation"), [("layer", "gelu"), ("rms", "silu")])
def test_a_network_behind_a_norm(kind, activation):
    secret = block(
        np.random.default_rng(3), 8, neurons=8, norm="pre", kind=kind, activation=activation
    )
    found = keyhole.recover(secret, keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.mlp.activation == activation
    assert keyhole.distance(found.model, secret) < 1e-11
