"""Networks with one hidden layer, from queries of one token."""

from keyhole.learners.mlp.hessians import GROWTH as HESSIAN_GROWTH
from keyhole.learners.mlp.hessians import (
    HessianSketch,
    HessianTable,
    NotEnough,
    axes_for,
    find_span,
    likely_activations,
    rank_ones,
    room_for_neurons,
    spread_places,
    weights_of,
)
from keyhole.learners.mlp.hessians import Steps as HessianSteps
from keyhole.learners.mlp.hessians import along as sphere_point
from keyhole.learners.mlp.judgement import MlpDiagnostics
from keyhole.learners.mlp.learner import MlpLearner
from keyhole.learners.mlp.refinement import refine
from keyhole.learners.mlp.relu import (
    InputRegion,
    NetworkDiagnostics,
    ReluNetworkLearner,
    derive_standard_errors,
)
from keyhole.network.weights import Weights, chosen, hidden_layer, random_start, with_one

__all__ = [
    "HESSIAN_GROWTH",
    "HessianSketch",
    "HessianSteps",
    "HessianTable",
    "InputRegion",
    "MlpDiagnostics",
    "MlpLearner",
    "NetworkDiagnostics",
    "NotEnough",
    "ReluNetworkLearner",
    "Weights",
    "axes_for",
    "chosen",
    "derive_standard_errors",
    "find_span",
    "hidden_layer",
    "likely_activations",
    "random_start",
    "rank_ones",
    "refine",
    "room_for_neurons",
    "sphere_point",
    "spread_places",
    "weights_of",
    "with_one",
]
