"""Networks with one hidden layer, from queries of one token."""

from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.learner import MlpDiagnostics, MlpLearner
from keyhole.learners.mlp.relu_hypothesis import NetworkDiagnostics, derive_standard_errors
from keyhole.learners.mlp.relu_learner import ReluNetworkLearner

__all__ = [
    "InputRegion",
    "MlpDiagnostics",
    "MlpLearner",
    "NetworkDiagnostics",
    "ReluNetworkLearner",
    "derive_standard_errors",
]
