"""Attention whose scores depend on where tokens stand, or whose weights do not sum to one."""

from keyhole.learners.positions.kinds import describe_bounded
from keyhole.learners.positions.learner import Positions
from keyhole.learners.positions.sinks import has_sink

__all__ = ["Positions", "describe_bounded", "has_sink"]
