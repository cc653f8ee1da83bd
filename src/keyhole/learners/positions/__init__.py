"""Attention whose scores depend on where tokens stand, or whose weights do not sum to one."""

from keyhole.learners.positions.learner import Positions
from keyhole.learners.positions.sinks import has_sink

__all__ = ["Positions", "has_sink"]
