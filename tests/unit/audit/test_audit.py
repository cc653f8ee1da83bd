"""Cells, sweeps, summaries and pictures of an audit, at small width."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from rich.console import Console

import keyhole
from keyhole.audit import sweep
from keyhole.audit.cells import Cell, Plan, run_cell
from keyhole.audit.picture import checked_plot, draw, show
from keyhole.audit.protections import DEFAULT, Protection, change
from keyhole.audit.summary import Row, advice, rows, to_json
from keyhole.audit.sweep import run_audit
from keyhole.models.random import attention

WIDTH = 6
SECRET = attention(np.random.default_rng(0), WIDTH)
PLAN = Plan(("float64", "bfloat16", "decimals:6", "decimals:2", "noise:1e-2"), (1, 8))


@pytest.fixture(scope="module")
def audit():
    return run_audit(SECRET, PLAN)


def test_protections_are_read_and_refused():
    assert [Protection.parse(text).name for text in DEFAULT] == list(DEFAULT)
    assert Protection.parse("bfloat16").level == 8
    for text in ("float65", "decimals:x", "decimals:-1", "noise:0", "noise", "label:3", ""):
        with pytest.raises(keyhole.InvalidArgument, match="expected one of"):
            Protection.parse(text)


def test_change_is_relative_to_the_answers():
    honest = np.array([3.0, -4.0, 3.0, -4.0, 5.0])
    assert change(honest, honest) == 0.0
    assert change(honest, 1.1 * honest) == pytest.approx(0.1)
    labels = change(np.random.default_rng(0).standard_normal(20000), np.zeros(20000))
    assert labels == pytest.approx(1.0)
    normal = np.random.default_rng(0).standard_normal(20000)
    # a sign explains 2/pi of the variance of a normal number
    assert change(normal, (normal > 0).astype(float)) == pytest.approx(
        np.sqrt(1 - 2 / np.pi), abs=0.01
    )


def test_a_plan_checks_itself():
    for wrong in ({"multiples": (0,)}, {"repeats": 0}, {"max_norm": -1.0}, {"protections": ()}):
        with pytest.raises(keyhole.InvalidArgument):
            Plan(**wrong)


def test_vector_models_have_no_label():
    vector = attention(np.random.default_rng(1), 4, outputs=2)
    cells, notes = Plan(("float64", "label"), (1, 8)).cells(vector)
    assert {cell.protection for cell in cells} == {"float64"}
    assert "vector" in notes[0]


def test_a_cell_depends_on_its_name_alone():
    cell = Cell("noise:1e-2", True, 2, 0)
    first = run_cell(SECRET.to_arrays(), PLAN, cell)
    assert first == run_cell(SECRET.to_arrays(), PLAN, cell)
    other = run_cell(SECRET.to_arrays(), PLAN, Cell("noise:1e-2", True, 2, 1))
    assert other["parameter_error"] != first["parameter_error"]


def test_errors_follow_the_protection(audit):
    table = {(row.bounded, row.protection, row.multiple): row for row in rows(audit)}
    exact = table[True, "float64", 1]
    assert exact.parameter_error < 1e-12
    assert exact.cost == 0.0
    assert exact.queries <= 1.3 * (WIDTH**2 + WIDTH) + 20
    fine, coarse = table[True, "decimals:6", 1], table[True, "decimals:2", 1]
    assert fine.parameter_error < 1e-2 * coarse.parameter_error
    assert fine.cost < 1e-2 * coarse.cost
    # longer tokens make additive protections useless
    assert table[False, "decimals:2", 1].parameter_error < 1e-6 * coarse.parameter_error
    # noise averages out: eight times the queries, a third of the error
    noisy = [table[True, "noise:1e-2", multiple] for multiple in (1, 8)]
    assert noisy[1].parameter_error < 0.6 * noisy[0].parameter_error
    assert noisy[1].queries > 4 * noisy[0].queries
    assert noisy[0].cost == pytest.approx(1e-2, rel=0.2)
    for row in table.values():
        assert row.function_error < 0.2


def test_more_runs_are_averaged_where_one_needs_few_queries(audit):
    table = {(row.bounded, row.protection, row.multiple): row for row in rows(audit)}
    once, often = table[False, "bfloat16", 1], table[False, "bfloat16", 8]
    assert often.queries > 4 * once.queries
    assert often.parameter_error < once.parameter_error


def test_a_stopped_audit_continues_without_repeating(tmp_path, monkeypatch, audit):
    store = tmp_path / "audit.jsonl"

    def stop(step):
        if step.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(keyhole.Interrupted, match="3 of 20 cells"):
        run_audit(SECRET, PLAN, store=store, progress=stop)
    with store.open("a") as file:
        file.write('{"key": "bounded/flo')  # killed while writing
    ran = []
    monkeypatch.setattr(sweep, "run_cell", lambda a, p, c: ran.append(c.key) or run_cell(a, p, c))
    found = run_audit(SECRET, PLAN, store=store)
    assert len(ran) == 17
    assert found.resumed == 3
    assert found.cells == audit.cells
    again = run_audit(SECRET, PLAN, store=store)
    assert len(ran) == 17
    assert again.cells == audit.cells
    assert len(store.read_text().splitlines()) == 21


def test_a_store_of_another_audit_is_refused(tmp_path):
    store, small = tmp_path / "audit.jsonl", Plan(("float64",), (1,), unbounded=False)
    run_audit(SECRET, small, store=store)
    kept = store.read_text()
    other = attention(np.random.default_rng(2), WIDTH)
    for model, plan in ((other, small), (SECRET, Plan(("float32",), (1,), unbounded=False))):
        with pytest.raises(keyhole.JournalMismatch):
            run_audit(model, plan, store=store)
    assert store.read_text() == kept
    foreign = tmp_path / "notes.txt"
    foreign.write_text("my notes\n")
    with pytest.raises(keyhole.JournalMismatch):
        run_audit(SECRET, small, store=foreign)
    assert foreign.read_text() == "my notes\n"


def row(name, function_error, cost, bounded=True):
    return Row(bounded, name, name, 16, 1000, "RECOVERED", function_error, function_error, cost)


def test_advice_names_the_cheapest_protection_that_helps():
    table = [row("float64", 1e-14, 0.0), row("noise:1e-1", 0.2, 0.1), row("label", 0.5, 0.6)]
    assert "noise:1e-1 helps" in advice(table, 1.0)
    assert "20%" in advice(table, 1.0)
    assert "would not help" in advice([*table, row("noise:1e-1", 1e-9, 0.1, False)], 1.0)
    assert "None of these protections" in advice(table[:1], 1.0)
    unfinished = advice([row("label", None, 0.6)], 1.0)
    assert "did not finish" in unfinished
    assert "gave a copy" not in unfinished
    assert "1,000 queries were the fewest that gave a copy" in advice(table, 1.0)


def test_table_plot_and_json(audit, tmp_path):
    console = Console(width=120)
    with console.capture() as captured:
        console.print(show(audit))
    text = captured.get()
    assert "tokens of any size" in text
    assert "2 decimals" in text
    for suffix in ("png", "svg"):
        assert draw(audit, tmp_path / f"audit.{suffix}").stat().st_size > 5000
    with pytest.raises(keyhole.InvalidArgument, match="a plot ends in"):
        draw(audit, tmp_path / "audit.gif")
    record = json.loads(json.dumps(to_json(audit)))
    assert len(record["cells"]) == 20
    assert len(record["rows"]) == 20
    assert record["advice"]


def test_several_heads_need_their_learner():
    several = attention(np.random.default_rng(3), 4, heads=2)
    if find_spec("keyhole.learners.multi_head.learner") is None:
        with pytest.raises(keyhole.InvalidArgument, match="2 heads"):
            run_audit(several, Plan(("float64",), (1,), unbounded=False))


def test_a_plot_without_the_library_that_draws_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(keyhole.MissingExtra, match=r"pip install 'keyhole-ml\[pictures\]'"):
        checked_plot(tmp_path / "plot.png")
