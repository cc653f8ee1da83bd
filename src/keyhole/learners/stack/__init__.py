"""Stacks of Transformer blocks, all at once."""

from keyhole.learners.stack.learner import StackDiagnostics, StackLearner, is_stack

__all__ = ["StackDiagnostics", "StackLearner", "is_stack"]
