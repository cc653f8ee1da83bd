"""The journal in trouble: a clear error, the file left as it was, nothing recorded lost."""

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import keyhole
from keyhole.models.random import attention
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.wrappers import journal as module
from keyhole.oracles.wrappers.journal import Journal
from keyhole.oracles.wrappers.parts import grid

NOBODY = 65534
WIDTH = 6


def secret():
    return attention(np.random.default_rng(0), WIDTH)


def asked(n=20, seed=0):
    return keyhole.QueryBatch.of(np.random.default_rng(seed).standard_normal((n, 2, WIDTH)), "test")


class Counted(Oracle):
    """Answers in parts of four, and fails when told to."""

    def __init__(self, fail_after=None):
        self.spec, self.model = Spec(WIDTH), secret()
        self.seen, self.fail_after, self.batches = 0, fail_after, []

    def ask(self, queries):
        return np.concatenate([answers for _, answers in self.stream(queries)])

    def stream(self, queries):
        for start, part in reversed(grid(queries, 4)):
            if self.fail_after is not None and self.seen >= self.fail_after:
                raise keyhole.OracleError("enough")
            self.seen += len(part)
            self.batches.append(len(part))
            yield start, self.model(part.tokens())


def recorded(path):
    """A journal with the answers of one whole run."""
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=path)
    return recovery, Path(path).read_bytes()


def test_parts_that_arrived_are_kept_when_the_next_fails(tmp_path):
    box, path = Counted(fail_after=12), tmp_path / "j"
    first = Journal(box, path, {})
    with pytest.raises(keyhole.OracleError):
        first.ask(asked())
    first.release()
    box.fail_after = None
    second = Journal(box, path, {})
    answers = second.ask(asked())
    second.release()
    np.testing.assert_array_equal(
        answers, np.concatenate([secret()(p.tokens()) for _, p in grid(asked(), 4)])
    )
    assert (second.replayed, second.asked, box.seen) == (12, 8, 20)
    assert set(box.batches) == {4}  # the gaps were asked on the same grid


def test_a_disk_without_room_stops_before_anything_is_paid(tmp_path, monkeypatch):
    box, path = Counted(), tmp_path / "j"
    journal = Journal(box, path, {})
    journal.ask(asked(seed=1))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=module.ROOM - 1))
    with pytest.raises(keyhole.JournalError, match="disk is full"):
        journal.ask(asked(seed=2))
    journal.release()
    assert box.seen == 20
    with pytest.raises(keyhole.JournalError, match="disk is full"):
        Journal(box, path, {})
    monkeypatch.undo()
    again = Journal(box, path, {})
    again.ask(asked(seed=1))
    again.ask(asked(seed=2))
    again.release()
    assert (again.replayed, again.asked, box.seen) == (20, 20, 40)


FILL = """
import sys, numpy as np, resource, signal, keyhole
from keyhole.models.random import attention
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.RLIM_INFINITY))
try:
    keyhole.recover(learner=keyhole.SingleHead(), box=attention(np.random.default_rng(0), 40), journal=sys.argv[1])
except keyhole.JournalError as error:
    print(error)
    sys.exit(7)
"""


def test_a_disk_that_fills_up_while_writing(tmp_path):
    """The system refuses to let the file grow; afterwards, with room, the run goes on."""
    path = tmp_path / "j"
    ended = subprocess.run(
        [sys.executable, "-c", FILL, str(path)], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 7, ended.stderr
    assert "nothing recorded is lost" in ended.stdout
    model = attention(np.random.default_rng(0), 40)
    whole = keyhole.recover(learner=keyhole.SingleHead(), box=model, journal=path)
    assert whole.ledger.replayed > 0
    assert whole.ledger.paid == keyhole.recover(learner=keyhole.SingleHead(), box=model).ledger.paid


@contextlib.contextmanager
def small_disk(size):
    folder = tempfile.mkdtemp()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
    )
    if mounted.returncode:
        os.rmdir(folder)
        pytest.skip("mounting a small disk needs root")
    try:
        yield Path(folder)
    finally:
        subprocess.run(["umount", folder], check=True)
        os.rmdir(folder)


def test_a_really_full_disk(monkeypatch):
    with small_disk("128k") as folder:
        monkeypatch.setattr(module, "ROOM", 0)  # or it would be refused at once
        monkeypatch.setattr(Journal, "_check_room", lambda self: None)
        model = attention(np.random.default_rng(0), 120)
        with pytest.raises(keyhole.JournalError, match="disk is full") as caught:
            keyhole.recover(learner=keyhole.SingleHead(), box=model, journal=folder / "j")
        assert caught.value.recovery is None
        before = (folder / "j").stat().st_size
        copy = Path(shutil.copytree(folder, tempfile.mkdtemp(), dirs_exist_ok=True))
        whole = keyhole.recover(learner=keyhole.SingleHead(), box=model, journal=copy / "j")
        assert before > 0
        assert whole.ledger.replayed >= 512
        shutil.rmtree(copy)


