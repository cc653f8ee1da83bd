"""What a box does not answer: sequences that are too long, tokens that are too large.

Statement.  After a query was refused, the longest sequence and the largest token that the box
            answers are found, so that everything can be asked again within them.
Queries.    One token of ordinary size: does the box answer at all? As many ordinary tokens as the
            refused query had, and where these are refused, fewer by halving; a token as large as
            its largest, and where that is refused, shorter ones by halving.
When it fails.  A box that refuses ordinary tokens as well, or answers the length and the size of
            what it refused before: nothing is known then, and the refusal stands.
Source.     Keyhole's own; docs/guide/boxes.md.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Inconsistent, OracleError
from keyhole.measurement.noise import inside
from keyhole.oracles.base import Domain, Oracle, Spec, Wrapper
from keyhole.oracles.http.retry import Outage
from keyhole.oracles.queries import LIMITS, QueryBatch


@dataclass(frozen=True, eq=False)
class Within(Wrapper):
    """The inner box within `domain`, where one was found; keeps the query that was refused last."""

    inner: Oracle
    domain: Domain | None = None
    refused: list[QueryBatch] = field(default_factory=list)  # one at most

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        spec = self.inner.spec
        return spec if self.domain is None else replace(spec, domain=self.domain)

    def ask(self, queries: QueryBatch) -> Array:
        if self.domain is not None:
            self.domain.check(queries.tokens())
        try:
            return self.inner.ask(queries)
        except (Outage, Inconsistent):  # no refusal: another query would have met the same
            self.refused.clear()
            raise
        except OracleError:
            self.refused[:] = [queries]
            raise

    def narrow(self, rng: np.random.Generator) -> "Within | None":
        """The same box within the limits that its last refusal shows; None where it shows none."""
        limits = find_limits(self, self.refused[0], rng) if self.refused else None
        return None if limits is None else Within(self.inner, limits)


def find_limits(oracle: Oracle, refused: QueryBatch, rng: np.random.Generator) -> Domain | None:
    """The domain that the box answers; None where nothing is found that it refuses."""
    domain, width = oracle.spec.domain, oracle.spec.width
    if domain.vocabulary is not None or domain.tokens is not None or domain.radius <= 0:
        return None
    ordinary = inside(oracle, rng.standard_normal((1, refused.length, width)), rng)

    def answers(tokens: Float[Array, "n length d"]) -> bool:
        try:
            oracle.ask(QueryBatch.of(tokens, LIMITS))
        except (Outage, Inconsistent):
            raise
        except OracleError:
            return False
        return True

    if not answers(ordinary[:, :1]):
        return None
    found: dict[str, Any] = {}
    if refused.length > 1 and not answers(ordinary):
        short, long = 1, refused.length
        while long - short > 1:
            middle = (short + long) // 2
            short, long = (middle, long) if answers(ordinary[:, :middle]) else (short, middle)
        found["max_length"] = short
    largest = float(np.sqrt((refused.tokens() ** 2).sum(axis=2).max()))
    direction = ordinary[:, :1] / np.linalg.norm(ordinary[0, 0])
    if not domain.unbounded or answers(largest * direction):
        return replace(domain, **found) if found else None
    small, large = float(np.linalg.norm(ordinary[0, 0])), largest
    near = 1.05  # factor within which the largest norm is found
    while large > near * small:
        mean = float(np.sqrt(small * large))
        small, large = (mean, large) if answers(mean * direction) else (small, mean)
    return replace(domain, **found, max_norm=small)


def tell_limits(stated: Domain, found: Domain) -> tuple[str, ...]:
    """The limits that were found, for the reader of a report."""
    told = []
    if found.max_length != stated.max_length:
        told.append(f"The box answers sequences of at most {found.max_length} tokens.")
    if found.max_norm != stated.max_norm:
        told.append(f"The box answers tokens of norm {found.max_norm:.4g} at most, as far as seen.")
    return tuple(told)
