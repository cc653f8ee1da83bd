"""Networks with one hidden layer, from queries of one token."""

from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.learner import MlpDiagnostics, MlpLearner
from keyhole.learners.mlp.redundancy import (
    RedundancyOptions,
    random_start,
    thin_out,
    without_cheap,
)
from keyhole.learners.mlp.refinement import Weights, descend, refine
from keyhole.learners.mlp.relu_hypothesis import NetworkDiagnostics, derive_standard_errors
from keyhole.learners.mlp.relu_learner import ReluNetworkLearner

__all__ = [
    "InputRegion",
    "MlpDiagnostics",
    "MlpLearner",
    "NetworkDiagnostics",
    "RedundancyOptions",
    "ReluNetworkLearner",
    "Weights",
    "derive_standard_errors",
    "descend",
    "random_start",
    "refine",
    "thin_out",
    "without_cheap",
]
