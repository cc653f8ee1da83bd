import io
import sys

import pytest

from keyhole.cli import progress
from keyhole.cli.interrupt import Stop
from keyhole.cli.progress import asking, fitting, left, searching, shown
from keyhole.diagnosis.diagnosis import Step
from keyhole.learners.examples.head_count import Progress as Search
from keyhole.recovery import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_words_of_a_run() -> None:
    assert asking(Progress("value", 0, 100, 0.0)) == "value: 0 queries"
    assert asking(Progress("score", 50, 150, 10.0)) == (
        "score: 50 of about 150 queries, 5/s, 20 s left"
    )
    assert asking(Progress("score", 5, None, 10.0)) == "score: 5 queries, 2.0 s each"
    assert asking(Progress("score", 200, 150, 10.0)) == "score: 200 queries, 20/s"
    note = "answers explained to 3.1e+05 roundings"
    assert asking(Progress("fit", 50, None, 9.0, note=note)) == f"fit: 50 queries, {note}"
    assert fitting(Search(2, 3, 1.2e-4, 12.0)) == (
        "2 heads: 3 restarts, best residual 1.2e-04, 12 s"
    )
    assert [left(x) for x in (3.4, 600.0, 9000.0)] == ["3 s", "10 min", "2.5 h"]


def test_plain_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    with shown() as tell:
        assert tell is not None
        tell(Progress("score", 50, 150, 10.0))
    with searching() as tell:
        assert tell is not None
        tell(Search(1, 2, 0.5, 1.0))
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "score: 50 of about 150 queries, 5/s, 20 s left",
        "1 head: 2 restarts, best residual 5.0e-01, 1 s",
    ]


def test_a_live_line_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with shown() as tell:
        assert tell is not None
        tell(Progress("score", 50, 150, 10.0))
    assert "50 of about 150 queries, 5/s, 20 s left" in terminal.getvalue()
    with searching() as tell:
        assert tell is not None
        tell(Search(1, 2, 0.5, 1.0))


def test_silence() -> None:
    for display in (shown, searching):
        with display(False) as tell:
            assert tell is None


def test_stopping_waits_for_the_batch_only() -> None:
    told: list[Progress] = []
    stop = Stop(told.append)
    with pytest.raises(KeyboardInterrupt):  # nothing is under way
        stop._pressed(2, None)
    stop(Progress("score", 0, None, 0.0, under_way=5))
    stop._pressed(2, None)
    with pytest.raises(KeyboardInterrupt):
        stop(Progress("score", 5, None, 1.0))
    with pytest.raises(KeyboardInterrupt):
        stop._pressed(2, None)
    assert len(told) == 1


def test_stages_of_a_diagnosis_are_told_too():
    assert asking(Step("asking", 5, seconds=10.0)) == "asking: 5 queries, 2.0 s each"
