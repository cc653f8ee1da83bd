import html
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import keyhole
from keyhole.models.random import attention
from keyhole.report.html import TEMPLATES, render, write_report
from keyhole.report.pictures import CELLS
from keyhole.results import Ledger, Outcome, Recovery
from recoveries import KINDS, claimed, recovery, wide


def words(text: str) -> str:
    """What a reader sees."""
    body = re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.S)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", body)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_page_of_its_own(kind: str) -> None:
    text = render(recovery(kind))
    assert text.startswith("<!doctype html>")
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    assert "url(" not in text
    assert recovery(kind).outcome.name.replace("_", " ").lower() in words(text)
    identities = re.findall(r'\sid="([^"]+)"', text)
    assert len(identities) == len(set(identities))


def test_verdict_and_numbers_come_first() -> None:
    found = recovery("one head")
    seen = words(render(found, "my run").partition("<main")[2])
    order = [
        "recovered",
        "The box is one attention head of width 12",
        f"{found.ledger.paid:,}",
        "Parameters",
        "Singular values",
        "Error bars",
        "The floor is the number of unknowns",
        "Error against queries asked",
        "Arithmetic",
        "keyhole.load('my run')",
        "keyhole.SingleHead(",
        "seed=0",
    ]
    places = [seen.index(part) for part in order]
    assert places == sorted(places)
    for purpose, count in found.ledger.by_purpose.items():
        assert re.search(rf"{re.escape(purpose)} {count:,} ", seen)
    assert "float64" in seen


def test_how_to_read_scores_stands_above_them_and_nowhere_else() -> None:
    told = [
        kind for kind in KINDS if "columns to the one that looks" in words(render(recovery(kind)))
    ]
    shown = [kind for kind in KINDS if hasattr(recovery(kind).model, "heads")]
    assert set(shown) <= set(told)
    assert "network" not in told


def test_a_rejection_shows_the_query_and_claims_no_error() -> None:
    seen = words(render(recovery("rejected")))
    assert "Counterexample" in seen
    assert "The box answers" in seen
    assert "Parameters of the rejected fit" in seen
    assert "Relative error" not in seen


def test_without_a_model_there_is_nothing_to_load() -> None:
    seen = words(render(recovery("budget")))
    assert "keyhole.load" not in seen
    assert "Raise it" in seen
    assert "budget=30" in seen


def test_names_are_escaped() -> None:
    evil = "</script><script>alert(1)</script>"
    text = render(
        replace(
            recovery("rejected"),
            reason=evil,
            notes=(evil,),
            details={evil: evil},
            run={"box": evil, "learner": evil, "command": evil},
        )
    )
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 5


def test_calls_of_nested_learners_can_be_copied() -> None:
    seen = words(render(recovery("transformer")))
    assert "keyhole.Transformer(ffn=keyhole.ReluNetworkLearner(" in seen


def test_large_models_stay_small_files() -> None:
    assert len(render(wide(512)).encode()) < 1_000_000
    assert len(render(wide(512, heads=4, outputs=512)).encode()) < 3_000_000
    model = attention(np.random.default_rng(0), 64, heads=80, rank=2, outputs=64)
    text = render(claimed(model, model))
    assert len(text.encode()) < 3_000_000
    assert "17 more parts" in words(text)
    assert 2 * CELLS * 4 * 4 / 3 < 2_000_000


def test_what_a_run_did_not_record_is_left_out() -> None:
    seen = words(render(Recovery(Outcome.INTERRUPTED, None, None, None, Ledger())))
    assert "stopped" in seen
    assert "Repeat the run" not in seen


def test_a_layer_learned_from_examples_asked_nothing() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 3, 4))
    scores = X @ rng.standard_normal((4, 4)) @ X.transpose(0, 2, 1)
    P = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    found = keyhole.learn(X, P @ X @ rng.standard_normal((4, 4)))
    seen = words(render(replace(found, run={"command": "keyhole learn examples.npz"})))
    assert "Examples 40" in seen
    assert "keyhole learn examples.npz" in seen
    assert "keyhole.recovery(" not in seen
    assert "Worst deviation" not in seen


def test_written_whole(tmp_path: Path) -> None:
    path = write_report(recovery("budget"), tmp_path / "new" / "r.html")
    assert path.read_text("utf-8") == render(recovery("budget"))
    assert [file.name for file in path.parent.iterdir()] == ["r.html"]


def test_a_saved_run_has_the_same_report(tmp_path: Path) -> None:
    for kind in ("one head", "several heads", "rejected", "budget"):
        recovery(kind).save(tmp_path / kind)
        assert render(keyhole.load(tmp_path / kind)) == render(recovery(kind))


def test_templates_are_part_of_the_package() -> None:
    assert {path.name for path in TEMPLATES.iterdir()} == {
        "figures.html",
        "frame.html",
        "language_model_audit.html",
        "page.html",
        "report.html",
        "report.css",
        "report.js",
    }
    assert TEMPLATES.is_relative_to(Path(keyhole.__file__).parent)


def test_a_report_needs_no_library_that_draws(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    model = attention(np.random.default_rng(0), 4)
    assert "<canvas" in render(Recovery(Outcome.UNVERIFIED, model, None, None, Ledger()))
