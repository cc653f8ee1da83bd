"""The comparison with what a user would otherwise pick."""

import json
from importlib import util
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from keyhole import bench
from keyhole.cli import commands
from keyhole.errors import InvalidArgument

SECONDS = 0.3


def test_every_method_gets_as_many_queries_and_is_judged_alike() -> None:
    heard: list[str] = []
    rows = bench.run_bench(bench.Size(6, 2), seconds=SECONDS, told=heard.append)
    assert [row.method for row in rows] == heard
    assert heard[:2] == ["Keyhole", "least squares"]
    assert len({row.queries for row in rows}) == 1
    first, *others = rows
    assert first.ended == "RECOVERED"
    assert first.parameters < 1e-8
    assert first.answers < 1e-8
    assert all(0 < row.parameters < np.inf for row in others)


def test_least_squares_finds_one_small_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline is a fair one: where it can succeed, it does."""
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    rows = bench.run_bench(bench.Size(4, 1), seconds=np.inf)  # it settles by itself
    fit = next(row for row in rows if row.method == "least squares")
    assert fit.ended == "settled"
    assert fit.parameters < 1e-6


def test_without_torch_there_are_no_students(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert list(bench.baselines()) == ["least squares"]


@pytest.mark.skipif(util.find_spec("torch") is None, reason="needs torch")
def test_with_torch_there_are_two_students() -> None:
    assert len(bench.baselines()) == 3


@pytest.mark.parametrize("wrong", [{"width": 1}, {"heads": 0}])
def test_sizes_must_make_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="at least"):
        bench.Size(**wrong)
    with pytest.raises(InvalidArgument, match="above 0"):
        bench.run_bench(bench.Size(), seconds=0.0)


def test_the_command_shows_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    arguments = ["bench", "--width", "4", "--heads", "1", "--seconds", str(SECONDS)]
    shown = CliRunner().invoke(commands.app, arguments)
    assert shown.exit_code == 0
    assert "One head of width 4: 20 unknowns" in shown.output
    assert "Keyhole" in shown.output
    assert "pip install 'keyhole[torch]'" in " ".join(shown.output.split())
    record = json.loads(CliRunner().invoke(commands.app, [*arguments, "--json"]).stdout)
    assert record["unknowns"] == 20
    assert [row["method"] for row in record["methods"]] == ["Keyhole", "least squares"]
