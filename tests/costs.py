"""What a test costs, as measured, and which tests are therefore quick.

    KEYHOLE_COSTS=1 python -m pytest -q

measures every test that runs and writes what takes longer than a moment to tests/costs.json, by
file and by function. A test is `quick` unless it is listed there, is marked `slow`, or lies in a
folder whose tests start servers, browsers or builds. A new test is quick until it is measured.
"""

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent
TABLE = TESTS / "costs.json"
MOMENT = 0.4  # seconds, of all parameters of a function together, that a quick one may take
# a server, a browser, a build or a campaign, whatever it costs: folders and files
APART = ("browser", "end_to_end", "attack", "documentation/test_site.py", "unit/test_types.py")


def read_costs() -> dict[str, dict[str, float]]:
    """File below tests/ -> function -> seconds."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def is_apart(path: Path) -> bool:
    """Whether a file or a folder is left out of `make quick` as a whole."""
    return any(path.is_relative_to(TESTS / apart) for apart in APART)


def is_quick(item: pytest.Item, costs: dict[str, dict[str, float]]) -> bool:
    """Whether a test belongs to `make quick`."""
    file = item.path.relative_to(TESTS).as_posix()
    listed = getattr(item, "originalname", item.name) in costs.get(file, {})
    return not (listed or is_apart(item.path) or item.get_closest_marker("slow"))


def mark_quick(items: list[pytest.Item]) -> None:
    costs = read_costs()
    for item in items:
        if is_quick(item, costs):
            item.add_marker(pytest.mark.quick)


class Costs:
    """A plug-in that adds up what the tests of a run took; of several workers, at the controller."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file, _, name = report.nodeid.partition("::")
        self.seconds[file.removeprefix("tests/")][name.partition("[")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            TABLE.write_text(build_table(read_costs(), self.seconds))


def build_table(known: dict[str, dict[str, float]], measured: dict[str, Any]) -> str:
    """What was known of tests that did not run, and what was measured of those that did."""
    kept = {}
    for file in sorted({*known, *measured}):
        now = measured.get(file, {})
        costs = {name: s for name, s in known.get(file, {}).items() if name not in now} | now
        text = (TESTS / file).read_text() if (TESTS / file).exists() else ""
        there = {n: s for n, s in costs.items() if f"def {n.split('::')[-1]}(" in text}
        listed = {name: round(s, 1) for name, s in sorted(there.items()) if s > MOMENT}
        kept |= {file: listed} if listed else {}
    return json.dumps(kept, indent=1) + "\n"


def wants_measuring() -> bool:
    return bool(os.environ.get("KEYHOLE_COSTS"))
