"""Answers on disk, so that nothing paid for is lost or paid twice, requests under way apart.

One SQLite file. A row holds answers with the digest of their queries, the place in the run where
they were asked, and a checksum. On a later run with the same box, learner and seed the same
queries come in the same order: what is recorded is answered from the file, after its digest is
checked, and what is not goes to the box. A process killed at any moment leaves a valid file.

A request is one call of the box: a part of a batch where the oracle answers in parts (`stream`:
an HTTP request, a call of a function with `batch=`), else the whole chunk. What a request brought
is written before the next one goes out, so a process that is killed loses the requests under way.
Two things are done less often where they would take more than a small share of the time
(`Rationed`): forcing to the disk, so that a loss of power may also cost the last hundred
milliseconds or so, and writing where the box is a function of this process, so that a kill may
cost the calls of the last few milliseconds. However a run ends otherwise, all that was answered is
written.
"""

import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array, digest
from keyhole.errors import JournalError, JournalMismatch, OracleError
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import LIMITS, QueryBatch
from keyhole.oracles.wrappers.count import senders
from keyhole.oracles.wrappers.parts import assembled
from keyhole.oracles.wrappers.validate import checked_answers

FORMAT = "keyhole-journal-2"
APPLICATION = 0x6B65796A  # "keyj": marks the file as ours, so that no other database is written to
SCHEMA = """
CREATE TABLE IF NOT EXISTS header (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    position INTEGER NOT NULL, start INTEGER NOT NULL, purpose TEXT NOT NULL,
    queries BLOB NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, data BLOB NOT NULL,
    checksum BLOB NOT NULL, PRIMARY KEY (position, start)
);
"""
INSERT = "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
SHARE = 1 / 48  # of the time of a run that writing may take, and as much waiting for the disk
ASIDE = 2**40  # position of the first record about limits: a run that meets no refusal asks none
ROOM = 8 * 2**20  # bytes that must be free before a query is paid for: several chunks
LOCKED = "another process uses it; wait for it, or name another journal"
FULL = "the disk is full; make room and run again, nothing recorded is lost"
READ_ONLY = "the file or its folder cannot be written; name another place"
DAMAGED = "the file is damaged or not a journal; it was left as it is. Move it away to start afresh"
UNREADABLE = (sqlite3.Error, OSError, UnicodeError)  # names in a damaged file may be no text
FOREIGN = "is a database of another program, or a journal of an earlier version"


@dataclass
class Rationed:
    """Something that is done each time, unless it has just been done and would take more than its
    share of the time since."""

    ended: float = -float("inf")  # when it was last done
    took: float = 0.0  # seconds

    def due(self, now: float) -> bool:
        return now - self.ended >= self.took / SHARE

    def done(self, start: float, end: float) -> None:
        self.ended, self.took = end, end - start


