"""Limits of a box are found after a refusal, and used."""

from pathlib import Path

import numpy as np
import pytest

import keyhole
from keyhole.errors import DomainError, OracleError
from keyhole.measurement.limits import Within, find_limits, tell_limits
from keyhole.models.random import attention
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.http.retry import Outage
from keyhole.oracles.queries import QueryBatch
from keyhole.planning import survey


class Limited:
    """A layer that refuses what is longer or larger; remembers the longest query it answered."""

    def __init__(self, length: int = 10**6, norm: float = np.inf) -> None:
        self.layer = attention(np.random.default_rng(3), 6, heads=2, outputs=6, rank=3)
        self.length, self.norm, self.refusals = length, norm, 0

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.shape[1] > self.length or np.linalg.norm(tokens, axis=2).max() > self.norm:
            self.refusals += 1
            raise IndexError("index out of range")
        return np.asarray(self.layer(tokens))


def refused(length: int, size: float) -> QueryBatch:
    return QueryBatch.of(size * np.random.default_rng(0).standard_normal((1, length, 6)), "test")


@pytest.mark.parametrize("length", [1, 5, 64])
def test_the_longest_sequence_is_found(length: int) -> None:
    box = FunctionOracle(Limited(length), Spec(6))
    found = find_limits(box, refused(96, 1.0), np.random.default_rng(1))
    assert found == Domain(max_length=length)
    assert tell_limits(Domain(), found) == (
        f"The box answers sequences of at most {length} tokens.",
    )


def test_the_largest_token_is_found() -> None:
    box = FunctionOracle(Limited(norm=50.0), Spec(6))
    found = find_limits(box, refused(3, 1e6), np.random.default_rng(1))
    assert found is not None
    assert found.max_length is None
    assert 47.0 < found.max_norm <= 50.0


def test_what_cannot_be_repeated_shows_no_limit() -> None:
    box = FunctionOracle(Limited(), Spec(6))
    assert find_limits(box, refused(96, 1e6), np.random.default_rng(1)) is None
    broken = FunctionOracle(Limited(length=0), Spec(6))
    assert find_limits(broken, refused(96, 1.0), np.random.default_rng(1)) is None


def test_nothing_is_asked_beyond_the_limits() -> None:
    inside = Within(FunctionOracle(Limited(), Spec(6)), Domain(max_length=4))
    assert inside.spec.domain.max_length == 4
    with pytest.raises(DomainError):
        inside.ask(refused(5, 1.0))


def test_a_box_with_few_positions_is_recovered_within_them() -> None:
    box = Limited(64)
    found = keyhole.recover(keyhole.open_oracle(box, width=6), seed=0)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert keyhole.distance(found.model, box.layer) < 1e-8
    assert box.refusals <= 8  # one query of the learner, and the halving
    assert "The box answers sequences of at most 64 tokens." in found.notes
    assert found.ledger.by_purpose["limits"] <= 10
    assert survey(keyhole.open_oracle(Limited(64), width=6)).spec.domain.max_length == 64


def test_a_box_that_fails_everywhere_has_failed() -> None:
    found = keyhole.recover(keyhole.open_oracle(Limited(0), width=6), throw=False)
    assert found.outcome is keyhole.Outcome.ORACLE_FAILED


class Stopping(Limited):
    """Refuses what is too long, and fails for good after so many calls, once."""

    def __init__(self, length: int, calls: int) -> None:
        super().__init__(length)
        self.calls = calls

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        self.calls -= 1
        if self.calls == 0:
            raise KeyboardInterrupt
        return super().__call__(tokens)


@pytest.mark.parametrize("calls", [5, 12, 16, 40])
def test_a_stopped_run_continues_within_the_limits(calls: int, tmp_path: Path) -> None:
    whole = keyhole.recover(keyhole.open_oracle(Limited(64), width=6), seed=0)
    box = keyhole.open_oracle(Stopping(64, calls), width=6)
    journal = tmp_path / "run.journal"
    stopped = keyhole.recover(box, seed=0, journal=journal, throw=False)
    assert stopped.outcome is keyhole.Outcome.INTERRUPTED
    resumed = keyhole.recover(box, seed=0, journal=journal)
    assert resumed.ledger.by_purpose == whole.ledger.by_purpose
    assert np.array_equal(resumed.model.heads[0].score, whole.model.heads[0].score)


def test_a_failure_that_passes_leaves_no_trace_in_the_journal(tmp_path: Path) -> None:
    layer = attention(np.random.default_rng(3), 6, heads=2, outputs=6, rank=3)
    calls = 0

    def flaky(tokens: np.ndarray) -> np.ndarray:
        nonlocal calls
        calls += 1
        if calls == 12:
            raise RuntimeError("out of memory, this once")
        return np.asarray(layer(tokens))

    box, journal = keyhole.open_oracle(flaky, width=6), tmp_path / "run.journal"
    failed = keyhole.recover(box, seed=0, journal=journal, throw=False)
    assert failed.outcome is keyhole.Outcome.ORACLE_FAILED
    assert failed.ledger.by_purpose["limits"] >= 2  # is it too long, is it too large?
    assert keyhole.recover(box, seed=0, journal=journal).outcome is keyhole.Outcome.RECOVERED


class Gone(Oracle):
    spec = Spec(6)

    def ask(self, queries: QueryBatch) -> np.ndarray:
        raise Outage("gone")


def test_an_outage_is_no_refusal() -> None:
    box = Within(Gone())
    with pytest.raises(OracleError):
        box.ask(refused(5, 1.0))
    assert box.narrow(np.random.default_rng(0)) is None
