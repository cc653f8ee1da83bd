"""Answers on disk, so that nothing paid for is ever lost or paid twice.

One SQLite file. A row holds answers with the digest of their queries, the place in the run where
they were asked, and a checksum. On a later run with the same box, learner and seed the same
queries come in the same order: what is recorded is answered from the file, after its digest is
checked, and what is not goes to the box. A process killed at any moment leaves a valid file.

An oracle that answers in parts (`stream`) is recorded part by part, so that a kill in the middle
of a batch costs only what was under way.
"""

import json
import shutil
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array, digest
from keyhole.errors import JournalError, JournalMismatch
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.parts import assembled

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
ROOM = 8 * 2**20  # bytes that must be free before a query is paid for: several chunks
LOCKED = "another process uses it; wait for it, or name another journal"
FULL = "the disk is full; make room and run again, nothing recorded is lost"
READ_ONLY = "the file or its folder cannot be written; name another place"
DAMAGED = "the file is damaged or not a journal; it was left as it is. Move it away to start afresh"


class Journal(Wrapper):
    """Answers from the file what the file knows; records what the box answers."""

    def __init__(self, inner: Oracle, path: str | Path, header: Mapping[str, Any]) -> None:
        self.inner, self.path = inner, Path(path)
        self.replayed = 0  # queries answered from the file
        self.asked = 0  # queries that went to the box
        self.live = False  # while set, queries go past the file to the box
        self._position = 0
        self._largest = 0  # bytes of a record
        try:
            self._file = self._open({"format": FORMAT, **header})
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error

    def _open(self, header: Mapping[str, Any]) -> sqlite3.Connection:
        if not self.path.parent.is_dir():
            raise JournalError(f"{self.path.parent} is not a folder: create it, or name another")
        self._refuse_foreign()
        self._check_room()
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
        """Looks at the file's first bytes before SQLite may write to it."""
        if not self.path.is_file():
            return
        with self.path.open("r+b") as file:  # and so finds out whether it may be written
            head = file.read(100)
        if not head:
            return
        if head[:16] != b"SQLite format 3\x00" or len(head) < 100:
            raise JournalError(f"journal {self.path}: {DAMAGED}")
        if int.from_bytes(head[68:72], "big") not in (APPLICATION, 0):
            raise JournalError(
                f"{self.path} is a database of another program: name another journal"
            )

    def _check(self, file: sqlite3.Connection) -> None:
        tables = {name for (name,) in file.execute("SELECT name FROM sqlite_master")}
        marked = file.execute("PRAGMA application_id").fetchone()[0] == APPLICATION
        if tables and not marked:
            raise JournalError(
                f"{self.path} is a database of another program, or a journal of an earlier "
                "version: name another journal"
            )
        found = [text for (text,) in file.execute("PRAGMA quick_check(3)")]
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
                    f"{self.path} was written with {name} = {json.loads(value)}, this run has "
                    f"{name} = {header[name]}: name another journal, or repeat the first call"
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
        try:
            known = dict(self._recorded(queries))
            self.replayed += sum(len(part) for part in known.values())
            for start, stop in _gaps(len(queries), known):
                self._check_room()
                for offset, answers in _arriving(self.inner, queries[start:stop]):
                    first = start + offset
                    self._record(first, queries[first : first + len(answers)], answers)
                    self.asked += len(answers)
                    known[first] = answers
        except (sqlite3.Error, OSError) as error:
            raise self._failure(error) from error
        self._position += 1
        return assembled(len(queries), known)

    def _recorded(self, queries: QueryBatch) -> Iterator[tuple[int, Array]]:
        rows = self._file.execute(
            "SELECT start, queries, dtype, shape, data, checksum FROM answers "
            "WHERE position = ? ORDER BY start",
            (self._position,),
        )
        for start, asked, dtype, shape, data, checksum in rows.fetchall():
            answers = self._read(dtype, shape, data, checksum)
            if asked != queries[start : start + len(answers)].digest():
                raise JournalMismatch(
                    f"{self.path} recorded other queries at position {self._position} than this "
                    "run asks: it belongs to another box, learner, seed or version, or to another "
                    "budget, where the learner plans with all of it. Name another journal"
                )
            yield start, answers

    def _read(self, dtype: str, shape: str, data: bytes, checksum: bytes) -> Array:
        try:
            if digest(data, dtype.encode(), shape.encode()) != checksum:
                raise ValueError("the checksum does not fit")
            answers = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(json.loads(shape))
        except (ValueError, TypeError, AttributeError) as error:
            raise JournalError(
                f"journal {self.path}: record {self._position} is damaged ({error}); the file was "
                "left as it is. Move it away to start afresh"
            ) from error
        return answers.copy()

    def _record(self, start: int, queries: QueryBatch, answers: Array) -> None:
        dtype, shape = answers.dtype.str, json.dumps(answers.shape)
        data = np.ascontiguousarray(answers).tobytes()
        self._file.execute(
            "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self._position,
                start,
                queries.purpose,
                queries.digest(),
                dtype,
                shape,
                data,
                digest(data, dtype.encode(), shape.encode()),
            ),
        )
        self._largest = max(self._largest, len(data))

    def release(self) -> None:
        """Closes the file; the box stays open."""
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


def _arriving(oracle: Oracle, queries: QueryBatch) -> Iterator[tuple[int, Array]]:
    """Answers as they come: in parts where the oracle knows parts, else all at once."""
    stream = getattr(oracle, "stream", None)
    if stream is None:
        yield 0, oracle.ask(queries)
    else:
        yield from stream(queries)
