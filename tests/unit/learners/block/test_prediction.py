"""Blocks whose neurons cannot be told apart: a model that predicts, and is called no recovery."""

import numpy as np
import pytest
from tests.zoo import single

import keyhole
from keyhole.learners.base import Hypothesis, Inconclusive
from keyhole.learners.block.box import open_block
from keyhole.learners.block.prediction import PredictionOptions, bends_alike, predict_block
from keyhole.models.random import block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle


def nearly_linear(norm, seed=0, width=8, scale=0.1):
    """A block with weights as small as libraries initialise them."""
    secret = block(np.random.default_rng(seed), width, heads=2, neurons=4 * width, norm=norm)
    parts = secret.to_arrays()
    for name in parts:
        if name.startswith(("attention", "mlp", "heads")):
            parts[name] = scale * parts[name]
    return type(secret).from_arrays(parts)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_nearly_linear_block_is_predicted(norm):
    secret = nearly_linear(norm)
    box = open_block(FunctionOracle(single(secret), Spec(8)))
    found = predict_block(box, norm, True, True, np.random.default_rng(1))
    assert isinstance(found, Hypothesis)
    assert "neurons and heads apart" in found.shortfall
    fresh = np.random.default_rng(2).standard_normal((50, 5, 8))
    answers = secret(fresh)
    assert np.abs(found.model(fresh) - answers).max() < 2e-2 * answers.std()
    assert found.diagnostics.predicts < 1e-2


def test_a_network_that_bends_alike_is_told_before_any_search():
    for secret, alike in (
        (nearly_linear("pre", scale=0.05), True),
        (block(np.random.default_rng(0), 8, heads=2, neurons=32, norm="pre"), False),
    ):
        box = open_block(keyhole.open_oracle(single(secret.astype(np.float32)), width=8))
        assert bends_alike(box, "pre", np.random.default_rng(1)) is alike


def test_what_is_no_block_is_not_offered_as_one():
    box = open_block(FunctionOracle(lambda x: np.sin(5.0 * x[:, -1]) + x[:, -1], Spec(8)))
    options = PredictionOptions(steps=20)
    assert isinstance(
        predict_block(box, "pre", True, False, np.random.default_rng(0), options), Inconclusive
    )


def test_the_outcome_says_what_is_not_determined():
    secret = nearly_linear("pre")
    found = keyhole.recover(
        keyhole.open_oracle(single(secret), width=8), keyhole.BlockLearner(), throw=False
    )
    assert found.outcome is not keyhole.Outcome.REJECTED
    assert found.model is not None
    fresh = np.random.default_rng(2).standard_normal((50, 5, 8))
    answers = secret(fresh)
    assert np.abs(found.model(fresh) - answers).max() < 2e-2 * answers.std()