@pytest.fixture
def unprivileged():
    """A folder nobody may write to, and a process without the power to do so all the same."""
    folder = Path(tempfile.mkdtemp())
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@contextlib.contextmanager
def as_nobody():
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_read_only_folder(unprivileged):
    unprivileged.chmod(0o555)
    with as_nobody(), pytest.raises(keyhole.JournalError, match="cannot be written"):
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=unprivileged / "j")
    assert list(unprivileged.iterdir()) == []


def test_a_read_only_file(unprivileged):
    _, before = recorded(unprivileged / "j")
    (unprivileged / "j").chmod(0o444)
    unprivileged.chmod(0o555)
    with as_nobody(), pytest.raises(keyhole.JournalError, match="cannot be written"):
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=unprivileged / "j")
    assert (unprivileged / "j").read_bytes() == before


def test_no_folder(tmp_path):
    with pytest.raises(keyhole.JournalError, match="not a folder"):
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=tmp_path / "no" / "j")
    with pytest.raises(keyhole.JournalError):
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=tmp_path)


@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9])
def test_a_truncated_journal(tmp_path, share):
    path = tmp_path / "j"
    _, whole = recorded(path)
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(keyhole.JournalError, match=r"damaged|not a journal"):
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=path)
    assert path.read_bytes() == whole[: int(len(whole) * share)]


def test_a_flipped_bit_anywhere_is_never_a_wrong_result(tmp_path):
    """Bytes of answers, headers and pages are hit in turn: an error, or the same result."""
    path = tmp_path / "j"
    good, whole = recorded(path)
    outcomes = {"error": 0, "same": 0}
    for place in range(0, len(whole), 397):
        damaged = bytearray(whole)
        damaged[place] ^= 0x10
        path.write_bytes(damaged)
        for extra in tmp_path.glob("j-*"):
            extra.unlink()
        try:
            found = keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=path)
        except keyhole.JournalError:
            outcomes["error"] += 1
        else:
            outcomes["same"] += 1
            assert keyhole.distance(found.model, good.model) == 0.0
    assert outcomes["error"] > 3  # most of a small file is empty space


@pytest.mark.parametrize("content", [b"just some text, longer than a hundred bytes" * 4, b"short"])
def test_a_file_that_is_no_journal(tmp_path, content):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(keyhole.JournalError, match="not a journal"):
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("log", [False, True])
def test_the_database_of_another_program_is_not_written_to(tmp_path, log):
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as other:
        if log:
            other.execute("PRAGMA journal_mode = WAL")
        other.execute("CREATE TABLE customers (name TEXT)")
        other.commit()
        if log:  # the table stands in the log only, as after a kill of that program
            copies = [
                shutil.copy(name, tmp_path / f"copy{name.name}")
                for name in tmp_path.glob("other.db*")
            ]
            path = tmp_path / "copyother.db"
            assert len(copies) == 3
    before = {name: name.read_bytes() for name in (path, Path(f"{path}-wal")) if name.exists()}
    with pytest.raises(keyhole.JournalError, match="another program"):
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=path)
    assert {name: name.read_bytes() for name in before} == before


HOLD = """
import sys, numpy as np, keyhole
from keyhole.models.random import attention
from keyhole.oracles.wrappers.journal import Journal
box = keyhole.open_oracle(attention(np.random.default_rng(0), 6))
journal = Journal(box, sys.argv[1], {})
print("held", flush=True)
sys.stdin.readline()
"""


def test_two_processes_on_one_journal(tmp_path):
    path = tmp_path / "j"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline().strip() == "held"
        with pytest.raises(keyhole.JournalError, match="another process"):
            keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=path)
    finally:
        holder.kill()  # the lock goes with the process
        holder.communicate()
    assert (
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=path).outcome
        is keyhole.Outcome.RECOVERED
    )


def test_another_box_learner_or_seed(tmp_path):
    path = tmp_path / "j"
    recorded(path)
    with pytest.raises(keyhole.JournalMismatch, match="seed"):
        keyhole.recover(learner=keyhole.SingleHead(), box=secret(), journal=path, seed=5)
    with pytest.raises(keyhole.JournalMismatch, match="box"):
        keyhole.recover(
            learner=keyhole.SingleHead(),
            box=attention(np.random.default_rng(7), WIDTH),
            journal=path,
        )
