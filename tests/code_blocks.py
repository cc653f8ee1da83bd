"""Code blocks of Markdown pages, run as a reader would: from the first to the last, in one folder.

    python                     runs in the page's one namespace
    python title="mine.py"     is a file that the reader writes
    sh                         runs as typed, with the installed command
    text, json                 is looked at; queries that a panel shows are those just paid

A comment right above a block says what else is to be known: `<!-- exit 1 -->` is the exit code of
the block's last command, `<!-- not run: why; covered by tests/… -->` leaves it out.
"""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
SHOWN = ("text", "json", "toml")
NOT_RUN = re.compile(r"<!-- not run: .*covered by (\S+) -->")
EXIT = re.compile(r"<!-- exit (\d+) -->")
TITLE = re.compile(r'title="([^"]+)"')
PAID = re.compile(r"│ queries +([0-9,]+)")  # in the panel of a run
TIMEOUT = 300.0  # seconds; a machine may be busy


@dataclass(frozen=True)
class Block:
    """A fenced block: where it is, its language, its text, and the comment above it."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    comment: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def covered_by(self) -> str | None:
        """The test that stands for a block that is not run."""
        found = NOT_RUN.search(self.comment)
        return found[1] if found else None

    @property
    def exit_code(self) -> int:
        found = EXIT.search(self.comment)
        return int(found[1]) if found else 0


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """All blocks of code; an indented one has no language, which no page may have."""
    found, comment = [], ""
    for token in MarkdownIt().enable("table").parse(page.read_text()):
        if token.type in ("fence", "code_block"):
            language, _, rest = token.info.strip().partition(" ")
            title = TITLE.search(rest)
            line = (token.map or [0])[0] + 1
            name = title[1] if title else None
            found.append(Block(page, line, language, name, token.content, comment))
        comment = token.content if token.type == "html_block" else ""
    return found


def command_folder(folder: Path) -> Path:
    """A folder with the `keyhole` command: the installed one, or one that starts this package."""
    installed = Path(sys.executable).parent
    if (installed / "keyhole").exists():
        return installed
    shim = folder / ".bin" / "keyhole"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m keyhole "$@"\n')
    shim.chmod(0o755)
    return shim.parent


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join((str(command_folder(folder)), os.environ["PATH"]))
    source = str(ROOT / "src")
    return {**os.environ, "PATH": path, "PYTHONPATH": source, "NO_COLOR": "1", "COLUMNS": "100"}


def shell(text: str, folder: Path, code: int = 0) -> str:
    """Runs lines of shell as typed; the output, or an AssertionError that shows it."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as complained:
        running = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env=environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=complained,
            start_new_session=True,
        )
        try:
            ended = running.wait(TIMEOUT)
        finally:  # what the block left running in the background, too
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
        said.seek(0)
        complained.seek(0)
        output, errors = said.read(), complained.read()
    assert ended == code, f"exit {ended}\n{text}\n{output}{errors}"
    assert "Traceback" not in errors, errors
    return output


def run_workflow(text: str, folder: Path) -> None:
    """The steps of a workflow (GitHub's, or GitLab's) that call keyhole."""
    told = yaml.safe_load(text)
    if "jobs" in told:
        jobs = told["jobs"].values()
        steps = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    else:
        steps = [step for job in told.values() for step in job["script"]]
    called = [step for step in steps if step.startswith("keyhole ")]
    assert called, f"no step calls keyhole:\n{text}"
    for step in called:
        shell(f"export GITHUB_STEP_SUMMARY=summary.md\n{step}", folder)


def run_page(page: Path, folder: Path) -> int:
    """Runs what can be run, in the folder one stands in; the number of blocks run."""
    names: dict[str, object] = {"__name__": page.stem}
    count, printed = 0, ""
    for block in blocks(page):
        if block.language == "text" and (shown := PAID.findall(block.text)):
            assert shown == PAID.findall(printed), (
                f"{page.name}:{block.line} shows {shown}, but:\n{printed}"
            )
        if block.covered_by is not None or block.language in SHOWN:
            continue
        count += 1
        if block.title is not None:
            (folder / block.title).write_text(block.text)
            sys.modules.pop(Path(block.title).stem, None)  # of that name, from another page
            importlib.invalidate_caches()
        elif block.language == "sh":
            printed = shell(block.text, folder, block.exit_code)
        elif block.language == "yaml":
            run_workflow(block.text, folder)
        else:
            code = "\n" * block.line + block.text  # a traceback names the line of the page
            exec(compile(code, str(page), "exec"), names)
    return count
