import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import keyhole
from keyhole.models.files import save_model
from keyhole.models.random import attention
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.wrappers.batch import Batcher
from keyhole.planning import survey

MODULE = """
import numpy as np
from keyhole.models.random import attention
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
head = attention(np.random.default_rng(0), 5)
number = 3
oracle = FunctionOracle(head, Spec(5))
class Holder:
    inner = head
class Box:
    width = 5
    def __call__(self, tokens): return tokens[:, 0, 0]
def make(): return head
def broken(): raise RuntimeError("no")
class Lazy:
    @property
    def part(self): raise KeyError("not loaded")
lazy = Lazy()
"""
TOKENS = np.random.default_rng(0).standard_normal((4, 3, 5))
ASKED = keyhole.QueryBatch.of(TOKENS, "test")


@pytest.fixture
def boxes_module(tmp_path, monkeypatch):
    (tmp_path / "some_boxes.py").write_text(MODULE)
    (tmp_path / "raising_boxes.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "script_boxes.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("some_boxes", None)


@pytest.mark.parametrize(
    "name", ["some_boxes:head", "some_boxes:Holder.inner", "some_boxes:make()"]
)
def test_an_attribute_of_a_module(boxes_module, name):
    secret = attention(np.random.default_rng(0), 5)
    np.testing.assert_array_equal(keyhole.open_oracle(name).ask(ASKED), secret(TOKENS))


def test_a_class_is_called_on_request_only(boxes_module):
    assert keyhole.open_oracle("some_boxes:Box()").spec.width == 5
    with pytest.raises(keyhole.InvalidArgument, match="is a class"):
        keyhole.open_oracle("some_boxes:Box")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_boxes:head", "no module"),
        ("some_boxes:tail", "has no 'tail'"),
        ("some_boxes:number", "cannot open a int"),
        ("some_boxes:broken()", "raised RuntimeError"),
        ("raising_boxes:x", "at import"),
        ("script_boxes:x", "SystemExit: 0; keep what only a script does under"),
        ("some_boxes:lazy.part", "raised KeyError: 'not loaded'"),
        ("nothing at all", "no file, no URL"),
        ("model.safetensors", "no file, no URL"),
        ("some_boxes:head; import os", "no file, no URL"),
    ],
)
def test_names_that_lead_nowhere(boxes_module, name, message):
    with pytest.raises(keyhole.InvalidArgument, match=message):
        keyhole.open_oracle(name)


