"""Huge tokens: every head attends to exactly one token, and the box becomes linear.

Queries. At a fixed anchor x the box gets m tokens s t_i with s enormous. Head h picks the
token with the largest t_i . p_h(x) and answers with its value: f = sum_h s t_i(h) . v_h,
exactly. Moving token i by a_i delta changes the answer by sum_h a_i(h) (delta . v_h). The
patterns a = cos(k theta), sin(k theta) make these answers trigonometric moments, which name the
tokens in use (linalg/sparse_moments). With vector answers a few random patterns do.

Inversion. The tokens in use, one per group of heads that attends to it (a leaf), plus all
answers as exact linear equations in the values. A head with score zero attends to all tokens
alike: it shifts the constant moment alone, and is recognised by that.

When it fails. Two heads on one token look like one: leaf_splitting separates them. A box
whose attention never hardens (a cap on scores) explains no moments.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, NotIdentifiable, WrongFamily
from keyhole.learners.multi_head.halved_leaves import halved_leaves
from keyhole.learners.multi_head.leaves import (
    HARD,
    HARDER,
    MOMENT_DOUBT,
    MOST_HEADS,
    NEVER_HARD,
    NO_VALUE,
    REACH,
    TRIES,
    Leaves,
    ask_hard,
    bag_size,
    too_many,
)
from keyhole.linalg.bases import random_directions
from keyhole.linalg.linear_system import Equations
from keyhole.linalg.sparse_moments import (
    Support,
    fitted,
    support_from_moments,
    trigonometric_patterns,
)
from keyhole.measurement.asking import Asker

SHORT = 3  # moments beyond the claimed number of heads before another bag is tried
SPARE = 24  # the same for the last bag, before the family is doubted
SILENT = 1e-280  # answers that are zero
SUSPICIONS = 2  # times that more heads than claimed must be seen before the claim is doubted
TELLING = 5  # moments from which on a uniform head can be told from two others


def find_leaves(
    ask: Asker,
    anchor: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    heads: int | None,
    rng: np.random.Generator,
) -> Leaves:
    """The tokens in use out of a random bag; `total` is the sum of all values."""
    size = bag_size(ask, heads)
    scale = HARD / float(np.linalg.norm(anchor))
    if ask.coarse and not ask.additive:
        by_halves = halved_leaves(ask, anchor, total, heads, rng, size, scale)
        if by_halves is not None:
            return by_halves
    crowd: WrongFamily | None = None
    found: Leaves | Counterexample | WrongFamily
    for attempt in range(TRIES):
        patience = SPARE if attempt == TRIES - 1 else SHORT
        found = _one_bag(ask, anchor, total, heads, rng, size, scale, patience)
        if isinstance(found, Leaves):
            return found
        if isinstance(found, WrongFamily):
            if crowd is not None:  # two bags agree that there are more heads than claimed
                raise found
            crowd = found
        else:
            scale *= HARDER
    if isinstance(found, WrongFamily):
        raise found
    raise WrongFamily(NEVER_HARD, found if isinstance(found, Counterexample) else None)


@dataclass(eq=False)
class _Bag:
    """Huge tokens at one anchor, moved along `shift` by one trigonometric pattern after another."""

    anchor: Float[Array, " d"]
    scale: float
    tokens: Float[Array, "n d"]
    shift: Float[Array, " d"]
    mix: Float[Array, " outputs"]  # of the outputs into the one number that moments are made of
    whole: float  # what all heads together answer to the shift
    step: float
    base: Float[Array, "one outputs"]
    moved: Float[Array, "k n d"]
    answers: Float[Array, "k outputs"]

    @property
    def angles(self) -> Float[Array, " n"]:
        return 2 * np.pi * np.arange(len(self.tokens)) / len(self.tokens)

    @property
    def moments(self) -> Float[Array, " m"]:
        return np.concatenate([[self.whole], (self.answers - self.base) @ self.mix / self.step])

    def patterns(self, order: int | None = None) -> Float[Array, "p n"]:
        """Up to an order, or those that were asked; the first is constant."""
        return trigonometric_patterns(
            len(self.answers) // 2 if order is None else order, self.angles
        )

    def ask(self, ask: Asker, order: int) -> None:
        """The patterns up to an order that were not asked yet."""
        patterns = self.patterns(order)[1 + len(self.answers) :]
        moved = self.tokens + self.step * patterns[:, :, None] * self.shift
        fresh = ask_hard(ask, moved, self.anchor, self.scale, "leaves")
        self.moved = np.concatenate([self.moved, moved])
        self.answers = np.concatenate([self.answers, fresh])

    def leaves(self, nodes: Array, uniform: bool) -> Leaves:
        """The chosen tokens, with all that the answers say of their values."""
        chosen = self.tokens[nodes]
        equations = Equations(len(chosen) + int(uniform), len(self.anchor))
        reach = np.full(len(chosen), REACH)
        origin = self._rows(self.tokens[None], nodes, uniform)
        equations.add(origin, self.base)
        equations.add(self._rows(self.moved, nodes, uniform), self.answers, origin[0])
        return Leaves(self.anchor, chosen, reach, self.scale, equations, uniform)

    def _rows(self, tokens: Array, nodes: Array, uniform: bool) -> Array:
        rows = tokens[:, nodes]
        if uniform:
            mean = (tokens.sum(axis=1) + self.anchor / self.scale) / (tokens.shape[1] + 1)
            rows = np.concatenate([rows, mean[:, None]], axis=1)
        return rows

    def fewest(self, support: Support, heads: int) -> Support:
        """The best explanation of the moments by the `heads` loudest nodes."""
        loudest = np.sort(np.argsort(-np.abs(support.weights), kind="stable")[:heads])
        return fitted(self.patterns(), self.moments, support.nodes[loudest])

    def counterexample(self, support: Support) -> Counterexample:
        """The query that the best support explains worst."""
        predicted = self.patterns()[1:, support.nodes] @ support.weights
        off = predicted - self.moments[1:]
        worst = int(np.argmax(np.abs(off)))
        answer = (self.answers @ self.mix)[worst] * self.scale
        return Counterexample(
            input=np.concatenate([self.scale * self.moved[worst], self.anchor[None]]),
            box_answer=np.asarray(answer),
            model_answer=np.asarray(answer + off[worst] * self.step * self.scale),
            reason=f"best explanation by {len(support.nodes)} heads that each attend to one token",
        )


def _drawn(
    ask: Asker, anchor: Array, total: Array, rng: np.random.Generator, size: int, scale: float
) -> _Bag:
    """A random bag, asked about without a move."""
    width, outputs = total.shape
    tokens, shift = random_directions(rng, size, width), random_directions(rng, 1, width)[0]
    mix = np.asarray(rng.standard_normal(outputs)) if outputs > 1 else np.ones(1)
    step = ask.unit**0.25  # balances rounding of the answer against switching tokens
    base = ask_hard(ask, tokens[None], anchor, scale, "leaves")
    moved, answers = np.zeros((0, size, width)), np.zeros((0, outputs))
    whole = float(shift @ total @ mix)
    return _Bag(anchor, scale, tokens, shift, mix, whole, step, base, moved, answers)


def _one_bag(
    ask: Asker,
    anchor: Array,
    total: Array,
    heads: int | None,
    rng: np.random.Generator,
    size: int,
    scale: float,
    patience: int,
) -> Leaves | Counterexample | WrongFamily:
    """One random bag: the leaves, a query nobody explains, or too many heads."""
    bag = _drawn(ask, anchor, total, rng, size, scale)
    doubt = MOMENT_DOUBT * ask.unit / bag.step
    silent = SILENT + ask.noise / (bag.step * scale)
    order, most = (1, MOST_HEADS) if heads is None else (heads, heads + patience)
    most, suspicions = min(most, (size - 1) // 2), 0
    while True:
        bag.ask(ask, order)
        if max(np.abs(bag.moments).max(), np.abs(bag.base).max()) <= silent:
            raise NotIdentifiable(NO_VALUE)
        support, uniform = _explained(bag.moments, bag.angles, doubt)
        count = len(support.nodes) + int(uniform)
        if support.misfit <= doubt:
            if heads is None or count <= heads or suspicions == SUSPICIONS:
                break
            suspicions += 1
        order += 1
        if order > most:
            return bag.counterexample(support)
    if heads is not None and count > heads:
        fewer = bag.fewest(support, heads)
        return WrongFamily(too_many(count, heads), bag.counterexample(fewer))
    return bag.leaves(support.nodes, uniform)


def _explained(moments: Array, angles: Array, doubt: float) -> tuple[Support, bool]:
    """The smallest support; where none fits, one next to a uniform head, whose weight is added
    to the constant moment alone and so shifts the whole spectrum of the Toeplitz matrix."""
    if np.abs(moments[1:]).max() <= doubt * abs(moments[0]):  # nobody chooses: all heads uniform
        return Support(np.zeros(0, int), np.zeros(0), 0.0), True
    support = support_from_moments(moments, angles, doubt)
    if support.misfit <= doubt or len(moments) < TELLING:
        return support, False
    free = support_from_moments(moments, angles, doubt, constant_known=False)
    return (free, True) if free.misfit <= doubt else (support, False)
