"""Limits of a box are found after a refusal, and used."""

import numpy as np
import pytest

import keyhole
from keyhole.errors import DomainError
from keyhole.measurement.limits import Within, find_limits, tell_limits
from keyhole.models.random import attention
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.function import FunctionOracle
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
