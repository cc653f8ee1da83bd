"""The public surface: names that users and outside checks rely on."""

import inspect
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

import keyhole

PROMISED = [
    "open_oracle",
    "recover",
    "Outcome",
    "Attention",
    "Head",
    "Verdict",
    "Ledger",
    "Recovery",
    "load",
    "verify",
    "distance",
    "learn",
    "SingleHead",
    "LowRank",
    "MultiHead",
    "Transformer",
    "ReluNetworkLearner",
    "LabelOnly",
    "FromExamples",
    "Auto",
    "KeyholeError",
    "OracleError",
    "DomainError",
    "BudgetExhausted",
    "NotIdentifiable",
    "WrongFamily",
    "JournalMismatch",
    "Progress",
    "Oracle",
    "QueryBatch",
    "Spec",
    "Domain",
    "NoiseModel",
    "RetryPolicy",
    "OrthogonalHeads",
    "export",
    "to_torch",
    "to_onnx",
    "inside",
    "submodule",
    "layer_maps",
]


@pytest.mark.parametrize("name", PROMISED)
def test_promised_names_are_there(name: str) -> None:
    assert name in keyhole.__all__
    assert name in dir(keyhole)
    assert not inspect.ismodule(getattr(keyhole, name))


def test_every_public_name_loads() -> None:
    for name in keyhole.__all__:
        assert getattr(keyhole, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        keyhole.nothing  # noqa: B018


@pytest.mark.parametrize(
    "first", ["keyhole.Progress", "import keyhole.recovery", "from keyhole.recovery import recover"]
)
def test_the_file_does_not_hide_the_function(first: str) -> None:
    """Whatever is imported first, keyhole.recover is the function."""
    code = f"import keyhole\n{first}\nassert callable(keyhole.recover), keyhole.recover"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names_do_not_load_what_is_heavy() -> None:
    """What needs torch or onnx imports it when it is called."""
    heavy = ("torch", "onnx", "onnxruntime", "cvxpy", "distributed", "matplotlib", "httpx")
    code = "import keyhole, sys\nfor n in keyhole.__all__: getattr(keyhole, n)\n"
    code += f"loaded = set({heavy}) & set(sys.modules)\nassert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_error_is_a_keyhole_error() -> None:
    errors = [getattr(keyhole, name) for name in keyhole.__all__ if name[0].isupper()]
    errors = [e for e in errors if inspect.isclass(e) and issubclass(e, BaseException)]
    assert len(errors) >= 14
    assert all(issubclass(error, keyhole.KeyholeError) for error in errors)


@pytest.mark.parametrize(
    ("former", "name"),
    [("Precision", "NoiseModel"), ("Questions", "QueryBatch"), ("Patience", "RetryPolicy")],
)
def test_names_of_earlier_versions_still_work_and_warn(former: str, name: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"keyhole.{former} is now called keyhole.{name}"):
        value = getattr(keyhole, former)
    assert value is getattr(keyhole, name)
    assert former not in keyhole.__all__


def test_a_run_loads_the_learner_in_use() -> None:
    """Not all of them, and nothing of them before one is named."""
    code = "import keyhole, sys\nkeyhole.recover\n"
    code += "loaded = {m for m in sys.modules if m.startswith('keyhole.learners.')}\n"
    code += "assert loaded <= {'keyhole.learners.base', 'keyhole.learners.names'}, loaded\n"
    code += "from keyhole.models.random import attention\nimport numpy as np\n"
    code += "box = attention(np.random.default_rng(0), 4)\n"
    code += "assert keyhole.recover(box, keyhole.SingleHead()).outcome.name == 'RECOVERED'\n"
    code += (
        "packages = {m.split('.')[2] for m in sys.modules if m.startswith('keyhole.learners.')}\n"
    )
    code += "assert packages == {'base', 'names', 'single_head', 'published'}, packages"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_reference_is_written_from_the_list_of_names() -> None:
    root = Path(__file__).parents[2]
    script = run_path(str(root / ".ci" / "api"))
    page = (root / "docs" / "reference" / "api.md").read_text()
    assert page == script["build_page"](), "run: python .ci/api"
