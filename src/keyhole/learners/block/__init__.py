"""Whole Transformer blocks and their sublayers: residuals, norms, attention, networks."""

from keyhole.learners.block.learner import BlockLearner

__all__ = ["BlockLearner"]
