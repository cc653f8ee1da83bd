import numpy as np
import pytest

from keyhole.errors import DomainError
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.restrict import SingleToken
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
