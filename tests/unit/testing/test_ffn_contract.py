import numpy as np
import pytest

from keyhole.learners.base import Hypothesis
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
from keyhole.learners.transformer.ffn import FfnLearner
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.queries import QueryBatch
from keyhole.testing.ffn_contract import check_ffn_learner


def test_our_own_learner_keeps_the_contract():
    assert isinstance(ReluNetworkLearner(), FfnLearner)
    check_ffn_learner(ReluNetworkLearner())


class Guesses:
    """Fits an affine function: close to nothing."""

    def learn(self, oracle, rng):
        points = rng.standard_normal((20, oracle.spec.width))
        answers = oracle.ask(QueryBatch.of(points[:, None, :], "fit"))
        fit = np.linalg.lstsq(np.column_stack([points, np.ones(20)]), answers)[0]
        width = oracle.spec.width
        model = ReluNetwork(np.zeros((0, width)), [], [], fit[:-1], fit[-1])
        return Hypothesis(model, model, 1.0)

    def expected_queries(self, spec):
        return 20


class Restless(ReluNetworkLearner):
    """Ignores the generator it is given."""

    def learn(self, oracle, rng):
        return super().learn(oracle, np.random.default_rng())


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        (Guesses(), "differs from the box"),
        (Restless(), "different queries"),
        (object(), "missing"),
    ],
)
def test_the_contract_can_fail(learner, message):
    with pytest.raises(AssertionError, match=message):
        check_ffn_learner(learner)
