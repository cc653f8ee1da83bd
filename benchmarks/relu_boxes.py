"""Random ReLU networks behind a counting box, for the benchmarks."""

import time
from collections.abc import Callable

import numpy as np

from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.queries import QueryBatch


class Box(Oracle):
    """A function that counts, and takes its own time off the learner's."""

    def __init__(
        self,
        function: Callable[[np.ndarray], np.ndarray],
        width: int,
        domain: Domain = Domain(),  # noqa: B008 - frozen
    ) -> None:
        self.function, self.spec = function, Spec(width=width, domain=domain)
        self.queries, self.batches, self.seconds = 0, 0, 0.0
        self.by_purpose: dict[str, int] = {}

    def ask(self, queries: QueryBatch) -> np.ndarray:
        start = time.process_time()
        answers = np.asarray(self.function(queries.tokens()))
        self.seconds += time.process_time() - start
        self.queries += len(queries)
        self.batches += 1
        old = self.by_purpose.get(queries.purpose, 0)
        self.by_purpose[queries.purpose] = old + len(queries)
        return answers


def random_network(seed: int, d: int, m: int, k: int | None = None) -> ReluNetwork:
    rng = np.random.default_rng([20260, seed, d, m, k or 0])
    shape = (m,) if k is None else (m, k)
    return ReluNetwork(
        rng.standard_normal((m, d)) / np.sqrt(d),
        0.5 * rng.standard_normal(m),
        rng.standard_normal(shape) / np.sqrt(m),
    )


def function_error(model: Callable, truth: Callable, d: int, seed: int) -> float:
    points = np.random.default_rng([1, seed]).standard_normal((20000, d))
    answers = truth(points)
    return float(np.abs(model(points) - answers).max() / answers.std())
