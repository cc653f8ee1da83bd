"""Attention whose scores depend on where tokens stand."""

from keyhole.learners.positions.learner import Positions

__all__ = ["Positions"]
