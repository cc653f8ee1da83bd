"""A learner of networks from elsewhere, plugged into the Transformer learner.

Here: a learner that was told the neurons' planes (say, by a leaked first layer) and only fits the
output weights, by least squares. Anything with `learn` and `expected_queries` will do.
"""

from dataclasses import dataclass

import numpy as np

import keyhole
from keyhole import (
    Hypothesis,
    Oracle,
    QueryBatch,
    ReluNetwork,
    Spec,
    Transformer,
    TransformerModel,
)


@dataclass(frozen=True, eq=False)
class KnownPlanes:
    """Fits output weights and offset to neurons whose rows and biases are known."""

    weight: np.ndarray
    bias: np.ndarray

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        neurons, width = self.weight.shape
        points = rng.standard_normal((2 * (neurons + 1), width))
        answers = oracle.ask(QueryBatch.of(points[:, None, :], "network"))
        hidden = np.maximum(points @ self.weight.T + self.bias, 0)
        columns = np.column_stack([hidden, np.ones(len(points))])
        fit = np.linalg.lstsq(columns, answers)[0]
        model = ReluNetwork(self.weight, self.bias, fit[:-1], offset=fit[-1])
        unknown = ReluNetwork(0 * self.weight, 0 * self.bias, 0 * fit[:-1])
        return Hypothesis(model, unknown, floor=neurons + 1.0)

    def expected_queries(self, spec: Spec) -> int | None:
        return 2 * (len(self.bias) + 1)


def main() -> None:
    rng = np.random.default_rng(0)
    network = ReluNetwork(
        rng.standard_normal((24, 8)), rng.standard_normal(24), rng.standard_normal(24)
    )
    secret = TransformerModel(rng.standard_normal((8, 8)), None, network)
    learner = Transformer(ffn=KnownPlanes(network.weight, network.bias))
    found = keyhole.recover(secret, learner)
    error = np.linalg.norm(found.model.score - secret.score) / np.linalg.norm(secret.score)
    print(f"{found.outcome.name}: score recovered to {error:.1e}")


if __name__ == "__main__":
    main()
