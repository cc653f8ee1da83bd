"""One head from labels alone."""

from keyhole.learners.label_only.learner import LabelOnly

__all__ = ["LabelOnly"]
