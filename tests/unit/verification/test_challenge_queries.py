from itertools import islice
from typing import Any

import numpy as np
import pytest

from keyhole.models.random import attention
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.sign_attention import Coding, LabelledAttention
from keyhole.oracles.base import Domain, Spec
from keyhole.verification.challenge_queries import (
    AGAIN,
    KINDS,
    Designer,
    can_change_parameters,
    change_one_number,
    choose_most_telling,
    explain_distribution,
    list_length_classes,
)

WIDTH = 5
WORDS = np.random.default_rng(0).standard_normal((9, WIDTH))


def designed(count: int, seed: int = 0, **domain: Any) -> list[Any]:
    spec = Spec(WIDTH, domain=Domain(**domain))
    stream = Designer(spec, 2.0, np.random.default_rng(seed)).stream()
    return list(islice((fresh for calls in stream for fresh, _ in calls), count))


def test_one_lap_asks_every_kind_and_some_in_one_call() -> None:
    fresh = designed(len(KINDS))
    assert [query.reason for query in fresh] == [kind.reason for kind in KINDS]
    stream = Designer(Spec(WIDTH), 2.0, np.random.default_rng(0)).stream()
    for kind, call in zip(KINDS, stream, strict=False):
        assert len(call) == kind.together
        assert len({query.tokens.shape for query, _ in call}) == 1  # one batch
    queries = designed(59)
    assert [q.reason for q in queries].count(AGAIN) == 1
    assert queries[-1].reason == AGAIN
    assert np.array_equal(queries[-1].tokens, queries[0].tokens)


def test_the_distribution_is_told_in_words() -> None:
    told = explain_distribution(100)
    assert all(kind.reason in told for kind in KINDS)
    assert "17 to 100 tokens" in told


def test_ordinary_tokens_of_all_kinds_are_among_them() -> None:
    queries = {q.reason: q.tokens for seed in range(4) for q in designed(11, seed)}
    assert any((t == 0).all(axis=1).any() for r, t in queries.items() if r.startswith("zero"))
    assert all((t >= 0).all() for r, t in queries.items() if r.startswith("tokens without"))
    unit = next(t for r, t in queries.items() if r.startswith("tokens of length one"))
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1.0)
    small = next(t for r, t in queries.items() if r.startswith("small"))
    assert np.linalg.norm(small, axis=1).max() < 0.5 * 2.0


def test_zeros_stand_before_behind_and_among_the_tokens() -> None:
    where = set()
    for seed in range(60):
        (padded,) = (q.tokens for q in designed(11, seed) if q.reason.startswith("zero"))
        zeros = np.flatnonzero((padded == 0).all(axis=1))
        if 0 < len(zeros) < len(padded) - 1:
            where.add((bool(zeros[0] == 0), bool(zeros[-1] >= len(padded) - 2)))
        where.add("anchor" if len(padded) - 1 in zeros else "not the anchor")
    assert {(True, False), (False, True), "anchor", "not the anchor"} <= where


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


def test_every_length_and_every_pairing_of_kind_and_length_comes_with_some_seed() -> None:
    met: dict[str, set[int]] = {}
    for seed in range(500):
        for query in designed(59, seed, max_length=24):  # as many as end a recovery
            met.setdefault(query.reason, set()).add(len(query.tokens))
    del met[AGAIN]
    assert all(set(range(2, 25)) <= lengths for lengths in met.values())


@pytest.mark.parametrize("longest", [16, 64, 500])
def test_two_rounds_meet_odd_and_even_lengths_and_most_remainders(longest: int) -> None:
    """Of long lengths too: a box that is another model at some of them would be met by chance in
    many runs, and in many it would not."""
    seeds, left = 40, 0
    for seed in range(seeds):
        lengths = np.array([len(q.tokens) for q in designed(22, seed, max_length=longest)])
        beyond = lengths[lengths > 8]
        assert set(beyond % 2) == {0, 1}
        assert set(lengths % 3) == {0, 1, 2}
        left += sum(m - len(set(lengths % m)) for m in range(4, 9))
    assert left < 0.06 * seeds * sum(range(4, 9))  # lengths drawn by chance leave 13 to 16%


def test_a_length_is_rated_by_the_classes_that_no_other_was_of() -> None:
    classes = list_length_classes(64)
    assert {classes.rate_novelty(length) for length in (1, 2, 31, 64)} == {1.0}
    after = classes.meet(33)
    assert after.rate_novelty(33) == 0.0
    assert after.rate_novelty(35) < after.rate_novelty(34)  # both in 32 to 64, one of them even
    assert after.rate_novelty(34) < after.rate_novelty(6)
    assert classes.rate_novelty(33) == 1.0  # meeting changes a copy


MODEL = attention(np.random.default_rng(0), 5, heads=2, bias=True)


def test_one_number_is_changed() -> None:
    for seed in range(10):
        other = change_one_number(MODEL, np.random.default_rng(seed)).to_arrays()
        gaps = [np.count_nonzero(other[name] != a) for name, a in MODEL.to_arrays().items()]
        assert sum(gaps) == 1


def test_the_query_that_turns_a_rare_neuron_on_is_taken() -> None:
    net = ReluNetwork(np.array([[1.0, 0.0]]), np.array([-3.0]), np.array([1.0]))
    quiet, loud = np.array([[0.5, 2.0]]), np.array([[3.5, 0.0]])
    for seed in range(5):
        chosen, _ = choose_most_telling(net, [quiet, loud, quiet], np.random.default_rng(seed))
        assert chosen == 1


def test_what_has_no_parameters_is_left_alone() -> None:
    assert can_change_parameters(MODEL)
    assert not can_change_parameters(lambda tokens: tokens)
    assert not can_change_parameters(ReluNetwork(np.zeros((1, 2)), None, np.zeros(1)))
    assert not can_change_parameters(
        LabelledAttention(attention(np.random.default_rng(0), 3), Coding())
    )


def test_each_round_has_a_query_on_which_a_change_of_one_parameter_shows() -> None:
    designer = Designer(Spec(5), 2.0, np.random.default_rng(1), MODEL)
    drawn = list(islice((one for calls in designer.stream() for one in calls), 22))
    fresh = [query for query, _ in drawn]
    for query, recipe in drawn:  # from what is kept of it, each can be drawn again
        again = designer.draw_again(recipe)
        assert np.array_equal(again.tokens, query.tokens)
        assert again.reason == query.reason
    chosen = [i for i, q in enumerate(fresh) if "change of one parameter" in q.reason]
    assert len(chosen) == 2
    assert chosen[0] == 4
