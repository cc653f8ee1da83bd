"""One layer of attention followed by a network of ReLUs."""

from keyhole.learners.transformer.ffn import FfnLearner
from keyhole.learners.transformer.learner import Transformer, TransformerDiagnostics

__all__ = ["FfnLearner", "Transformer", "TransformerDiagnostics"]
