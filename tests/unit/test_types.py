"""What a type checker sees of the package, in a file as a user writes it."""

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]
WRONG = """
import keyhole

box = keyhole.open_oracle(lambda tokens: tokens.sum(axis=(1, 2)), width=4)
run = keyhole.recover(box, keyhole.SingleHead())
keyhole.recover(3, bugdet=5)  # wrong
keyhole.recoverr(box)  # wrong
keyhole.recover(box, keyhole.SingleHead)  # wrong
keyhole.MultiHead(haeds=2)  # wrong
keyhole.recover(box, budget="5000")  # wrong
run.ledger.payed  # wrong
keyhole.Outcome.RECOVRED  # wrong
total: str = run.ledger.paid  # wrong
keyhole.open_oracle(box, max_lenght=3)  # wrong
keyhole.open_oracle("https://host", rate="fast")  # wrong
"""
RIGHT = """
import numpy as np
import keyhole

box = keyhole.open_oracle("https://host/v2", width=4, rate=5.0, token_env="HOST_TOKEN")
run = keyhole.recover(box, keyhole.MultiHead(heads=2), budget=5000, journal="run.journal", throw=False)
if run.outcome is keyhole.Outcome.RECOVERED and run.verdict is not None:
    paid: int = run.ledger.paid
    bound: str = run.verdict.bound
try:
    keyhole.learn(np.zeros((3, 2, 4)), np.zeros((3, 2, 4)), keyhole.FromExamples(heads=1))
except keyhole.KeyholeError as error:
    findings: tuple[str, ...] = error.findings
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What mypy --strict says of both files and of the examples, without the project's settings."""
    folder = tmp_path_factory.mktemp("types")
    (folder / "wrong.py").write_text(WRONG)
    (folder / "right.py").write_text(RIGHT)
    paths = [folder / "wrong.py", folder / "right.py", *sorted((ROOT / "examples").glob("*.py"))]
    options = ["--strict", "--config-file=", f"--cache-dir={folder}", "--hide-error-context"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MYPYPATH", str(ROOT / "src"))
        said, complained, _ = api.run([*options, *map(str, paths)])
    assert not complained
    return said


def test_ten_slips_are_ten_errors(said: str) -> None:
    found = [int(line) for line in re.findall(r"wrong\.py:(\d+): error:", said)]
    lines = [n for n, line in enumerate(WRONG.splitlines(), 1) if line.endswith("# wrong")]
    assert found == lines, said
    assert len(lines) == 10


def test_the_right_use_and_the_examples_have_no_error(said: str) -> None:
    assert set(re.findall(r"(\w+)\.py:\d+: error:", said)) == {"wrong"}, said
