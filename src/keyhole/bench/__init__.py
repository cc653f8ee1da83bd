"""The whole field in one table: suites of boxes, Keyhole on each, and what one would use instead.

Everything is measured side by side in one run. Holds the truth, which is what copies are compared
with: nothing that learns may import this.
"""

from keyhole.bench.cases import SUITES, Case, Size
from keyhole.bench.measure import Row, run_case, run_suite
from keyhole.bench.record import Record, read_record, render_markdown, write_record

__all__ = [
    "SUITES",
    "Case",
    "Record",
    "Row",
    "Size",
    "read_record",
    "render_markdown",
    "run_case",
    "run_suite",
    "write_record",
]
