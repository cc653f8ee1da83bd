"""Stacks of Transformer blocks, all at once."""

from keyhole.learners.stack.learner import StackDiagnostics, StackLearner

__all__ = ["StackDiagnostics", "StackLearner"]
