"""What a learner of networks must do to serve in `Transformer(ffn=...)`, as checks to call.

    from keyhole.testing.ffn_contract import check_ffn_learner
    check_ffn_learner(MyLearner())

Each check raises ContractBroken with a sentence on what went wrong. They take seconds.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.learners.transformer.ffn import FfnLearner
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import QueryBatch
from keyhole.testing.contract import require

WIDTH, NEURONS = 4, 5  # of the networks that are to be learned


class _Recorder(Oracle):
    """A box that remembers the queries it was asked."""

    def __init__(self, function: Callable[[Array], Array], width: int) -> None:
        self.function, self.spec = function, Spec(width=width)
        self.digests: list[bytes] = []
        self.lengths: set[int] = set()

    def ask(self, queries: QueryBatch) -> Array:
        self.digests.append(queries.digest())
        self.lengths.add(queries.length)
        return np.asarray(self.function(queries.tokens()))


def example_network(seed: int, *, bias: bool = True) -> ReluNetwork:
    rng = np.random.default_rng(seed)
    return ReluNetwork(
        rng.standard_normal((NEURONS, WIDTH)),
        0.5 * rng.standard_normal(NEURONS) if bias else None,
        rng.standard_normal(NEURONS),
        offset=0.3,
    )


def check_ffn_learner(learner: Any) -> None:
    """All checks."""
    check_protocol(learner)
    for bias in (True, False):
        check_agreement(learner, bias=bias)
    check_same_queries(learner)


def check_protocol(learner: Any) -> None:
    require(isinstance(learner, FfnLearner), "learn(oracle, rng) or expected_queries(spec) missing")
    forecast = learner.expected_queries(Spec(width=WIDTH))
    require(forecast is None or forecast > 0, "expected_queries must be None or positive")


def check_agreement(learner: FfnLearner, *, bias: bool = True, seed: int = 0) -> None:
    """The model is a ReluNetwork that answers like the box, learned by length-one queries."""
    secret = example_network(seed, bias=bias)
    box = _Recorder(secret, secret.width)
    model = learner.learn(box, np.random.default_rng(seed)).model
    require(isinstance(model, ReluNetwork), f"the model is a {type(model).__name__}")
    require(model.width == secret.width, "the model has another width than the box")
    require(box.lengths == {1}, f"queries of lengths {sorted(box.lengths)} were asked, not only 1")
    points = np.random.default_rng(seed + 1).standard_normal((2000, secret.width))
    gap = float(np.abs(model(points) - secret(points)).max() / secret(points).std())
    agreement = 1e-5  # difference to the box, relative to its answers, that a plug-in may have
    require(gap <= agreement, f"the model differs from the box by {gap:.1g} of its spread")


def check_same_queries(learner: FfnLearner, seed: int = 0) -> None:
    """The same seed asks the same queries, bit for bit."""
    secret = example_network(seed)
    runs = []
    for _ in range(2):
        box = _Recorder(secret, secret.width)
        learner.learn(box, np.random.default_rng(seed))
        runs.append(box.digests)
    require(runs[0] == runs[1], "two runs with the same seed asked different queries")
