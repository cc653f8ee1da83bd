import numpy as np
import pytest
from tests.zoo import single

import keyhole
from keyhole.learners.block.box import Unclear, open_block
from keyhole.learners.block.pre_norm_mlp import OnSphere
from keyhole.learners.block.wide_network import (
    find_post_norm_network,
    find_pre_norm_network,
    find_pre_norm_relus,
    fit_wide,
    is_crowded,
    turn_neurons,
)
from keyhole.models.canonical import canonical_block, distance
from keyhole.models.random import block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle

WIDTH, NEURONS = 10, 20


def sublayer(norm, activation):
    rng = np.random.default_rng(7)
    return block(rng, WIDTH, neurons=NEURONS, norm=norm, activation=activation)


def coarse(secret):
    return FunctionOracle(single(secret), Spec(WIDTH))


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_network_on_a_sphere_from_random_points(activation):
    secret = sublayer("pre", activation)
    plane = secret.norms[0].plane
    oracle = OnSphere(coarse(secret), plane)
    found = turn_neurons(fit_wide(oracle, (activation,), 2.0**-22, np.random.default_rng(0)))
    assert found.neurons == NEURONS
    assert not found.linear.any()
    points = oracle.spec.domain.drawn_in(np.random.default_rng(1).standard_normal((20, WIDTH - 1)))
    truth = secret(points[:, None] @ plane.T) - points @ plane.T
    assert np.abs(found(points) - truth).max() < 1e-4


@pytest.mark.parametrize(("norm", "find"), [("pre", find_pre_norm_network),
                                            ("post", find_post_norm_network)])  # fmt: skip
def test_a_start_that_predicts(norm, find):
    secret = sublayer(norm, "relu")
    (start,), pairs = find(open_block(coarse(secret)), np.random.default_rng(0))
    assert start.mlp.neurons == NEURONS
    for tokens, answers in pairs:
        assert np.abs(start(tokens) - answers).max() < 1e-3
    fresh = np.random.default_rng(1).standard_normal((50, 1, WIDTH))
    assert np.abs(start(fresh) - secret(fresh)).max() < 1e-3


def test_smooth_networks_have_no_kinks():
    with pytest.raises(Unclear, match="smooth"):
        find_pre_norm_relus(open_block(coarse(sublayer("pre", "gelu"))), np.random.default_rng(0))


def test_where_second_derivatives_have_little_room():
    assert is_crowded(15)
    assert not is_crowded(31)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_relus_beside_a_norm_in_single_precision(norm):
    secret = sublayer(norm, "relu")
    found = keyhole.recover(coarse(secret), keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.mlp.neurons == NEURONS
    # a neuron that few answers show is known to a few digits; answers are those of the box
    assert distance(canonical_block(found.model), canonical_block(secret)) < 5e-3
    fresh = np.random.default_rng(1).standard_normal((50, 1, WIDTH))
    assert np.abs(found.model(fresh) - secret(fresh)).max() < 1e-5
    assert found.ledger.paid < 60.0 * found.ledger.floor
    fresh = np.random.default_rng(2).standard_normal((50, 1, WIDTH))
    answers = secret(fresh)
    assert np.abs(found.model(fresh) - answers).max() < 1e-5 * np.abs(answers).max()


def test_relus_behind_a_norm_in_double_precision():
    secret = sublayer("pre", "relu")
    found = keyhole.recover(FunctionOracle(secret, Spec(WIDTH)), keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.mlp.neurons == NEURONS
    fresh = np.random.default_rng(2).standard_normal((50, 1, WIDTH))
    assert np.abs(found.model(fresh) - secret(fresh)).max() < 1e-10
