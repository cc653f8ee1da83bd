"""Nothing paid for is lost or paid twice, and a journal of something else is told."""

import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boxes import CountingBox
from keyhole.errors import JournalError, JournalMismatch, OracleError
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers import journal as module
from keyhole.oracles.wrappers.journal import SHARE, Journal, Rationed
from keyhole.oracles.wrappers.parts import Parted

HEADER = {"box": "a box", "width": 2, "learner": "SingleHead()", "seed": 0}


def queries(*numbers: float) -> QueryBatch:
    return QueryBatch.of(np.array(numbers).reshape(-1, 1, 1) * np.ones((1, 1, 2)), "value")


def counting(function: Callable[[np.ndarray], Any] = lambda t: t[:, 0, 0] / 3.0) -> CountingBox:
    return CountingBox(function, 2)


def opened(path: Path, function: CountingBox, **header: Any) -> Journal:
    return Journal(open_oracle(function), path, {**HEADER, **header})


BATCHES = (queries(1.0, 2.0), queries(3.0), queries(4.0, 5.0, 6.0))


def test_recorded_answers_are_replayed_bit_for_bit_without_asking(tmp_path: Path) -> None:
    first, second = counting(), counting()
    journal = opened(tmp_path / "j", first)
    before = [journal.ask(batch) for batch in BATCHES[:2]]
    journal.release()
    journal = opened(tmp_path / "j", second)
    after = [journal.ask(batch) for batch in BATCHES]
    journal.release()
    assert all(a.tobytes() == b.tobytes() for a, b in zip(before, after, strict=False))
    assert (first.seen, second.seen) == (3, 3)
    assert (journal.replayed, journal.asked) == (3, 3)
    after[0][0] = 9.0  # what is replayed is the asker's own


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_type_and_shape_are_kept(tmp_path: Path, dtype: Any) -> None:
    def vectors(tokens: np.ndarray) -> np.ndarray:
        return (tokens[:, 0] / 7.0).astype(dtype)

    answers = []
    for _ in range(2):
        journal = opened(tmp_path / "j", counting(vectors))
        answers.append(journal.ask(BATCHES[0]))
        journal.release()
    assert answers[0].dtype == answers[1].dtype == dtype
    assert np.array_equal(answers[0], answers[1])


