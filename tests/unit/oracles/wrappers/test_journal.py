"""Nothing paid for is lost or paid twice, and a journal of something else is told."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boxes import CountingBox
from keyhole.errors import JournalError, JournalMismatch, OracleError
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.journal import Journal

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


def test_closing_closes_the_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(FunctionOracle, "close", lambda self: closed.append(True))
    opened(tmp_path / "j", counting()).release()
    assert closed == []
    opened(tmp_path / "j", counting()).close()
    assert closed == [True]
