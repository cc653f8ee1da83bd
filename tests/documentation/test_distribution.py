"""What the package is called where one installs it, and that every version number is the same."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import keyhole

ROOT = Path(__file__).parents[2]
# a command, a requirement with an extra, or a requirement in a list, under the name of another project
OLD_FORM = re.compile(
    r"pip3? install[^\n`]*[\s'\"]keyhole(?![\w./-])|\bkeyhole\\?\[\w|['\"]keyhole[<>=~]="
)


def list_texts() -> list[Path]:
    """What is under version control and is text."""
    tracked = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    kinds = {".py", ".pyi", ".md", ".toml", ".yml", ".yaml", ".txt", ".ipynb", ".cff", ".json", ""}
    paths = [ROOT / name for name in tracked.stdout.split("\n") if name]
    return [
        path for path in paths if path.suffix in kinds and path.is_file() and path != Path(__file__)
    ]


def find_old_forms(text: str) -> list[str]:
    return [found.group() for found in OLD_FORM.finditer(text)]


def test_nobody_is_sent_to_the_other_project() -> None:
    found = {path: forms for path in list_texts() if (forms := find_old_forms(path.read_text()))}
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "pip install keyhole",
        "pip install 'keyhole[torch]'",
        "python -m pip install -q keyhole==0.1",
        "needs keyhole[onnx]",
    ],
)
def test_the_old_form_is_noticed(line: str) -> None:
    assert find_old_forms(line)


@pytest.mark.parametrize(
    "line",
    [
        "pip install keyhole-ml",
        "pip install 'keyhole-ml[torch]'",
        "pip install -e '.[test]'",
        "import keyhole",
    ],
)
def test_the_name_of_today_is_left_alone(line: str) -> None:
    assert not find_old_forms(line)


def test_every_version_is_the_same() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["name"] == "keyhole-ml"
    assert project["project"]["dynamic"] == ["version"]  # hatchling reads src/keyhole/__init__.py
    assert project["tool"]["hatch"]["version"]["path"] == "src/keyhole/__init__.py"
    changes = re.search(r"^## (\S+) – (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert changes is not None
    citation = (ROOT / "CITATION.cff").read_text()
    assert changes.group(1) == keyhole.__version__
    assert f"version: {keyhole.__version__}\n" in citation
    assert f"date-released: {changes.group(2)}\n" in citation