def test_other_queries_are_a_mismatch(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j", counting())
    journal.ask(BATCHES[0])
    journal.release()
    box = counting()
    journal = opened(tmp_path / "j", box)
    with pytest.raises(JournalMismatch, match="other queries at position 0"):
        journal.ask(queries(1.0, 2.0 + 1e-15))
    journal.release()
    assert box.seen == 0


@pytest.mark.parametrize(
    "change", [{"box": "another"}, {"seed": 1}, {"learner": "Other()"}, {"width": 3}]
)
def test_another_box_learner_or_seed_is_a_mismatch(tmp_path: Path, change: Any) -> None:
    opened(tmp_path / "j", counting()).release()
    name = next(iter(change))
    with pytest.raises(JournalMismatch, match=f"written with {name} = .*this run has {name}"):
        opened(tmp_path / "j", counting(), **change)
    opened(tmp_path / "j", counting()).release()  # the refusal left it unharmed and unlocked


def test_a_failed_query_is_not_recorded(tmp_path: Path) -> None:
    def broken(tokens: np.ndarray) -> np.ndarray:
        raise RuntimeError

    journal = opened(tmp_path / "j", counting(broken))
    with pytest.raises(OracleError):
        journal.ask(BATCHES[0])
    journal.release()
    box = counting()
    journal = opened(tmp_path / "j", box)
    journal.ask(BATCHES[0])
    journal.release()
    assert box.seen == 2


def test_one_process_at_a_time(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j", counting())
    with pytest.raises(JournalError, match="another process uses it"):
        opened(tmp_path / "j", counting())
    journal.release()


def test_files_that_are_no_journal(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be one " * 50)
    with pytest.raises(JournalError, match="not a journal"):
        opened(tmp_path / "text", counting())
    with pytest.raises(JournalError, match="is not a folder"):
        opened(tmp_path / "none" / "j", counting())
    with pytest.raises(JournalError, match="cannot be written"):
        opened(tmp_path, counting())


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE answers SET data = x'00'",
        "UPDATE answers SET dtype = 'O'",
        "UPDATE answers SET dtype = 'nonsense'",
        "UPDATE answers SET shape = '[-7, 2'",
        "UPDATE answers SET shape = '[9]'",
        "UPDATE answers SET shape = '[]'",
        "UPDATE answers SET shape = x'00'",
        "UPDATE answers SET dtype = 7",
        "UPDATE answers SET start = -1",
        "UPDATE answers SET start = 1",
        "UPDATE answers SET start = 'first'",
        "UPDATE answers SET checksum = 'text', data = 'text'",
        "INSERT INTO answers SELECT position, 1, purpose, queries, dtype, shape, data, checksum FROM answers",
    ],
)
def test_a_damaged_record_is_told(tmp_path: Path, damage: str) -> None:
    journal = opened(tmp_path / "j", counting())
    journal.ask(BATCHES[0])
    journal.release()
    with sqlite3.connect(tmp_path / "j") as file:
        file.execute(damage)
    file.close()
    journal = opened(tmp_path / "j", counting())
    with pytest.raises(JournalError, match="record 0 is damaged"):
        journal.ask(BATCHES[0])
    journal.release()


def test_a_damaged_header_is_told(tmp_path: Path) -> None:
    opened(tmp_path / "j", counting()).release()
    with sqlite3.connect(tmp_path / "j") as file:
        file.execute("UPDATE header SET value = '{'")
    file.close()
    with pytest.raises(JournalMismatch, match="written with"):
        opened(tmp_path / "j", counting())


class Clock:
    """On which writing takes two milliseconds, and a request what the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module.time, "monotonic", self.tick)

    def tick(self) -> float:
        self.now += 0.001
        return self.now


def test_what_a_slow_request_brought_is_written_before_the_next_goes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    unwritten = []

    def slow(tokens: np.ndarray) -> np.ndarray:
        clock.now += 1.0
        unwritten.append(box.seen - len(tokens) - journal.asked)
        return np.asarray(tokens[:, 0, 0])

    box = counting(slow)
    journal = Journal(open_oracle(box, batch=1), tmp_path / "j", HEADER)
    journal.ask(queries(*range(20)))
    journal.release()
    assert unwritten == [0] * 20


def test_what_was_answered_is_kept_when_the_run_ends(tmp_path: Path) -> None:
    """A run that is stopped in its fifth request has paid for four, and pays for none of them
    again."""

    def stopped(tokens: np.ndarray) -> np.ndarray:
        if box.seen > 4:
            raise KeyboardInterrupt
        return tokens[:, 0, 0] / 3.0

    box = counting(stopped)
    journal = Journal(open_oracle(box, batch=1), tmp_path / "j", HEADER)
    with pytest.raises(KeyboardInterrupt):
        journal.ask(queries(*range(20)))
    journal.release()
    again = counting()
    journal = Journal(open_oracle(again, batch=1), tmp_path / "j", HEADER)
    answers = journal.ask(queries(*range(20)))
    journal.release()
    assert (journal.replayed, journal.asked, again.seen) == (4, 16, 16)
    assert answers.tolist() == (np.arange(20) / 3.0).tolist()


def test_no_more_parts_are_unwritten_than_may_be_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rationed, "due", lambda self, now: True)  # as for a slow box

    class Several(Parted):
        spec, batch, concurrency = Spec(2), 1, 3
        sent = 0

        def answer(self, queries: QueryBatch, stop: threading.Event) -> np.ndarray:
            with lock:
                self.sent += 1
                most.append(self.sent - journal.asked)
            return np.asarray(queries.tokens()[:, 0, 0])

    most: list[int] = []
    box, lock = Several(), threading.Lock()
    journal = Journal(box, tmp_path / "j", HEADER)
    answers = journal.ask(queries(*range(60)))
    journal.release()
    assert answers.tolist() == list(range(60))
    assert max(most) <= Several.concurrency


def test_parts_under_way_when_another_fails_are_kept(tmp_path: Path) -> None:
    class OneFails(Parted):
        spec, batch, concurrency = Spec(2), 1, 2

        def answer(self, queries: QueryBatch, stop: threading.Event) -> np.ndarray:
            number = int(queries.tokens()[0, 0, 0])
            if number == 0:
                raise OracleError("broken")
            stop.wait(10.0)  # answers once the other part has failed
            return np.array([float(number)])

    journal = Journal(OneFails(), tmp_path / "j", HEADER)
    with pytest.raises(OracleError, match="broken"):
        journal.ask(queries(*range(6)))
    journal.release()
    assert journal.asked == 1


def test_what_is_rationed_takes_its_share_of_the_time() -> None:
    writing = Rationed()
    assert writing.due(0.0)
    writing.done(0.0, 0.002)
    assert not writing.due(0.002 + 0.99 * 0.002 / SHARE)
    assert writing.due(0.002 + 1.01 * 0.002 / SHARE)


@pytest.mark.parametrize(("seconds", "forced"), [(1.0, 8), (1e-4, 1)])
def test_answers_of_a_slow_box_are_forced_to_the_disk_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, forced: int
) -> None:
    clock = Clock(monkeypatch)

    def slow(tokens: np.ndarray) -> np.ndarray:
        clock.now += seconds
        return np.asarray(tokens[:, 0, 0])

    journal = Journal(open_oracle(counting(slow), batch=1), tmp_path / "j", HEADER)
    waits = 0
    modes = []

    def seen(statement: str) -> None:
        nonlocal waits
        if statement.startswith("PRAGMA synchronous"):
            waits = statement.endswith("FULL")
        elif statement.startswith("INSERT") and not journal._file.in_transaction:
            modes.append(waits)  # a transaction by itself
        elif statement == "COMMIT":
            modes.append(waits)

    journal._file.set_trace_callback(seen)
    journal.ask(queries(*range(8)))
    journal.release()
    assert sum(modes) == forced


def test_closing_closes_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(FunctionOracle, "close", lambda self: closed.append(True))
    opened(tmp_path / "j", counting()).release()
    assert closed == []
    opened(tmp_path / "j", counting()).close()
    assert closed == [True]


def test_a_journal_is_for_its_owner_alone(tmp_path: Path) -> None:
    journal = opened(tmp_path / "j", counting())
    journal.ask(BATCHES[0])
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    journal.release()
    assert set(modes.values()) == {0o600}, modes
