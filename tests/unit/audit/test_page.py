"""The page of an audit."""

from pathlib import Path

import numpy as np
import pytest

from keyhole.audit.cells import Plan
from keyhole.audit.page import build_page, judge, write_audit
from keyhole.audit.sweep import Audit, run_audit
from keyhole.models.random import attention


@pytest.fixture(scope="module")
def audit() -> Audit:
    plan = Plan(protections=("float64", "noise:1e-1"), multiples=(1, 2), unbounded=False)
    return run_audit(attention(np.random.default_rng(0), 3), plan)


def test_a_page_names_the_model_the_verdict_and_draws_the_errors(audit: Audit) -> None:
    page = build_page(audit)
    assert (page.tone, page.badge) == ("bad", "exposed")
    assert page.sections[0].texts[0].startswith("1 head of width 3, answering with one number")
    (chart,) = page.sections[1].charts
    assert "float64" in [series.name for series in chart.series]
    table = page.sections[2].table
    assert table is not None
    assert len(table.rows) == 4


def test_the_verdict_follows_the_best_copy() -> None:
    assert judge(None)[:2] == ("fair", "no copy yet")
    assert [judge(error)[1] for error in (1e-9, 0.05, 0.5)] == ["exposed", "partly exposed", "kept"]


def test_written(audit: Audit, tmp_path: Path) -> None:
    text = write_audit(audit, tmp_path / "audit.html").read_text("utf-8")
    assert "Error against queries" in text
    assert "<svg" in text
