"""What `Transformer(ffn=...)` accepts: any learner of networks from length-one queries."""

from typing import Protocol, runtime_checkable

import numpy as np

from keyhole.learners.base import Hypothesis
from keyhole.oracles.base import Oracle, Spec


@runtime_checkable
class FfnLearner(Protocol):
    """What a learner of the network inside `Transformer` must do: a protocol.

    `learn` gets an oracle that answers queries of shape (batch, 1, width) and returns a
    `Hypothesis` whose `model` is a `ReluNetwork` (a linear skip is allowed) that agrees with the
    oracle at least to single precision. It must use `rng` for everything random and raise errors
    from `keyhole.errors` where it fails. `keyhole.testing.ffn_contract` checks all of this.

    The error of the network reaches the score. A learner whose `diagnostics` are a
    `keyhole.learners.mlp.NetworkDiagnostics` states it; that of any other is measured at fresh
    points, and standard errors that are missing or zero are replaced by what follows from it.

    Example:
        >>> from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
        >>> isinstance(ReluNetworkLearner(), FfnLearner)
        True
    """

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis: ...

    def expected_queries(self, spec: Spec) -> int | None: ...
