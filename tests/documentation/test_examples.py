"""Every script in examples/ runs and says what it should."""

import subprocess
import sys
from pathlib import Path

import pytest

from code_blocks import ROOT, environment

SAYS = {
    "foreign_ffn_learner.py": "score recovered to",
    "recover_a_torch_layer.py": "RECOVERED",
    "audit_a_model.py": "decimals",
    "watch_an_endpoint.py": "differs",
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
