"""The shape of the code base, checked."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "keyhole"
FILES = sorted(SOURCE.rglob("*.py"))
HEAVY = ("torch", "onnx", "onnxruntime", "cvxpy", "matplotlib", "dask", "distributed")
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "misc"}


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def test_the_contracts_can_break(tmp_path: Path) -> None:
    """A learner that imports the truth is noticed, even through another module."""
    package = tmp_path / "keyhole"
    for path in FILES:
        target = package / path.relative_to(SOURCE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text())
    (package / "measurement" / "peek.py").write_text("from keyhole.oracles import open\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
        "from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "keyhole.measurement.peek -> keyhole.oracles.open" in done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_file_is_named_for_what_it_holds_and_does_not_print(path: Path) -> None:
    parts = {*path.relative_to(SOURCE).parts[:-1], path.stem}
    assert not parts & EMPTY_NAMES
    tree = ast.parse(path.read_text())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = {func.id for func in calls if isinstance(func, ast.Name)}
    if "cli" not in parts:
        assert "print" not in names
    assert not names & {"eval", "exec", "exit", "quit"}
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert not imported & {"pickle", "dill", "joblib", "marshal", "shelve"}
    assert not any(
        isinstance(node, ast.ExceptHandler) and node.type is None for node in ast.walk(tree)
    )


def imported_by(statement: str) -> set[str]:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}


def test_importing_keyhole_is_light() -> None:
    assert not imported_by("import keyhole") & {*HEAVY, "numpy", "scipy", "rich", "typer"}


def test_recovering_needs_no_extra() -> None:
    """Every public name, without the frameworks that only some boxes need."""
    use = "import keyhole\nfor name in keyhole.__all__: getattr(keyhole, name)"
    assert not imported_by(use) & set(HEAVY)


def test_the_command_line_starts_light() -> None:
    assert not imported_by("import keyhole.cli.main, keyhole.cli.commands") & {*HEAVY, "numpy"}


def test_make_bench_runs_every_script_and_no_script_demands_an_argument() -> None:
    scripts = {path.stem: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    scripts = {name: text for name, text in scripts.items() if "__main__" in text}
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    (measured,) = (line for line in makefile.splitlines() if line.startswith("MEASURED :="))
    assert set(measured.split()[2:]) == set(scripts)
    for name, text in scripts.items():
        for call in ast.walk(ast.parse(text)):
            if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("add_argument"):
                words = ast.unparse(call)
                assert "'--" in words or "nargs='?'" in words or "nargs='*'" in words, (name, words)
                assert "required=True" not in words
