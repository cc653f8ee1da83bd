"""Answers on disk, so that nothing paid for is ever lost or paid twice.

One SQLite file. A row holds one chunk of answers with the digest of its questions, in the order
asked. On a later run with the same box, learner and seed the same questions come in the same order:
recorded chunks are answered from the file, after their digest is checked, and the first chunk that
is not there goes to the box. A process killed at any moment leaves a valid file.
"""

import json
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import JournalError, JournalMismatch
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.questions import Questions

FORMAT = "keyhole-journal-1"
SCHEMA = """
CREATE TABLE IF NOT EXISTS header (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    position INTEGER PRIMARY KEY, purpose TEXT NOT NULL, questions BLOB NOT NULL,
    dtype TEXT NOT NULL, shape TEXT NOT NULL, data BLOB NOT NULL
);
"""


class Journal(Wrapper):
    """Answers from the file what the file knows; records what the box answers."""

    def __init__(self, inner: Oracle, path: str | Path, header: Mapping[str, Any]) -> None:
        self.inner, self.path = inner, Path(path)
        self.replayed = 0  # questions answered from the file
        self.asked = 0  # questions that went to the box
        self._position = 0
        try:
            self._file = self._open({"format": FORMAT, **header})
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _open(self, header: Mapping[str, Any]) -> sqlite3.Connection:
        if not self.path.parent.is_dir():
            raise JournalError(f"{self.path.parent} is not a folder: create it, or name another")
        file = sqlite3.connect(self.path, timeout=0.1, isolation_level=None)
        try:
            # one process per journal: the lock is held until close, and freed by the system if
            # the process dies
            file.execute("PRAGMA locking_mode = EXCLUSIVE")
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = NORMAL")
            file.executescript(SCHEMA)
            file.execute("BEGIN IMMEDIATE")
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
            file.execute("COMMIT")
        except BaseException:
            file.close()
            raise
        return file

    def _failure(self, error: sqlite3.Error) -> JournalError:
        text = str(error)
        if "locked" in text:
            advice = "another process uses it; wait for it, or name another journal"
        elif "full" in text:
            advice = "the disk is full; make room and run again, nothing recorded is lost"
        elif "readonly" in text or "unable to open" in text:
            advice = "the file or its folder cannot be written; name another place"
        else:
            advice = "the file is damaged or not a journal; move it away to start afresh"
        return JournalError(f"journal {self.path}: {text}: {advice}")

    def ask(self, questions: Questions) -> Array:
        try:
            known = self._recorded(questions)
            if known is None:
                known = self.inner.ask(questions)
                self.asked += len(questions)
                self._record(questions, known)
            else:
                self.replayed += len(questions)
        except sqlite3.Error as error:
            raise self._failure(error) from error
        self._position += 1
        return known

    def _recorded(self, questions: Questions) -> Array | None:
        row = self._file.execute(
            "SELECT questions, dtype, shape, data FROM answers WHERE position = ?",
            (self._position,),
        ).fetchone()
        if row is None:
            return None
        digest, dtype, shape, data = row
        if digest != questions.digest():
            raise JournalMismatch(
                f"{self.path} recorded other questions at position {self._position} than this run "
                "asks: it belongs to another box, learner, seed or version. Name another journal"
            )
        try:
            answers = np.frombuffer(data, dtype=np.dtype(dtype)).reshape(json.loads(shape))
        except (ValueError, TypeError) as error:
            raise JournalError(
                f"journal {self.path}: record {self._position} is damaged ({error}); move the "
                "file away to start afresh"
            ) from error
        return answers.copy()

    def _record(self, questions: Questions, answers: Array) -> None:
        self._file.execute(
            "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?)",
            (
                self._position,
                questions.purpose,
                questions.digest(),
                answers.dtype.str,
                json.dumps(answers.shape),
                np.ascontiguousarray(answers).tobytes(),
            ),
        )

    def release(self) -> None:
        """Closes the file; the box stays open."""
        self._file.close()

    def close(self) -> None:
        self.release()
        self.inner.close()
