import numpy as np
import pytest

from keyhole.errors import DomainError
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.count import QueryCounter
from keyhole.oracles.wrappers.restrict import (
    AffineSingles,
    SingleToken,
    WithPrior,
    find_known_directions,
)
from networks import CountingOracle, layer


def test_length_one_is_the_network():
    model = layer(0, 4, 6)
    box = SingleToken(CountingOracle(model, 4))
    tokens = np.random.default_rng(0).standard_normal((5, 1, 4))
    answers = box.ask(QueryBatch.of(tokens, "test"))
    assert answers == pytest.approx(model.network(tokens[:, 0]), abs=1e-14)
    assert box.spec.domain.max_length == 1


def test_longer_queries_are_refused():
    box = SingleToken(CountingOracle(layer(0, 4, 6), 4))
    with pytest.raises(DomainError, match="length 1"):
        box.ask(QueryBatch.of(np.zeros((1, 2, 4)), "test"))


@pytest.mark.parametrize("shape", [(6,), (6, 3)])
def test_combinations_of_known_tokens_cost_nothing(shape):
    rng = np.random.default_rng(1)
    value, offset = rng.standard_normal(shape), 0.3
    inner = QueryCounter(FunctionOracle(lambda x: x.mean(axis=1) @ value + offset, Spec(6)), None)
    tokens = np.concatenate([np.zeros((1, 6)), rng.standard_normal((3, 6))])
    box = AffineSingles(inner, tokens, tokens @ value + offset)
    known = find_known_directions(WithPrior(box))
    assert known @ known.T == pytest.approx(np.eye(3), abs=1e-12)
    asked = np.concatenate([known, tokens, rng.standard_normal((2, 6)), 100.0 * known[:1]])
    answers = box.ask(QueryBatch.of(asked[:, None], "test"))
    assert answers == pytest.approx(asked @ value + offset, abs=1e-13)
    assert (answers[3:7] == box.answers).all()  # to the last bit
    assert inner.paid == 3  # two other directions, and a token whose answer would be less exact
    pairs = QueryBatch.of(np.stack([tokens, tokens], axis=1), "test")
    assert box.ask(pairs) == pytest.approx(tokens @ value + offset, abs=1e-13)
    assert inner.paid == 7


def test_no_direction_is_known_of_a_plain_box():
    assert find_known_directions(CountingOracle(layer(0, 4, 6), 4)).shape == (0, 4)
