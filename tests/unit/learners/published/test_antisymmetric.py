import numpy as np
import pytest

from keyhole.errors import DomainError
from keyhole.learners.published.antisymmetric import Antisymmetric
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Domain
from keyhole.oracles.queries import QueryBatch
from networks import CountingOracle, layer


def test_is_an_attention_head_for_networks_without_biases():
    model = layer(0, 4, 6, bias=False)
    inner = CountingOracle(model, 4)
    tokens = np.random.default_rng(0).standard_normal((20, 5, 4))
    answers = Antisymmetric(inner).ask(QueryBatch.of(tokens, "test"))
    net = model.network
    head = Attention([Head(model.score, None, net.weight.T @ net.output)])
    assert answers == pytest.approx(head(tokens), abs=1e-12)
    assert inner.queries == 40


def test_domain_is_made_symmetric():
    box = Antisymmetric(CountingOracle(layer(0, 4, 6), 4, domain=Domain(low=-1.0, high=3.0)))
    assert (box.spec.domain.low, box.spec.domain.high) == (-1.0, 1.0)


@pytest.mark.parametrize("domain", [Domain(low=0.5, high=3.0), Domain(vocabulary=np.eye(4))])
def test_domains_without_negatives_are_refused(domain):
    with pytest.raises(DomainError):
        Antisymmetric(CountingOracle(layer(0, 4, 6), 4, domain=domain))
