"""Whole models whose architecture is given as a torch module."""

from keyhole.learners.template.learner import FromTemplate

__all__ = ["FromTemplate"]
