from typing import Any

import numpy as np
import pytest

from keyhole.oracles.base import Domain, Spec
from keyhole.verification.challenge_queries import LONG, Designer

WIDTH = 5
WORDS = np.random.default_rng(0).standard_normal((9, WIDTH))


def designed(count: int, seed: int = 0, **domain: Any) -> list[Any]:
    spec = Spec(WIDTH, domain=Domain(**domain))
    return list(Designer(spec, 2.0, np.random.default_rng(seed)).stream(count))


def test_one_lap_asks_every_kind_once() -> None:
    fresh = designed(6)
    assert len({query.reason for query in fresh}) == 6
    assert max(len(query.tokens) for query in fresh) == LONG
    assert [q.reason for q in designed(12)[6:]] == [q.reason for q in fresh]


def test_the_same_seed_asks_the_same() -> None:
    for a, b, c in zip(designed(12), designed(12), designed(12, seed=1), strict=True):
        assert np.array_equal(a.tokens, b.tokens)
        assert a.tokens.shape != c.tokens.shape or not np.array_equal(a.tokens, c.tokens)


@pytest.mark.parametrize(
    "domain",
    [
        {"max_length": 1},
        {"max_length": 2},
        {"max_norm": 0.1},
        {"low": -0.2},
        {"high": 0.3},
        {"low": -0.1, "high": 0.2, "max_norm": 0.25},
        {"vocabulary": WORDS},
        {"vocabulary": WORDS, "max_length": 3},
    ],
)
def test_every_query_lies_in_the_domain(domain: Any) -> None:
    limits = Domain(**domain)
    for query in designed(90, **domain):
        assert query.tokens.shape[1] == WIDTH
        limits.check(query.tokens[None])


def test_later_laps_go_over_decades_of_lengths_and_sizes() -> None:
    fresh = designed(600)
    lengths = [len(q.tokens) for q in fresh]
    queries = [np.linalg.norm(q.tokens[-1]) for q in fresh]
    largest = [np.abs(q.tokens).max() for q in fresh]
    assert max(lengths) > 300
    assert sum(length > 150 for length in lengths) > 15
    assert max(queries) > 50 * 2.0
    assert min(queries) < 0.1 * 2.0
    assert max(largest) > 300
