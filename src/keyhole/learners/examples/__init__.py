"""A multi-head layer from labelled examples, without a query."""

from keyhole.learners.examples.data import read_examples
from keyhole.learners.examples.head_count import Progress
from keyhole.learners.examples.hypothesis import ExamplesDiagnostics, Fitted
from keyhole.learners.examples.learner import FromExamples

__all__ = ["ExamplesDiagnostics", "Fitted", "FromExamples", "Progress", "read_examples"]
