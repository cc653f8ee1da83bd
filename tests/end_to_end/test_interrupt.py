"""Ctrl-C in a process of its own: once keeps what was paid for, twice stops at once."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import keyhole

SOURCE = str(Path(keyhole.__file__).parents[1])
SINGLE = ("--learner", "single-head")
WAIT = 120.0  # seconds: the machine may be busy
BOXES = '''
import time
from pathlib import Path

import numpy as np

from keyhole.models.random import attention

secret = attention(np.random.default_rng(5), 24, bias=True)
log = Path("log")
pause = Path("pause")


def slow(tokens):
    """Says when a batch comes and when it is answered; takes its time while `pause` exists."""
    with log.open("a") as file:
        file.write(f"in {len(tokens)}\\n")
    until = time.monotonic() + 100.0
    while len(tokens) > 100 and pause.exists() and time.monotonic() < until:
        time.sleep(0.01)
    with log.open("a") as file:
        file.write(f"out {len(tokens)}\\n")
    return secret(tokens)


slow.width = 24
'''


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    """A run that is inside its first large batch."""
    (folder / "mine.py").write_text(BOXES)
    (folder / "pause").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "keyhole", "recover", "mine:slow", *SINGLE, *options],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + WAIT
    while not (folder / "log").exists() or max(batches(folder, "in"), default=0) <= 100:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


def batches(folder: Path, word: str) -> list[int]:
    lines = (folder / "log").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith(word)]


def test_once_finishes_the_batch_and_the_command_shown_continues(tmp_path: Path) -> None:
    process = started(tmp_path, "--journal", "my run.journal", "--out", "run")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    first = next(line for line in process.stderr if line.strip())
    assert "finishing the" in first
    assert process.poll() is None
    (tmp_path / "pause").unlink()
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 130, errors
    assert "INTERRUPTED" in output
    assert "Traceback" not in errors
    assert batches(tmp_path, "in") == batches(tmp_path, "out")
    paid = sum(batches(tmp_path, "in"))
    assert f"stopped after {paid:,} queries, kept in my run.journal" in errors
    command = shlex.split(errors.strip().splitlines()[-1])
    assert command[:3] == ["keyhole", "recover", "mine:slow"]
    again = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    recovery = keyhole.load(tmp_path / "run")
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.ledger.replayed == paid
    assert recovery.ledger.paid == sum(batches(tmp_path, "in"))


def test_twice_stops_at_once(tmp_path: Path) -> None:
    process = started(tmp_path, "--journal", "run.journal")
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    assert "again stops at once" in next(line for line in process.stderr if line.strip())
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 130, errors
    assert (tmp_path / "pause").exists()  # the batch never ended
    assert len(batches(tmp_path, "in")) == len(batches(tmp_path, "out")) + 1
    assert "INTERRUPTED" in output
    assert "Continue with" in errors


def test_without_a_journal_it_says_what_would_have_helped(tmp_path: Path) -> None:
    process = started(tmp_path, "--json")
    process.send_signal(signal.SIGINT)
    (tmp_path / "pause").unlink()
    output, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 130, errors
    assert '"outcome": "INTERRUPTED"' in output
    assert "not kept" in errors
    assert "--journal run.journal" in errors


@pytest.mark.parametrize("sound", [True, False])
def test_the_handler_is_given_back(sound: bool) -> None:
    from keyhole.cli.interrupt import Stop

    before = signal.getsignal(signal.SIGINT)
    try:
        with Stop():
            assert signal.getsignal(signal.SIGINT) is not before
            if not sound:
                raise RuntimeError
    except RuntimeError:
        pass
    assert signal.getsignal(signal.SIGINT) is before
