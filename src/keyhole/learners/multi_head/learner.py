"""Attention with any number of heads, from scalar or vector answers.

Statement. The canonical form of a layer (equal heads merged, heads without value dropped, order
free) is all that can be known of it, and all of it is recovered: H(d² + d) scalar answers and a
few more (scalar_outputs), or for real layers, whose answers are vectors, about 4d +
2 - 2r of them (learners/multi_head/vector_outputs).

QueryBatch, algebra, when it fails: see those two files. Tokens of bounded norm:
bounded_tokens for layers whose heads share out the width, random_queries
for all others. Sequences with no room for a token per head: learners/multi_head/short_sequences.

Source. docs/learners/multi_head/learner.md.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, whole_number
from keyhole.errors import DomainError, IllConditioned, NotIdentifiable, WrongFamily
from keyhole.learners.base import Hypothesis, at_most_the_width
from keyhole.learners.multi_head.bounded_tokens import learn_bounded
from keyhole.learners.multi_head.least_squares import polished
from keyhole.learners.multi_head.leaves import BAG
from keyhole.learners.multi_head.random_queries import learn_random, queries_for
from keyhole.learners.multi_head.scalar_outputs import learn_scalar
from keyhole.learners.multi_head.vector_leaves import Overcomplete
from keyhole.learners.multi_head.vector_outputs import learn_vector
from keyhole.linalg.bases import random_directions
from keyhole.measurement.asking import Asker, few_digits
from keyhole.oracles.base import Oracle, Spec

LOUD = 1e8  # size of single tokens where noise does not scale with the answer
EXPLORING = 50  # queries before random ones, and fresh ones after
NARROW = 2  # dimensions in which tokens cannot be made that only one head prefers
ROOM = 5  # tokens: two heads with their gates, one of them opened, and the anchor
SWITCH = 22  # queries that find where a head switches
USUAL_HEADS = 4  # forecast where the number of heads is not given


@dataclass(frozen=True)
class MultiHead:
    """Recovers `Attention` with several heads.

    heads, rank: where given, they are claims that the box must bear out (fewer heads are reported
    as such, one more is WrongFamily); None finds them. bias: whether key biases and an offset may
    exist; None finds out with one query.
    """

    heads: int | None = None
    rank: int | None = None
    bias: bool | None = None
    attempts: int = 5  # base anchors tried until the hypothesis passes its own validation

    def __post_init__(self) -> None:
        for name in ("heads", "rank"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        whole_number("attempts", self.attempts, 1)

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        width = oracle.spec.width
        at_most_the_width(self.rank, width)
        if oracle.spec.domain.max_length == 1:
            raise NotIdentifiable("queries of a single token show nothing of the scores")
        ask = Asker(oracle)
        if width <= NARROW:
            return learn_random(ask, rng, self)
        if not oracle.spec.domain.unbounded:
            return self.recovered_within(ask, rng)
        frame = random_directions(rng, width, width)
        size = LOUD if ask.additive else 1.0  # noise that does not scale is outgrown
        frame = size * np.linalg.qr(frame)[0].T
        first = ask(frame[:1, None], "values")
        ask.recording = oracle.remaining is not None and bool(ask.coarse or ask.additive)
        return polished(ask, self.recovered(ask, rng, frame, first), rng)

    def recovered(
        self,
        ask: Asker,
        rng: np.random.Generator,
        frame: Float[Array, "d d"],
        first: Float[Array, "one outputs"],
    ) -> Hypothesis:
        """The layer step by step; `first` is the answer to the first row of `frame` alone."""
        longest = ask.oracle.spec.domain.max_length or BAG + 1
        if longest >= ROOM:
            try:
                return self.recovered_by_gates(ask, rng, frame, first)
            except (DomainError, WrongFamily):
                if longest > BAG:
                    raise
                ask.offset = 0.0
        return learn_scalar(ask, rng, self, frame, first, pairs=True)

    def recovered_by_gates(
        self,
        ask: Asker,
        rng: np.random.Generator,
        frame: Float[Array, "d d"],
        first: Float[Array, "one outputs"],
    ) -> Hypothesis:
        """The same where sequences have room for a token per head."""
        if first.shape[1] > 1:
            try:
                return learn_vector(ask, rng, self, frame, first)
            except Overcomplete:  # heads opened one at a time need no separate outputs
                ask.offset = 0.0
        return learn_scalar(ask, rng, self, frame, first)

    def recovered_within(self, ask: Asker, rng: np.random.Generator) -> Hypothesis:
        """The layer where tokens are bounded or given."""
        if ask.oracle.spec.domain.vocabulary is None:
            try:
                return learn_bounded(ask, rng, self)
            except (IllConditioned, WrongFamily):  # few queries, for layers of one kind only
                ask.offset = 0.0
        return learn_random(ask, rng, self)

    def expected_queries(self, spec: Spec) -> int | None:
        at_most_the_width(self.rank, spec.width)
        d, heads = spec.width, self.heads or USUAL_HEADS
        domain, rank = spec.domain, self.rank or d
        each = 2 * rank * d - rank**2 + d
        if d <= NARROW:
            return queries_for(d, heads, spec.outputs or 1) + EXPLORING
        if domain.unbounded and (domain.max_length or ROOM) < ROOM:
            return heads * (each + 2 * d + SWITCH)
        if spec.outputs is not None and spec.outputs > 1:
            inner = self.rank or max(1, d // heads)
            again = max(0, 4 * d - inner - 8) if few_digits(spec) else 0  # a second set of columns
            return int(4 * d + 2 - 2 * inner + d // 4 + 2 * heads + 12) + again
        if not domain.unbounded:
            return queries_for(d, heads, 1) + EXPLORING
        return heads * each + 3 * heads + 6