class Journal(Wrapper):
    """Answers from the file what the file knows; records what the box answers."""

    def __init__(self, inner: Oracle, path: str | Path, header: Mapping[str, Any]) -> None:
        self.inner, self.path = inner, Path(path)
        self.replayed = 0  # queries answered from the file
        self.asked = 0  # queries that went to the box
        self.live = False  # while set, queries go past the file to the box
        self._position = 0  # of the record that is read or written
        self._next = {False: 0, True: ASIDE}  # positions to come; True: of records about limits
        self._largest = 0  # bytes of a record
        self._writing, self._forcing = Rationed(), Rationed()
        self._forces = False  # whether SQLite is told to wait for the disk
        self._sent = any(True for _ in senders(inner))  # to an endpoint, not called in this process
        try:
            self._file = self._open({"format": FORMAT, **header})
        except UNREADABLE as error:
            raise self._failure(error) from error

    def _open(self, header: Mapping[str, Any]) -> sqlite3.Connection:
        if not self.path.parent.is_dir():
            raise JournalError(f"{self.path.parent} is not a folder: create it, or name another")
        self._refuse_foreign()
        self._check_room()
        if not self.path.exists():
            self.path.touch(0o600)  # for its owner alone; SQLite's other files take after it
        file = sqlite3.connect(self.path, timeout=0.1, isolation_level=None)
        try:
            # one process per journal: the lock is held until close, and freed by the system if
            # the process dies
            file.execute("PRAGMA locking_mode = EXCLUSIVE")
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")
            file.execute("BEGIN IMMEDIATE")
            self._check(file)
            file.execute(f"PRAGMA application_id = {APPLICATION}")
            for statement in SCHEMA.split(";"):
                file.execute(statement)
            self._compare(file, header)
            file.execute("COMMIT")
        except BaseException:
            file.close()
            raise
        return file

    def _refuse_foreign(self) -> None:
        """Looks at the file, without a way to write to it, before SQLite may."""
        if not self.path.is_file():
            return
        with self.path.open("r+b") as file:  # and so finds out whether it may be written
            head = file.read(100)
        if not head:
            return
        if head[:16] != b"SQLite format 3\x00" or len(head) < 100:
            raise JournalError(f"journal {self.path}: {DAMAGED}")
        if int.from_bytes(head[68:72], "big") == APPLICATION:
            return
        # a process killed early leaves mark and records in the log beside the file
        log = self.path.with_name(f"{self.path.name}-wal").exists()
        look = f"{self.path.absolute().as_uri()}?mode=ro{'' if log else '&immutable=1'}"
        with contextlib.closing(sqlite3.connect(look, timeout=0.1, uri=True)) as file_as_it_is:
            self._refuse_unmarked(file_as_it_is)

    def _refuse_unmarked(self, file: sqlite3.Connection) -> None:
        tables = file.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        mark = file.execute("PRAGMA application_id").fetchone()[0]
        if mark != APPLICATION and (mark or tables):
            raise JournalError(f"{self.path} {FOREIGN}: name another journal")

    def _check(self, file: sqlite3.Connection) -> None:
        self._refuse_unmarked(file)
        found = [str(text) for (text,) in file.execute("PRAGMA quick_check(3)")]
        if found != ["ok"]:
            raise JournalError(f"journal {self.path}: {'; '.join(found)[:300]}: {DAMAGED}")

    def _compare(self, file: sqlite3.Connection, header: Mapping[str, Any]) -> None:
        known = dict(file.execute("SELECT name, value FROM header").fetchall())
        wanted = {name: json.dumps(value) for name, value in header.items()}
        if not known:
            file.executemany("INSERT INTO header VALUES (?, ?)", wanted.items())
        for name, value in known.items():
            if wanted.get(name, value) != value:
                raise JournalMismatch(
                    f"{self.path} was written with {name} = {value}, this run has "
                    f"{name} = {wanted[name]}: name another journal, or repeat the first call"
                )

    def _check_room(self) -> None:
        """Better no query than an answer that cannot be kept."""
        if shutil.disk_usage(self.path.parent).free < ROOM + 4 * self._largest:
            raise JournalError(f"journal {self.path}: {FULL}")

    def _failure(self, error: Exception) -> JournalError:
        text = str(error)
        if "locked" in text:
            advice = LOCKED
        elif "full" in text or "No space" in text:
            advice = FULL
        elif any(sign in text for sign in ("readonly", "unable to open", "ermission", "ad-only")):
            advice = READ_ONLY
        elif "disk I/O error" in text:
            advice = "the disk failed or is full; run again, nothing recorded is lost"
        else:
            advice = DAMAGED
        return JournalError(f"journal {self.path}: {text}: {advice}")

    def ask(self, queries: QueryBatch) -> Array:
        if self.live:
            return self.inner.ask(queries)
        aside = queries.purpose == LIMITS
        self._position = self._next[aside]
        self._next[aside] += 1  # also where the box refuses: it will again when the run is repeated
        try:
            known = dict(self._recorded(queries))
            self.replayed += sum(len(part) for part in known.values())
            for start, stop in _gaps(len(queries), known):
                self._check_room()
                known |= self._ask_box(queries, start, stop)
        except UNREADABLE as error:
            raise self._failure(error) from error
        return assembled(len(queries), known)

    def _ask_box(self, queries: QueryBatch, start: int, stop: int) -> dict[int, Array]:
        """The answers to queries that are not recorded; written as they arrive."""
        known: dict[int, Array] = {}
        unwritten: dict[int, Array] = {}
        try:
            for offset, answers in _arriving(self.inner, queries[start:stop]):
                known[start + offset] = unwritten[start + offset] = answers
                if self._sent or self._writing.due(time.monotonic()):
                    self._write(queries, unwritten)
        finally:
            self._write(queries, unwritten)
        return known

    def _write(self, queries: QueryBatch, unwritten: dict[int, Array]) -> None:
        """Records what has arrived and takes it off the list."""
        if not unwritten:
            return
        begun = time.monotonic()
        force = self._forcing.due(begun)
        if force != self._forces:
            self._file.execute(f"PRAGMA synchronous = {'FULL' if force else 'NORMAL'}")
            self._forces = force
        rows = [self._row(start, queries, part) for start, part in _joined(unwritten).items()]
        if len(rows) == 1:  # a transaction by itself
            self._file.execute(INSERT, rows[0])
        else:
            self._file.execute("BEGIN IMMEDIATE")
            self._file.executemany(INSERT, rows)
            self._file.execute("COMMIT")
        (self._forcing if force else self._writing).done(begun, time.monotonic())
        self.asked += sum(len(part) for part in unwritten.values())
        unwritten.clear()

    def _recorded(self, queries: QueryBatch) -> Iterator[tuple[int, Array]]:
        rows = self._file.execute(
            "SELECT start, queries, dtype, shape, data, checksum FROM answers "
            "WHERE position = ? ORDER BY start",
            (self._position,),
        )
        end = 0
        for start, asked, *record in rows.fetchall():
            answers = self._read(*record)
            if type(start) is not int or not end <= start <= len(queries) - len(answers):
                raise self._damaged("it answers queries that the run does not ask")
            end = start + len(answers)
            if asked != queries[start:end].digest():
                raise JournalMismatch(
                    f"{self.path} recorded other queries at position {self._position} than this "
                    "run asks: it belongs to another box, learner, seed or version, or to another "
                    "budget, where the learner plans with all of it. Name another journal"
                )
            yield start, answers

    def _read(self, dtype: Any, shape: Any, data: Any, checksum: Any) -> Array:
        """The answers of a record, which pass the same border as those of the box."""
        try:
            if digest(data, dtype.encode(), shape.encode()) != checksum:
                raise ValueError("the checksum does not fit")
            answers = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(json.loads(shape))
            return checked_answers(answers.copy(), len(answers), self.spec)
        except (ValueError, TypeError, AttributeError, SyntaxError, RecursionError) as error:
            raise self._damaged(error) from error
        except OracleError as error:
            raise self._damaged(error) from error

    def _damaged(self, why: Exception | str) -> JournalError:
        return JournalError(
            f"journal {self.path}: record {self._position} is damaged ({why}); the file was "
            "left as it is. Move it away to start afresh"
        )

    def _row(self, start: int, queries: QueryBatch, answers: Array) -> tuple[Any, ...]:
        asked = queries[start : start + len(answers)]
        dtype, shape = answers.dtype.str, json.dumps(answers.shape)
        data = np.ascontiguousarray(answers).tobytes()
        self._largest = max(self._largest, len(data))
        checksum = digest(data, dtype.encode(), shape.encode())
        name = asked.digest()
        return self._position, start, queries.purpose, name, dtype, shape, data, checksum

    def release(self) -> None:
        """Closes the file, all of it on the disk; the box stays open."""
        self._file.close()

    def close(self) -> None:
        self.release()
        self.inner.close()


def _gaps(count: int, known: Mapping[int, Array]) -> Iterator[tuple[int, int]]:
    """The stretches of 0 … count - 1 that are not known."""
    end = 0
    for start in sorted(known):
        if start > end:
            yield end, start
        end = start + len(known[start])
    if end < count:
        yield end, count


def _joined(parts: Mapping[int, Array]) -> dict[int, Array]:
    """Parts that follow each other as one."""
    runs: dict[int, list[Array]] = {}
    first = end = -1
    for start in sorted(parts):
        first = first if start == end else start
        runs.setdefault(first, []).append(parts[start])
        end = start + len(parts[start])
    return {
        start: run[0] if len(run) == 1 else assembled(sum(map(len, run)), dict(enumerate(run)))
        for start, run in runs.items()
    }


def _arriving(oracle: Oracle, queries: QueryBatch) -> Iterator[tuple[int, Array]]:
    """Answers as they come: in parts where the oracle knows parts, else all at once."""
    stream = getattr(oracle, "stream", None)
    if stream is None:
        yield 0, oracle.ask(queries)
    else:
        yield from stream(queries)
