import numpy as np
import pytest

import keyhole
from keyhole.learners.block.box import open_block
from keyhole.learners.block.no_norm import learn_without_norm
from keyhole.models.random import block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle


@pytest.mark.parametrize("parts", [{"heads": 2}, {"neurons": 6}])
def test_a_sublayer_without_norm(parts):
    secret = block(np.random.default_rng(0), 8, norm="none", **parts)
    box = open_block(FunctionOracle(secret, Spec(8)))
    found = learn_without_norm(box, "heads" in parts, np.random.default_rng(1))
    assert keyhole.distance(found.model, secret) < 1e-7
    assert found.errors.norm == "none"


@pytest.mark.parametrize("parts", [{"heads": 2}, {"neurons": 6}])
def test_it_is_recovered(parts):
    secret = block(np.random.default_rng(1), 8, norm="none", **parts)
    found = keyhole.recover(secret, keyhole.BlockLearner())
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert keyhole.distance(found.model, secret) < 1e-7
