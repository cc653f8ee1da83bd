"""The output layer of a language model from its logits or log-probabilities."""

from keyhole.learners.output_layer.learner import (
    OutputLayerDiagnostics,
    OutputLayerLearner,
    estimate_format,
)
from keyhole.learners.output_layer.space import centre, find_rank, make_space

__all__ = [
    "OutputLayerDiagnostics",
    "OutputLayerLearner",
    "centre",
    "estimate_format",
    "find_rank",
    "make_space",
]
