"""ReLU networks: where they bend along lines, and what is on both sides of a bend.

What happens, in order: line_search (all breakpoints of a line; noisy_line_search where answers are
less exact), gradients (beside the line) and hyperplanes (of single neurons); with these unbounded,
several_lines and bounded find all neurons, by the domain and the digits of the box. least_squares
fits them to random points, orientation says on which side each is active, hypothesis judges.
"""

from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.hypothesis import NetworkDiagnostics, derive_standard_errors
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner

__all__ = ["InputRegion", "NetworkDiagnostics", "ReluNetworkLearner", "derive_standard_errors"]
