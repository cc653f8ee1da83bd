"""Small language models for tests of their interfaces, and a learner of the space of answers."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.learners.base import Hypothesis
from keyhole.oracles.queries import QueryBatch

TOKENS, WIDTH = 40, 6


@dataclass
class LastTokens:
    """Logits from the last two tokens, with a count of its own."""

    logprobs: bool = False
    seen: int = 0
    table: np.ndarray = field(
        default_factory=lambda: np.random.default_rng(0).standard_normal((2, TOKENS, WIDTH))
    )
    outer: np.ndarray = field(
        default_factory=lambda: np.random.default_rng(1).standard_normal((WIDTH, TOKENS))
    )

    def __call__(self, prompts):
        assert prompts.dtype == np.int64
        assert prompts.ndim == 2
        self.seen += len(prompts)
        hidden = self.table[0][prompts[:, -1]] + self.table[1][prompts[:, 0]]
        logits = hidden @ self.outer
        if not self.logprobs:
            return logits
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class Possible:
    """Which answers are possible: an output layer in small."""

    basis: np.ndarray

    @property
    def tokens(self):
        return len(self.basis)

    def nearest(self, answers):
        return answers @ self.basis @ self.basis.T

    def to_arrays(self):
        return {"basis": self.basis}

    @classmethod
    def from_arrays(cls, arrays):
        return cls(arrays["basis"])


@dataclass(frozen=True)
class Space:
    """Learns the space of the answers, of so many directions."""

    rank: int = WIDTH
    queries: int = 20

    def expected_queries(self, spec):
        return self.queries

    def learn(self, oracle, rng):
        prompts = rng.integers(oracle.spec.domain.tokens, size=(self.queries, 3, 1)).astype(float)
        answers = oracle.ask(QueryBatch.of(prompts, "answers"))
        basis = np.linalg.svd(answers, full_matrices=False)[2][: self.rank].T
        # singular vectors are rounded a few times: by how much depends on the machine
        rounded = Possible(np.full(basis.shape, 8.0 * np.finfo(float).eps))
        return Hypothesis(Possible(basis), rounded, 1.0)
