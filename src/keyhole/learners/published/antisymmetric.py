"""f(X) - f(-X): the reduction from a Transformer layer without biases to attention.

Scores are quadratic in the tokens, so attention(-X) = -attention(X); and relu(z) - relu(-z) = z.
The difference is therefore a plain attention head whose value vector is the network's linear part.
(Section 4 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with Queries".)
A key bias breaks the symmetry of the scores, a bias in the network that of the answers.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import DomainError
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import QueryBatch


@dataclass(frozen=True, eq=False)
class Antisymmetric(Oracle):
    """Asks the inner box two queries for each of its own."""

    inner: Oracle
    spec: Spec = field(init=False)

    def __post_init__(self) -> None:
        spec = self.inner.spec
        domain = spec.domain
        if domain.vocabulary is not None:
            raise DomainError("the negative of a vocabulary's token is no token of it")
        reach = [abs(bound) for bound in (domain.low, domain.high) if bound is not None]
        low = high = None
        if reach:
            one_sided = (domain.low is not None and domain.low > 0) or (
                domain.high is not None and domain.high < 0
            )
            if one_sided:
                raise DomainError("the negative of a token lies outside the domain")
            low, high = -min(reach), min(reach)
        object.__setattr__(self, "spec", replace(spec, domain=replace(domain, low=low, high=high)))

    def ask(self, queries: QueryBatch) -> Array:
        tokens = queries.tokens()
        both = QueryBatch.of(np.concatenate([tokens, -tokens]), queries.purpose)
        answers = self.inner.ask(both)
        return np.asarray(answers[: len(queries)] - answers[len(queries) :])

    def close(self) -> None:
        self.inner.close()
