import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from keyhole.cli.commands import load_template
from keyhole.cli.main import app
from keyhole.errors import InvalidArgument


def test_recover_like_a_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from tests.templates import AttentionHeads, randomise\n"
        "def make_model():\n    return AttentionHeads(4, 2)\n"
        "box = randomise(make_model(), 3)\n"
    )
    (tmp_path / "like_this.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["recover", "like_this:box", "--width", "4", "--like", "like_this:make_model"]
    places = ["--out", str(tmp_path / "run"), "--report", str(tmp_path / "run.html")]
    ended = CliRunner().invoke(app, [*words, *places, "--json"])
    assert ended.exit_code == 0, ended.output
    assert json.loads(ended.stdout)["outcome"] == "RECOVERED"
    shown = CliRunner().invoke(app, words)
    assert "worst error" in shown.output
    assert "error of weight" not in shown.output  # of which there are several


def test_what_is_no_template() -> None:
    with pytest.raises(InvalidArgument, match="neither a torch module"):
        load_template("math:pi", "auto")
    with pytest.raises(InvalidArgument, match="leave out --learner"):
        load_template("math:pi", "mlp")
    with pytest.raises(InvalidArgument, match="raised TypeError"):
        load_template("tests.templates:randomise", "auto")
