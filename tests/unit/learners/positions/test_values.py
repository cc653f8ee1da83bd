"""Value maps under hard attention, at every kind of positions."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole
from keyhole.learners.positions.values import (
    Bag,
    ValueMaps,
    Winners,
    measure_value_maps,
    move_apart,
    numerical_rank,
)
from keyhole.measurement.asker import Asker
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.wrappers.count import QueryCounter
from placed_layers import placed_layer


@pytest.mark.parametrize("kind", ["rotary", "linear bias", "bias by distance"])
def test_value_maps_and_their_price(kind: str) -> None:
    truth = placed_layer(kind, 12, 3, 1)
    box = QueryCounter(FunctionOracle(truth, Spec(12)), None)
    found = measure_value_maps(Asker(box), np.random.default_rng(2), None)
    assert isinstance(found, ValueMaps)
    assert found.ranks == (4, 4, 4)
    for head in truth.heads:
        gaps = [np.linalg.norm(m - head.value) / np.linalg.norm(head.value) for m in found.maps]
        assert min(gaps) < 1e-9
    assert np.allclose(found.offset, truth.offset, rtol=1e-12)
    assert box.paid == 2 * 12 - 4 + 3 + 5


def test_a_head_that_is_seen_badly_is_asked_once_more() -> None:
    truth = placed_layer("linear bias", 12, 3, 1)
    box = QueryCounter(FunctionOracle(truth, Spec(12)), None)
    found = measure_value_maps(Asker(box), np.random.default_rng(17), None)
    assert isinstance(found, ValueMaps)
    for head in truth.heads:
        gaps = [np.linalg.norm(m - head.value) / np.linalg.norm(head.value) for m in found.maps]
        assert min(gaps) < 1e-11
    assert box.paid == 2 * 12 - 4 + 3 + 5 + 1


def test_split_tells_the_heads_apart() -> None:
    rng = np.random.default_rng(0)
    outs = tuple(np.linalg.qr(rng.standard_normal((6, 2)))[0].T for _ in range(3))
    ins = tuple(rng.standard_normal((5, 2)) for _ in outs)
    values = ValueMaps(np.zeros(6), ins, outs, 1e-16, 1e-16, np.zeros((3, 5)), np.zeros(5))
    parts = [rng.standard_normal((4, 2)) for _ in outs]
    answers = sum(part @ out for part, out in zip(parts, outs, strict=True))
    for part, found in zip(parts, values.split(np.asarray(answers)), strict=True):
        assert np.allclose(part, found)


def test_numerical_rank() -> None:
    assert numerical_rank(np.diag([1.0, 1e-3, 1e-12])) == 2
    assert numerical_rank(np.zeros((2, 2))) == 0


def test_another_bag_tells_heads_that_shared_tokens() -> None:
    truth = placed_layer("linear bias", 12, 4, 1)
    box = QueryCounter(FunctionOracle(truth, Spec(12)), None)
    ask, rng = Asker(box), np.random.default_rng(2)
    right = measure_value_maps(ask, rng, None)
    assert isinstance(right, ValueMaps)
    pairs = ((0, 1), (2, 3))  # heads on one token, in twos: their maps look like one
    merged = replace(
        right,
        ins=tuple(np.hstack([right.ins[a], right.ins[b]]) for a, b in pairs),
        outs=tuple(np.vstack([right.outs[a], right.outs[b]]) for a, b in pairs),
    )
    again = measure_value_maps(ask, rng, None, before=merged)
    assert isinstance(again, ValueMaps)
    assert again.ranks == (3, 3, 3, 3)
    paid = box.paid
    same = measure_value_maps(ask, rng, None, before=right)
    assert isinstance(same, ValueMaps)
    assert same.ins is right.ins
    assert not np.array_equal(same.anchor, right.anchor)
    for value, liked in zip(same.maps, same.liked, strict=True):
        (head,) = (head for head in truth.heads if np.allclose(head.value, value))
        scores = same.liked @ head.keys(same.anchor)
        assert np.isclose(liked @ head.keys(same.anchor), scores.max())
    assert box.paid - paid == 6  # a bag, and as many patterns as there are heads, and one


def test_a_query_in_which_a_head_left_its_token_is_no_answer_for_the_fit() -> None:
    truth = placed_layer("linear bias", 8, 2, 0)
    ask = Asker(keyhole.open_oracle(truth.astype(np.float32)), rounding=True)
    values = measure_value_maps(ask, np.random.default_rng(1), None)
    assert isinstance(values, ValueMaps)
    tokens, anchor = values.liked, values.anchor[None]
    base = ask(np.concatenate([tokens, anchor])[None], "test")
    winners = Winners.of(ask, Bag(tokens, anchor, base, np.arange(2)))
    maps = np.array(values.maps)
    move_apart(winners, np.eye(8), maps, np.random.default_rng(2))
    (kept,) = winners.answered
    assert len(kept.tokens) == 10  # directions over the other heads, and a quarter more
    move_apart(winners, np.eye(8), 1e-3 * maps, np.random.default_rng(2))
    assert len(winners.answered) == 1  # every answer was larger than what was expected
    winners.respond(np.zeros((3, 2, 8)))
    winners.forget(np.array([1]))
    assert len(winners.answered[-1].tokens) == 2