def test_a_saved_model_and_a_saved_run(tmp_path):
    secret = attention(np.random.default_rng(0), 5)
    save_model(secret, tmp_path / "model.safetensors")
    box = keyhole.open_oracle(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(box.ask(ASKED), secret(TOKENS))
    keyhole.recover(learner=keyhole.SingleHead(), box=secret).save(tmp_path / "run")
    box = keyhole.open_oracle(str(tmp_path / "run"))
    np.testing.assert_allclose(box.ask(ASKED), secret(TOKENS), rtol=1e-12)


def test_paths_that_hold_no_model(tmp_path):
    (tmp_path / "weights.pt").write_bytes(b"x")
    (tmp_path / "text.safetensors").write_text("no")
    with pytest.raises(keyhole.FileFormatError, match="no code"):
        keyhole.open_oracle(tmp_path / "weights.pt")
    with pytest.raises(keyhole.FileFormatError, match="safetensors"):
        keyhole.open_oracle(tmp_path / "text.safetensors")
    with pytest.raises(keyhole.FileFormatError, match="folder"):
        keyhole.open_oracle(tmp_path)


def test_an_option_the_box_does_not_know_is_an_error(tmp_path):
    with pytest.raises(keyhole.InvalidArgument, match="no option timeout"):
        keyhole.open_oracle(attention(np.random.default_rng(0), 3), timeout=3)
    with pytest.raises(keyhole.InvalidArgument, match=r"no option tiemout; it has model, version"):
        keyhole.open_oracle("http://127.0.0.1:1/", tiemout=3)
    with pytest.raises(keyhole.InvalidArgument, match="no option rate"):
        keyhole.open_oracle(FunctionOracle(len, keyhole.Spec(2)), rate=1)


@pytest.mark.parametrize(
    "stated",
    [
        {"max_norm": 1.0},
        {"max_length": 2},
        {"low": -1.0, "high": 1.0},
        {"vocabulary": np.eye(5)},
        {"precision": keyhole.NoiseModel(step=0.1)},
        {"width": 4},
    ],
)
def test_what_is_said_about_an_oracle_is_in_its_spec_or_an_error(boxes_module, stated):
    oracle = FunctionOracle(attention(np.random.default_rng(0), 5), keyhole.Spec(5))
    for target in (oracle, "some_boxes:oracle", [oracle, oracle]):
        with pytest.raises(keyhole.InvalidArgument, match=next(iter(stated))):
            keyhole.open_oracle(target, **stated)
    assert keyhole.open_oracle(oracle, width=5) is oracle


@pytest.mark.parametrize("batch", [0, -3])
def test_a_batch_must_be_positive(batch):
    with pytest.raises(keyhole.InvalidArgument, match="batch"):
        keyhole.open_oracle(attention(np.random.default_rng(0), 3), batch=batch)


def test_batch_limits_what_the_box_gets_at_once():
    sizes = []
    box = keyhole.open_oracle(lambda x: sizes.append(len(x)) or x[:, 0, 0], width=5, batch=3)
    assert isinstance(box, Batcher)
    box.ask(ASKED)
    assert sizes == [3, 1]


class Door(FunctionOracle):
    """Remembers whether it was closed."""

    closed = False

    def close(self):
        object.__setattr__(self, "closed", True)


def test_what_was_opened_for_a_call_is_closed_and_nothing_else(monkeypatch):
    secret, doors = attention(np.random.default_rng(0), 5), []

    def open_url(*_, **__):
        doors.append(Door(secret, keyhole.Spec(5)))
        return doors[-1]

    monkeypatch.setattr("keyhole.oracles.open._open_url", open_url)
    mine = Door(secret, keyhole.Spec(5))
    for box in ("http://a", ["http://a", "http://b"], ["http://a", mine], mine):
        keyhole.recover(box, keyhole.SingleHead())
        keyhole.verify(box, secret)
        survey(box)
    assert len(doors) == 3 * (1 + 2 + 1)
    assert all(door.closed for door in doors)
    assert not mine.closed
    with pytest.raises(keyhole.InvalidArgument):
        keyhole.verify("http://a", attention(np.random.default_rng(0), 4))
    assert doors[-1].closed


LAZY = """
import sys, keyhole, keyhole.oracles.open, keyhole.recovery, keyhole.cli.serve
heavy = {"torch", "onnx", "onnxruntime", "httpx", "dask", "distributed", "uvicorn"}
print(sorted(heavy & set(sys.modules)))
"""


def test_nothing_heavy_is_imported_before_it_is_needed():
    run = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("absent", "call", "command"),
    [
        ("onnxruntime", "open_oracle(sys.argv[1])", "keyhole-ml[onnx]"),
        ("distributed", "open_oracle(len, 3, cluster='tcp://x')", "keyhole-ml[distributed]"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(tmp_path, absent, call, command):
    (tmp_path / "m.onnx").write_bytes(b"x")
    code = (
        f"import sys; sys.modules[{absent!r}] = None\n"
        f"import keyhole\nfrom keyhole import open_oracle\n"
        f"try:\n    {call}\nexcept keyhole.MissingExtra as error:\n    print(error)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.onnx")], capture_output=True, text=True
    )
    assert f"pip install '{command}'" in run.stdout, run.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine.py", "mine:attribute"),
        ("mine.py:head", "mine:head"),
        ("a/b.py:head", "a.b:head"),
        ("/nowhere/box.py", "box:attribute, from /nowhere; there is no file /nowhere/box.py"),
        (__file__, f"{Path(__file__).stem}:attribute, from {Path(__file__).parent}"),
    ],
)
def test_a_file_of_code_is_named_as_a_module(name: str, said: str) -> None:
    with pytest.raises(keyhole.InvalidArgument, match="is Python code") as raised:
        keyhole.open_oracle(name)
    assert said in str(raised.value)
