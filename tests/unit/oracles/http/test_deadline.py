"""What is left of an exchange's time limits each of its steps."""

import threading

import httpcore
import pytest

from keyhole.oracles.http import deadline as module
from keyhole.oracles.http.deadline import Deadline


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_step_may_take_what_is_left(clock):
    deadline = Deadline()
    deadline.start(10.0)
    assert deadline.left(4.0, httpcore.ReadTimeout) == 4.0
    clock[0] += 8.0
    assert deadline.left(4.0, httpcore.ReadTimeout) == pytest.approx(2.0)
    assert deadline.left(None, httpcore.ReadTimeout) == pytest.approx(2.0)
    clock[0] += 2.0
    with pytest.raises(httpcore.WriteTimeout):
        deadline.left(4.0, httpcore.WriteTimeout)


def test_without_an_end_there_is_no_limit(clock):
    deadline = Deadline()
    deadline.start(float("inf"))
    assert deadline.left(None, httpcore.ReadTimeout) is None
    assert deadline.left(float("inf"), httpcore.ReadTimeout) is None


def test_every_thread_has_its_own(clock):
    deadline = Deadline()
    deadline.start(1.0)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(deadline.end))
    thread.start()
    thread.join()
    assert seen == [float("inf")]
