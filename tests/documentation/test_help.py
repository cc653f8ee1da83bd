"""What `--help` says works: every example, completion, and the advice on missing extras."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import transformers
from typer.main import get_command

from code_blocks import environment, shell
from keyhole.cli.commands import app
from keyhole.errors import MissingExtra

MODELS = """
import numpy as np
from keyhole.models.random import attention

head = attention(np.random.default_rng(5), 64, rank=2)
inner, outer = np.random.default_rng(6).standard_normal((2, 60, 5))
def logits(prompts):
    return (inner[prompts[:, -1]] + np.tanh(inner[prompts[:, 0]])) @ outer.T
"""
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
EXAMPLES = [
    pytest.param(example, id=example)
    for command in COMMANDS.values()
    for example in re.findall(r"`(keyhole [^`]+)`", command.epilog or "")
]
ELSEWHERE = re.compile(r"https?://")


def test_every_command_shows_an_example_of_itself() -> None:
    assert len(EXAMPLES) >= len(COMMANDS)
    for name, command in COMMANDS.items():
        assert f"`keyhole {name} " in (command.epilog or "")
        assert command.help


def test_the_list_of_commands_waits_for_nothing_heavy() -> None:
    code = """import sys
from keyhole.cli.main import main
sys.argv = ["keyhole", "--help"]
try:
    main()
finally:
    heavy = {"rich", "numpy", "httpx", "markdown_it"} & set(sys.modules)
    assert not heavy, heavy
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name}  +{command.help.split()[0]}", told.stdout, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the examples assume it: a package of the reader's, a saved run, examples, a
    model of `transformers`."""
    where = tmp_path_factory.mktemp("help")
    (where / "mypackage").mkdir()
    (where / "mypackage" / "__init__.py").touch()
    (where / "mypackage" / "models.py").write_text(MODELS)
    rng = np.random.default_rng(0)
    X, W, V = rng.standard_normal((40, 3, 4)), *rng.standard_normal((2, 4, 4))
    P = np.exp(X @ W @ X.transpose(0, 2, 1))
    np.savez(where / "examples.npz", inputs=X, outputs=P / P.sum(2, keepdims=True) @ X @ V)
    shell("keyhole recover mypackage.models:head --width 64 --out run", where)
    shell("keyhole demo --width 4 --out small", where)
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8,
        vocab_size=20, initializer_range=0.3,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(where / "my-bert")
    return where


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_works_as_typed(example: str, folder: Path, tmp_path: Path) -> None:
    name, *words = shlex.split(example)[1:]
    assert COMMANDS[name].make_context(name, list(words)).params
    if ELSEWHERE.search(example) or name == "serve":
        return  # asks somebody else's machine, or waits: it must be understood, no more
    if name == "audit":  # the same on a small model
        example = example.replace("run/", "small/") + " --multiples 1 --protections float64"
    shell(example, shutil.copytree(folder, tmp_path / "mine"))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_shown(name: str) -> None:
    command = COMMANDS[name]
    context = command.make_context(name, [], resilient_parsing=True)
    assert "Usage" in command.get_usage(context)


# the shell is the one named, not the one that happens to run the tests
NAMED = "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1"


@pytest.mark.parametrize("name", ["bash", "zsh", "fish"])
def test_completion_is_offered(name: str, folder: Path) -> None:
    script = shell(f"{NAMED} keyhole --show-completion {name}", folder)
    assert "keyhole" in script
    assert "_KEYHOLE_COMPLETE" in script


def completed(words: str, folder: Path) -> list[str]:
    """What bash would offer after these words."""
    asked = {"_KEYHOLE_COMPLETE": "complete_bash", "COMP_WORDS": words}
    asked["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run(
        ["bash", "-c", "keyhole"],
        cwd=folder,
        env={**environment(folder), **asked},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


def test_completion_completes(folder: Path) -> None:
    assert completed("keyhole re", folder) == ["recover", "report"]
    assert "--journal" in completed("keyhole recover --j", folder)
    assert completed("keyhole recover --learner low", folder) == ["low-rank"]


def test_completion_can_be_installed(folder: Path, tmp_path: Path) -> None:
    shell(f"{NAMED} HOME={tmp_path} keyhole --install-completion bash", folder)
    assert any(path.is_file() for path in tmp_path.rglob("*keyhole*"))


MISSING = {
    "torch": (
        "torch",
        "from keyhole.oracles.torch import open_torch\n"
        "from keyhole.oracles.base import Domain\nopen_torch(None, 4, Domain(), None)",
    ),
    "export to torch": ("torch", "keyhole.to_torch(model)"),
    "onnx": ("onnx", "keyhole.export(model, 'model.onnx')"),
    "onnx file": ("onnxruntime", "open('a.onnx', 'w').close(); keyhole.open_oracle('a.onnx')"),
    "convex": (
        "cvxpy",
        "keyhole.recover(keyhole.open_oracle(model), keyhole.LowRank('convex', rank=1))",
    ),
    "distributed": ("distributed", "keyhole.open_oracle(model, cluster='tcp://127.0.0.1:1')"),
    "serve": (
        "uvicorn",
        "from keyhole.serving.server import Bind, run, service\n"
        "model_file = keyhole.export(model, 'm.safetensors')\n"
        "run(service('m.safetensors'), Bind())",
    ),
}
EXTRA = {"onnxruntime": "onnx", "cvxpy": "convex", "uvicorn": "serve"}


@pytest.mark.parametrize("what", MISSING)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    what: str, tmp_path: Path
) -> None:
    module, code = MISSING[what]
    start = (
        f"import sys\nsys.modules['{module}'] = None\n"  # importing it raises ImportError
        "import numpy as np, keyhole\nfrom keyhole.models.random import attention\n"
        "model = attention(np.random.default_rng(0), 4, rank=1, outputs=OUTPUTS)\n"
    ).replace("OUTPUTS", "4" if "export" in what else "None")
    done = subprocess.run(
        [sys.executable, "-c", start + code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert MissingExtra.__name__ in last, done.stderr
    assert f"pip install 'keyhole-ml[{EXTRA.get(module, module)}]'" in last


def test_on_the_command_line_it_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['onnxruntime'] = None\n")
    (tmp_path / "a.onnx").touch()
    known = environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "keyhole", "check", "a.onnx"],
        cwd=tmp_path,
        env={**known, "PYTHONPATH": f"{tmp_path}:{known['PYTHONPATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "keyhole: an ONNX file needs onnxruntime, which is not installed: "
        "pip install 'keyhole-ml[onnx]'"
    ]
