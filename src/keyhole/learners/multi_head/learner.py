"""Attention with any number of heads, from scalar or vector answers.

Statement. The canonical form of a layer (equal heads merged, heads without value dropped, order
free) is all that can be known of it, and all of it is recovered: H(d² + d) scalar answers and a
few more (isolated_heads), or for real layers, whose answers are vectors, about 4d + 2 - 2r of them
(joint_heads).

Queries and algebra, in short. Huge tokens: each head takes one of them, and small moves of that
one show its value. Soft queries around an anchor: the weights of a head have log-ratios that are
linear in its key, and keys at d anchors are its score. Vector answers keep the heads apart, so
that all are read at once; scalar ones need a separating token for every head but one. Fresh
queries validate, and the next anchor follows where they disagree. Sequences with no room for a
token per head: token_pairs. Tokens of bounded norm: bounded_tokens for layers whose heads
share out the width, random_queries for all others, for boxes of two dimensions, and for heads so
nearly equal that hard attention does not tell them apart. Few digits: least_squares over all
answers. A skip connection is found first and subtracted (skip). Boxes that compute in half
precision: half_precision.

When it fails. An answer that no number of heads explains is WrongFamily; where ways end for want of
digits, or of tokens in a query, IllConditioned.

Source. docs/methods/multi_head.md.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float, whole_number
from keyhole.errors import NotIdentifiable
from keyhole.learners.base import (
    Hypothesis,
    Inconclusive,
    Refuted,
    Result,
    at_most_the_width,
    run_strategies,
)
from keyhole.learners.multi_head.bounded_tokens import learn_bounded
from keyhole.learners.multi_head.half_precision import learn_half_precision
from keyhole.learners.multi_head.hard_attention import CANDIDATES, HUGE_TOKENS, Selection
from keyhole.learners.multi_head.isolated_heads import learn_isolated_heads
from keyhole.learners.multi_head.joint_heads import HiddenChoices, learn_joint_heads
from keyhole.learners.multi_head.least_squares import (
    SOFT_FLOORS,
    affords_least_squares,
    learn_by_least_squares,
    polish_draft,
    refine_by_least_squares,
)
from keyhole.learners.multi_head.random_queries import count_random_queries, learn_random
from keyhole.learners.multi_head.skip import learn_beside_skip
from keyhole.learners.multi_head.token_pairs import learn_from_pairs
from keyhole.linalg.bases import random_directions
from keyhole.measurement.asker import Asker, few_digits
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.wrappers.restrict import find_known_directions

Strategy = tuple[str, Callable[[], Result]]

PLANE_WIDTH = 2  # dimensions in which no token can be made that only one head prefers
ROOM = 5  # tokens: two heads with their separators, a probe of one of them, and the anchor


class Refutations:
    """Hypotheses that answers contradicted, in turn: each leaves the family open while there is
    another way to learn it. `fitted`: random queries are fitted if all else fails."""

    def __init__(self, fitted: bool) -> None:
        self.fitted = fitted
        self.refuted: list[Refuted] = []

    def weigh(self, strategy: Callable[[], Result]) -> Callable[[], Result]:
        """The strategy, whose refutation counts for what it says beside the earlier ones."""

        def run() -> Result:
            result = strategy()
            return self.add(result) if isinstance(result, Refuted) else result

        return run

    def add(self, result: Refuted) -> Refuted | Inconclusive:
        self.refuted.append(result)
        if isinstance(result, HiddenChoices):
            return Inconclusive(result.reason)
        if isinstance(self.refuted[0], HiddenChoices) and result.conclusive:
            return replace(self.refuted[0], conclusive=True)
        if self.fitted and not result.conclusive:
            return Inconclusive(result.reason)
        return result

    def confirm(self, result: Result) -> Result:
        """What a fit to random queries says: if it leaves too much of them, the first refutation
        stands."""
        if self.refuted and isinstance(result, Refuted):
            return replace(self.refuted[0], conclusive=True, searched=True)
        return result

    @property
    def leave_heads_open(self) -> bool:
        """Whether one head at a time may still be found: nothing was refuted, or only because heads
        hid which tokens they choose."""
        return not self.refuted or isinstance(self.refuted[0], HiddenChoices)

    @property
    def conclusive(self) -> bool:
        return any(each.conclusive for each in self.refuted)


def choose_polish(
    ask: Asker, rng: np.random.Generator, vectors: bool
) -> Callable[[Asker, Hypothesis], Result] | None:
    """Where errors behind separating tokens are too large, soft vector answers tell more; None
    where a draft is as good as it gets, or a budget buys a fit to all answers."""
    budgeted = ask.recording and ask.oracle.remaining is not None
    if not vectors or budgeted or ask.additive or ask.affords(HUGE_TOKENS):
        return None
    return lambda ask, draft: polish_draft(ask, draft, rng)


@dataclass(frozen=True)
class MultiHead:
    """Learner for attention with several heads.

    Args:
        heads: Number of heads, a claim that the box must bear out (fewer are reported as such, one
            more is WrongFamily); None finds it.
        rank: Rank of the scores, a claim too; None finds it.
        bias: Whether key biases and an offset may exist; None finds out with one query.
        attempts: Anchors that are tried until the hypothesis passes its own validation.

    Example:
        >>> import numpy as np, keyhole
        >>> from keyhole.models.random import attention
        >>> secret = attention(np.random.default_rng(0), 6, heads=2, outputs=6)
        >>> keyhole.recover(secret, MultiHead()).model
        Attention(width=6, heads=2, outputs=6)
    """

    heads: int | None = None
    rank: int | None = None
    bias: bool | None = None
    attempts: int = 5  # anchors tried until the hypothesis passes its own validation

    def __post_init__(self) -> None:
        for name in ("heads", "rank"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        whole_number("attempts", self.attempts, 1)

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        stated = oracle.spec.precision
        rounding = 0.0 if stated is None else HUGE_TOKENS * stated.token_roundoff
        if rounding >= 1.0 and oracle.spec.domain.unbounded:  # nothing is left behind huge tokens
            ask = Asker(oracle, rounding=True)
            strategy = ("half precision", lambda: learn_half_precision(ask, rng, self))
            return run_strategies([strategy])
        if stated is None:  # how many queries it takes depends on the digits of the first answer
            oracle.expect(None)
        return learn_beside_skip(oracle, rng, self.learn_heads)

    def learn_heads(
        self, oracle: Oracle, rng: np.random.Generator, selected: Selection | None = None
    ) -> Hypothesis:
        """The heads of a box without a skip connection; `selected` are tokens that its heads are
        known to prefer."""
        at_most_the_width(self.rank, oracle.spec.width)
        domain = oracle.spec.domain
        if domain.max_length == 1:
            raise NotIdentifiable("queries of a single token show nothing of the scores")
        ask = Asker(oracle)
        if ask.width <= PLANE_WIDTH:
            return run_strategies([("random queries", lambda: learn_random(ask, rng, self))])
        if not domain.unbounded:
            return run_strategies(self.list_bounded_strategies(ask, rng))
        frame = draw_frame(oracle, rng, selected)
        if ask.additive:  # noise that does not scale with the answer is outgrown
            frame = 1e8 * frame
        first = ask(frame[:1, None], "values")
        seen = replace(oracle.spec, outputs=first.shape[1], precision=ask.noise)
        expected = self.expected_queries(seen)
        known = len(find_known_directions(oracle))  # and zero
        oracle.expect(None if expected is None else expected - known - bool(known))
        exact = ask.affords(HUGE_TOKENS) and not ask.additive
        recording = not exact and (oracle.remaining is not None or first.shape[1] > 1)
        ask = replace(ask, recording=recording)
        found = run_strategies(self.list_strategies(ask, rng, frame, first, selected))
        return refine_by_least_squares(ask, found, rng)

    def list_strategies(
        self,
        ask: Asker,
        rng: np.random.Generator,
        frame: np.ndarray,
        first: np.ndarray,
        selected: Selection | None,
    ) -> Iterator[Strategy]:
        """Where tokens may be of any size; `first` is the answer to the first row of `frame`.

        Heads that are nearly equal or proportional select the same tokens, however these are
        chosen: to hard attention they look like no attention. Before a box is refused for that,
        random queries are fitted with up to two heads. Which strategy comes next depends on how the
        one before ended: they must be taken one after the other, as `run_strategies` does.
        """
        longest = ask.oracle.spec.domain.max_length or CANDIDATES + 1
        fitted = longest > CANDIDATES and (self.heads or 2) <= 2
        vectors, refutations = first.shape[1] > 1, Refutations(fitted)

        def fit_random_queries() -> Result:
            result = learn_random(ask, rng, self, most_heads=self.heads or 2)
            return refutations.confirm(result)

        if longest > CANDIDATES and vectors and affords_least_squares(ask):
            yield (
                "a rough start, then least squares over all answers",
                lambda: learn_by_least_squares(ask, rng, self, frame, first),
            )
        if longest >= ROOM:
            if vectors:
                yield (
                    "all heads at once through vector answers",
                    refutations.weigh(
                        lambda: learn_joint_heads(ask, rng, self, frame, first, selected)
                    ),
                )
            # a refutation is final, unless candidate tokens were too few for the heads, or heads
            # hid which of them they choose
            if longest <= CANDIDATES or refutations.leave_heads_open:
                if vectors:  # what was expected of vector answers does not hold
                    ask.oracle.expect(None)
                polish = choose_polish(ask, rng, vectors)
                yield (
                    "one head at a time behind separating tokens",
                    refutations.weigh(
                        lambda: learn_isolated_heads(ask, rng, self, frame, first, polish)
                    ),
                )
        if longest <= CANDIDATES:
            yield (
                "one head at a time by queries of two tokens",
                refutations.weigh(lambda: learn_from_pairs(ask, rng, self, frame, first)),
            )
        if fitted and not refutations.conclusive:
            yield "random queries, for heads that are nearly equal", fit_random_queries

    def list_bounded_strategies(self, ask: Asker, rng: np.random.Generator) -> Iterator[Strategy]:
        """Where tokens are bounded or given."""
        if ask.oracle.spec.domain.vocabulary is None:
            yield "eigenvalues of the Jacobian", lambda: learn_bounded(ask, rng, self)
        yield "random queries", lambda: learn_random(ask, rng, self)

    def expected_queries(self, spec: Spec) -> int | None:
        at_most_the_width(self.rank, spec.width)
        d, heads = spec.width, self.heads or 4
        domain, rank = spec.domain, self.rank or d
        each = 2 * rank * d - rank**2 + d
        if d <= PLANE_WIDTH:
            return count_random_queries(d, heads, spec.outputs or 1) + 50
        if domain.unbounded and (domain.max_length or ROOM) < ROOM:
            return heads * (each + 2 * d + 22)  # about so many to find where a head switches
        if spec.outputs is not None and spec.outputs > 1:
            inner = self.rank or max(1, d // heads)
            again = SOFT_FLOORS * (4 * d + 2 - 2 * inner) if few_digits(spec) else 0
            return int(4 * d + 2 - 2 * inner + d // 4 + 2 * heads + 12 + again)
        if self.heads is None:
            return None
        if not domain.unbounded:
            return count_random_queries(d, heads, 1) + 50
        return heads * each + 3 * heads + 6


def draw_frame(
    oracle: Oracle, rng: np.random.Generator, selected: Selection | None
) -> Float[Array, "d d"]:
    """Random orthonormal directions, those first along which single tokens are known, or selected
    tokens have been shifted."""
    known = find_known_directions(oracle)
    if selected is not None and not len(known):
        known = selected.shift[None]
    drawn = random_directions(rng, oracle.spec.width, oracle.spec.width)
    drawn[: len(known)] = known
    q, r = np.linalg.qr(drawn.T)
    return np.asarray((q * np.sign(np.diag(r))).T)
