"""Networks with one hidden layer, from queries of one token."""

from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.learner import MlpDiagnostics, MlpLearner
from keyhole.learners.mlp.redundancy import (
    RedundancyOptions,
    random_start,
    thin_out,
    without_cheap,
)
from keyhole.learners.mlp.refinement import (
    Weights,
    chosen,
    descend,
    hidden_layer,
    refine,
    with_one,
)
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
    "chosen",
    "derive_standard_errors",
    "descend",
    "hidden_layer",
    "random_start",
    "refine",
    "thin_out",
    "with_one",
    "without_cheap",
]
