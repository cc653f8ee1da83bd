"""`keyhole bench`: a table, JSON, or a document."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keyhole.bench import students
from keyhole.cli import commands
from keyhole.errors import InvalidArgument

SECONDS = ["--seconds", "0.2"]


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(students, "find_spec", lambda name: None)


def test_a_layer_of_a_size_becomes_a_table_or_json() -> None:
    arguments = ["bench", "--width", "4", "--heads", "1", *SECONDS]
    shown = CliRunner().invoke(commands.app, arguments)
    assert shown.exit_code == 0
    assert "One head of width 4: 20 unknowns" in shown.output
    assert "pip install 'keyhole-ml[torch]'" in " ".join(shown.output.split())
    record = json.loads(CliRunner().invoke(commands.app, [*arguments, "--json"]).stdout)
    assert record["unknowns"] == 20
    assert [row["method"] for row in record["methods"]] == ["Keyhole", "least squares (SciPy)"]


def test_a_suite_leaves_its_document(tmp_path: Path) -> None:
    arguments = ["bench", "single-head", "--quick", *SECONDS, "--out", str(tmp_path)]
    shown = CliRunner().invoke(commands.app, arguments)
    assert shown.exit_code == 0, shown.output
    assert {file.name for file in tmp_path.iterdir()} == {"single-head.json", "single-head.md"}


def test_an_unknown_suite_is_a_sentence() -> None:
    with pytest.raises(InvalidArgument, match="no suite 'double-head'; there are single-head"):
        CliRunner().invoke(commands.app, ["bench", "double-head"], catch_exceptions=False)
