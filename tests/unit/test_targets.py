"""Strings that name a box: what is wrong with them is told before anything heavy is imported."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import keyhole
from code_blocks import environment
from keyhole.targets import check_format, check_target, weight_names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    (tmp_path / "mine.py").write_text("raise RuntimeError('was imported')")
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    weights = {"bert.encoder.layer.0.attention.self.query.weight": np.zeros(2)}
    save_file(weights, tmp_path / "bert" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing:here", "no module named 'nothing'; run from"),
        ("mien:layer", "no module named 'mien'; did you mean mine"),
        ("mine.py:layer", "name what is in it as mine:layer"),
        ("mine:layers[x]", "no file, no URL"),
        ("hf:nowhere", "no config.json"),
        ("hf:bert#encoder.layr.0", r"did you mean encoder\.layer\.0"),
    ],
)
def test_a_wrong_name_is_told(folder: Path, name: str, message: str) -> None:
    with pytest.raises(keyhole.KeyholeError, match=message):
        check_target(name)


@pytest.mark.parametrize(
    "name",
    [
        "http://host/x",
        "mine:model.encoder.layer.0.attention.self",
        "mine:layers[0]",
        "mine:make()",
        "hf:bert",
        "hf:bert#encoder.layer.0",
        "hf:bert#encoder.layer[0].attention.self",
    ],
)
def test_a_right_name_is_let_through_without_importing_it(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of another test
    check_target(name)
    assert "mine" not in sys.modules


def test_weights_that_cannot_be_read_are_left_to_their_reader(folder: Path) -> None:
    (folder / "bert" / "model.safetensors").write_bytes(b"\xff" * 20)
    assert weight_names(folder / "bert") == []
    check_target("hf:bert#whatever")


def test_number_formats_are_known_by_name() -> None:
    check_format("bfloat16")
    with pytest.raises(keyhole.InvalidArgument, match="float64, float32"):
        check_format("floot")


def test_a_bad_string_imports_neither_numpy_nor_torch(folder: Path) -> None:
    code = (
        "import sys; sys.argv = ['keyhole', 'recover', 'nothing:here']\n"
        "from keyhole.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert stop.code == 2\n"
        "assert not {'numpy', 'scipy', 'torch'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_options_of_modules_are_given_by_name(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    (folder / "calls.py").write_text(
        "def last(module, tokens):\n    return module(tokens[:, -1])\n"
    )
    box = keyhole.open_oracle(
        torch.nn.Linear(3, 2), adapter="calls:last", dtype="float32", device="cpu"
    )
    assert box.spec.width == 3
    for options, message in (
        ({"dtype": "floot"}, "dtype must be one of"),
        ({"device": "nowhere"}, "the device nowhere cannot be used"),
        ({"adapter": 3}, "adapter must be a function"),
    ):
        with pytest.raises(keyhole.InvalidArgument, match=message):
            keyhole.open_oracle(torch.nn.Linear(3, 2), **options)
