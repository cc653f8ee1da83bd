import json
import pickle
import sys
from copy import deepcopy
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from keyhole.errors import Counterexample, FileFormatError, MissingExtra
from keyhole.models.files import save_model
from keyhole.models.random import attention
from keyhole.recovery import recover
from keyhole.results import RUN_FILE, Ledger, Outcome, Recovery, Verdict, load

MODEL = attention(np.random.default_rng(0), 3, bias=True)
EXAMPLE = Counterexample(np.ones((2, 3)), np.float64(1.5), np.array(2.5), "a reason")
REFUSED = Verdict(False, 7, 3, float("inf"), 1e-16, "It differs.", EXAMPLE)
AGREED = Verdict(True, 7, 3, 0.5, 1e-16, "It agrees.")


def recovery(**changes: Any) -> Recovery:
    parts: dict[str, Any] = {
        "outcome": Outcome.RECOVERED,
        "model": MODEL,
        "errors": MODEL,
        "verdict": AGREED,
        "ledger": Ledger({"value": 3, "score": 9}, 12.0, 4),
        "reason": "",
        "notes": ("One.", "Two."),
        "details": {"precision": "float64", "numbers": np.arange(2), "flag": np.bool_(True)},
    }
    return Recovery(**{**parts, **changes})


def test_parameters_become_the_rows_of_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a stand-in for pandas, which the tests do not install."""
    stand_in = ModuleType("pandas")
    monkeypatch.setattr(stand_in, "DataFrame", lambda columns: columns, raising=False)
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    columns = recovery().to_dataframe()
    assert {len(column) for column in columns.values()} == {9 + 3 + 3 + 1}
    first = columns["block"].index("heads.0.score") + 1
    assert columns["place"][first] == (0, 1)
    assert columns["value"][first] == MODEL.heads[0].score[0, 1]
    assert columns["standard error"][first] == MODEL.heads[0].score[0, 1]
    assert set(recovery(errors=None).to_dataframe()["standard error"]) == {None}
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtra, match=r"keyhole-ml\[tables\]"):
        recovery().to_dataframe()


def test_ledger_adds_up_and_cannot_be_changed() -> None:
    purposes = {"value": 3, "score": 9}
    ledger = Ledger(purposes, 12.0)
    purposes["score"] = 0
    assert ledger.paid == 12
    with pytest.raises(TypeError):
        ledger.by_purpose["score"] = 1  # type: ignore[index]
    with pytest.raises(FrozenInstanceError):
        ledger.floor = 1.0  # type: ignore[misc]


def test_an_outcome_shows_its_name_and_carries_advice() -> None:
    assert repr(Outcome.RECOVERED) == "Outcome.RECOVERED"
    assert all(outcome.value.endswith((".", ")")) for outcome in Outcome)


def test_save_and_load(tmp_path: Path) -> None:
    before = recovery()
    after = load(before.save(tmp_path / "run"))
    assert after.outcome is Outcome.RECOVERED
    assert after.ledger == before.ledger
    assert after.notes == before.notes
    assert after.details == {"precision": "float64", "numbers": [0, 1], "flag": True}
    assert vars(after.verdict) == vars(AGREED)
    for part in ("model", "errors"):
        for name, array in MODEL.to_arrays().items():
            assert np.array_equal(getattr(after, part).to_arrays()[name], array)


def test_a_counterexample_survives_saving_and_json_stays_standard(tmp_path: Path) -> None:
    before = recovery(outcome=Outcome.REJECTED, verdict=REFUSED, reason="differs")
    folder = before.save(tmp_path)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads((folder / RUN_FILE).read_text(), parse_constant=refuse)
    after = load(folder).verdict
    assert after.worst == np.inf
    assert after.counterexample.reason == "a reason"
    assert np.array_equal(after.counterexample.input, EXAMPLE.input)
    assert after.counterexample.box_answer == 1.5
    assert after.counterexample.model_answer == 2.5


def test_a_run_without_a_model_does_not_inherit_an_older_one(tmp_path: Path) -> None:
    recovery().save(tmp_path)
    recovery(outcome=Outcome.BUDGET_EXHAUSTED, model=None, errors=None, verdict=None).save(tmp_path)
    after = load(tmp_path)
    assert after.outcome is Outcome.BUDGET_EXHAUSTED
    assert after.model is None
    assert after.errors is None
    assert after.verdict is None


def test_load_takes_a_model_file_too(tmp_path: Path) -> None:
    assert repr(load(save_model(MODEL, tmp_path / "m"))) == repr(MODEL)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "[" * 100_000, '{"format": "keyhole-run-9"}', '{"format": "keyhole-run-1"}'],
    ids=["empty", "list", "object", "deep", "version", "bare"],
)
def test_a_damaged_run_gets_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    with pytest.raises(FileFormatError, match="not the folder of a keyhole run"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("outcome", "WON"),
        ("ledger", {"by_purpose": {"value": "many"}, "floor": 1.0, "replayed": 0}),
        ("ledger", 3),
        ("verdict", {"agrees": True}),
        ("notes", None),
    ],
)
def test_a_record_with_nonsense_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    recovery().save(tmp_path)
    record = json.loads((tmp_path / RUN_FILE).read_text())
    (tmp_path / RUN_FILE).write_text(json.dumps({**record, key: value}))
    with pytest.raises(FileFormatError, match="not the folder of a keyhole run"):
        load(tmp_path)


def test_an_empty_folder_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(FileFormatError, match=RUN_FILE):
        load(tmp_path)


def test_runs_saved_without_trace_still_load(tmp_path: Path) -> None:
    found = recover(attention(np.random.default_rng(0), 4))
    assert found.run["seed"] == 0
    assert found.run["learner"] == "Auto()"
    found.save(tmp_path)
    assert load(tmp_path).trace == found.trace
    record = json.loads((tmp_path / "recovery.json").read_text())
    del record["run"], record["trace"]
    (tmp_path / "recovery.json").write_text(json.dumps(record))
    old = load(tmp_path)
    assert old.trace is None
    assert dict(old.run) == {}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("notes",), [3]),
        (("notes",), "text"),
        (("reason",), None),
        (("ledger", "by_purpose"), {"value": -1}),
        (("ledger", "by_purpose"), {"value": "3"}),
        (("ledger", "floor"), "many"),
        (("ledger", "replayed"), 1.5),
        (("verdict", "agrees"), "yes"),
        (("verdict", "queries"), None),
        (("verdict", "bound"), 7),
        (("details",), []),
        (("run",), {"width": "wide"}),
        (("run",), {"domain": {"max_norm": [1]}}),
        (("run",), {"seconds": {}}),
        (("outcome",), "WON"),
    ],
)
def test_values_of_wrong_types_are_refused(
    tmp_path: Path, place: tuple[str, ...], value: object
) -> None:
    verdict = Verdict(True, 4, 0, 0.5, 1e-9, "All agree.")
    Recovery(Outcome.RECOVERED, MODEL, None, verdict, Ledger({"value": 3})).save(tmp_path)
    record = json.loads((tmp_path / RUN_FILE).read_text())
    inside = record
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    (tmp_path / RUN_FILE).write_text(json.dumps(record))
    with pytest.raises(FileFormatError, match="not the folder of a keyhole run"):
        load(tmp_path)


def test_results_can_be_copied_and_pickled() -> None:
    run = recovery()
    for copy in (pickle.loads(pickle.dumps(run)), deepcopy(run)):
        assert copy.outcome is run.outcome
        assert dict(copy.ledger.by_purpose) == dict(run.ledger.by_purpose)
        assert copy.verdict.bound == run.verdict.bound
        with pytest.raises(TypeError):
            copy.ledger.by_purpose["more"] = 1


def test_results_tell_themselves_in_words_and_in_a_notebook() -> None:
    assert str(AGREED) == "The box agrees. It agrees."
    assert str(recovery()).startswith("RECOVERED after")
    shown = replace(AGREED, bound="<script>")._repr_html_()
    assert "the box agrees" in shown
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert "RECOVERED" in recovery()._repr_html_()


def test_what_an_agreement_allows_to_claim_in_numbers() -> None:
    assert replace(AGREED, queries=60).fraction == pytest.approx(0.0487, abs=1e-4)
    assert REFUSED.fraction == 1.0
