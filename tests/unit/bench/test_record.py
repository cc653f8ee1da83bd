"""A document of results is made from its JSON, and from nothing else."""

from pathlib import Path

import pytest

from keyhole.bench.cases import SUITES
from keyhole.bench.measure import Row, Slope
from keyhole.bench.record import (
    make_record,
    read_record,
    render_markdown,
    render_summary,
    write_record,
)
from keyhole.errors import FileFormatError

RESULTS = Path(__file__).parents[3] / "docs" / "results"


def test_a_record_survives_its_file_and_becomes_a_document(tmp_path: Path) -> None:
    rows = [
        Row("d = 8", "Keyhole", 84, 72.0, 1e-15, 1e-15, 0.1, 0.05, 0.3, 2, 2, "RECOVERED"),
        Row("d = 8", "student (Adam)", 84, None, float("inf"), 1.0, 5.0, None, None, 0, 2, "x"),
        Row("d = 8", "another", 1000, quoted="a paper, 2026"),
    ]
    growth = [Slope("in d", (8, 16, 32), (84.0, 290.0, 1100.0), 2.0, (0.1, 0.2, 0.4))]
    record = make_record("single-head", "One head", rows, growth, [4, 5], 5.0)
    data, page = write_record(record, tmp_path)
    assert read_record(data).rows[0] == rows[0]
    assert read_record(data).rows[1].parameters is None  # JSON knows no infinity
    text = page.read_text()
    assert "| d = 8 | Keyhole | 84 | 1.17 | 1e-15 |" in text
    assert "another (quoted: a paper, 2026)" in text
    assert "| in d | 8, 16, 32 | 84, 290, 1,100 | 1.92 | 2 | 1.00 | – |" in text
    assert "![One head: growth](single-head.svg)" in text
    assert "measured, 1.92" in (tmp_path / "single-head.svg").read_text()
    assert "2 seeds (4 … 5)" in text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"what": 1}], "growth": []}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FileFormatError, match="no record of a suite"):
        read_record(tmp_path / "x.json")


def test_documents_and_their_figures_agree() -> None:
    for data in sorted(RESULTS.glob("*.json")):
        page = data.with_suffix(".md")
        assert page.read_text("utf-8") == render_markdown(read_record(data)), page.name


def test_the_table_of_all_suites_is_made_from_their_figures() -> None:
    paths = [RESULTS / f"{name}.json" for name in SUITES]
    table = render_summary([read_record(path) for path in paths if path.exists()])
    assert len(table.splitlines()) > len(SUITES)
    for page in (RESULTS / "index.md", RESULTS.parents[1] / "README.md"):
        assert table in page.read_text("utf-8"), f"{page.name}: run .ci/summary"
