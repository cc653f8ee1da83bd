"""Every script in examples/ runs and says what it should, and so does the notebook."""

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from code_blocks import ROOT, environment

SAYS = {
    "foreign_ffn_learner.py": "RECOVERED: score recovered to",
    "recover_a_torch_layer.py": "RECOVERED",
    "audit_a_model.py": "decimals",
    "audit_a_time_series_model.py": "RECOVERED after",
    "watch_an_endpoint.py": "ALARM: the box changed",
}


def test_all_examples_are_listed() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(SAYS)


@pytest.mark.parametrize("name", SAYS)
def test_example_runs(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name)],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout


NOTEBOOK = ROOT / "examples" / "recover_a_transformers_layer.ipynb"
SHOWN = ("RECOVERED", "head width", "the box agrees", "W_Q", "honest change")


def outputs(notebook: Any) -> str:
    """Everything its cells show, as HTML where there is some."""
    found = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    data = [out.get("data", {}) for out in found]
    return "\n".join(one.get("text/html", one.get("text/plain", "")) for one in data)


def test_the_notebook_runs_and_shows_what_is_saved_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient", reason="the notebook is run with the extra `test`")
    nbformat = pytest.importorskip("nbformat")
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    saved = outputs(notebook)
    with warnings.catch_warnings():  # of the kernel's transport, which is on this machine
        warnings.simplefilter("ignore")
        nbclient.NotebookClient(
            notebook, timeout=300, resources={"metadata": {"path": tmp_path}}
        ).execute()
    shown = outputs(notebook)
    for words in SHOWN:
        assert words in shown
        assert words in saved
