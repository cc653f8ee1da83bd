"""Leaves where answers are vectors: as many random patterns as heads, and one more, suffice.

Tokens of a random bag are moved by a_i delta, and the answer changes by sum_h a_i(h) (delta . v_h):
vectors that span as many dimensions as there are leaves name the tokens in use (algebra/
trigonometric_moments), as long as there are no more leaves than outputs.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, WrongFamily
from keyhole.learners.multi_head.leaves import (
    HARD,
    HARDER,
    MOMENT_DOUBT,
    MOST_HEADS,
    NEVER_HARD,
    REACH,
    TRIES,
    Leaves,
    ask_hard,
    bag_size,
    complete,
    too_many,
)
from keyhole.linalg.bases import random_directions
from keyhole.linalg.linear_system import Equations
from keyhole.linalg.sparse_moments import Support, fitted, support_from_vectors
from keyhole.measurement.asking import Asker

COARSE = 1e-10  # rounding error from which on the leaves found are checked by a query


class Overcomplete(Exception):
    """There are more heads, or wider ones, than outputs: answers do not keep the heads apart."""


def find_vector_leaves(
    ask: Asker, anchor: Array, heads: int | None, shift: Array, rng: np.random.Generator
) -> tuple[Leaves, Float[Array, "h outputs"]]:
    """The leaves, and what each answers to `shift`."""
    size, scale = bag_size(ask), HARD / float(np.linalg.norm(anchor))
    counterexample = None
    for _ in range(TRIES):
        seen = _one_bag(ask, anchor, heads, shift, rng, size, scale)
        if seen.explained:
            if heads is not None and len(seen.support.nodes) > heads:
                raise WrongFamily(too_many(len(seen.support.nodes), heads), seen.refuted(heads))
            leaves = seen.leaves()
            if ask.unit < COARSE or complete(ask, leaves, seen.base):
                return leaves, seen.support.weights
            continue
        if len(seen.support.nodes) >= ask.outputs:
            raise Overcomplete
        reason = "no number of heads explains the answers to huge tokens"
        counterexample = seen.counterexample(-1, np.zeros(ask.outputs), reason)
        scale *= HARDER
    raise WrongFamily(NEVER_HARD, counterexample)


@dataclass(frozen=True, eq=False)
class _MovedBag:
    """One bag, moved by some patterns, and the tokens that explain the answers."""

    anchor: Float[Array, " d"]
    scale: float
    bag: Float[Array, "n d"]
    shift: Float[Array, " d"]
    patterns: Float[Array, "k n"]
    base: Float[Array, " outputs"]
    answers: Float[Array, "k outputs"]  # changes per unit of a pattern
    step: float
    support: Support
    doubt: float

    @property
    def explained(self) -> bool:
        fewer = len(self.support.nodes) < len(self.patterns)
        return fewer and self.support.misfit <= self.doubt

    def leaves(self) -> Leaves:
        tokens = self.bag[self.support.nodes]
        equations = Equations(*tokens.shape)
        equations.add(tokens[None], self.base[None])
        reach = np.full(len(tokens), REACH)
        return Leaves(self.anchor, tokens, reach, self.scale, equations, False)

    def refuted(self, heads: int) -> Counterexample:
        """What speaks against the `heads` loudest tokens alone."""
        loudest = np.argsort(-np.linalg.norm(self.support.weights, axis=1), kind="stable")
        nodes = np.sort(self.support.nodes[loudest[:heads]])
        fewer = fitted(self.patterns, self.answers, nodes)
        guess = self.patterns[0, fewer.nodes] @ fewer.weights
        return self.counterexample(0, guess, f"best explanation by {heads} heads")

    def counterexample(self, number: int, guess: Array, reason: str) -> Counterexample:
        """A query, its answer, and a guess at how the pattern changes it."""
        moved = self.bag + self.step * self.patterns[number][:, None] * self.shift
        return Counterexample(
            input=np.concatenate([self.scale * moved, self.anchor[None]]),
            box_answer=(self.base + self.step * self.answers[number]) * self.scale,
            model_answer=(self.base + self.step * guess) * self.scale,
            reason=reason,
        )


def _one_bag(
    ask: Asker,
    anchor: Array,
    heads: int | None,
    shift: Array,
    rng: np.random.Generator,
    size: int,
    scale: float,
) -> _MovedBag:
    """One pattern after the other, until fewer tokens than patterns explain the answers."""
    step = ask.unit ** (1 / 3)  # vectors need less signal than moments
    doubt = MOMENT_DOUBT * ask.unit / step
    bag = random_directions(rng, size, len(anchor))
    base = ask_hard(ask, bag[None], anchor, scale, "leaves")
    most = min(size - 1, base.shape[1], MOST_HEADS)
    patterns = rng.standard_normal((most + 1, size))
    patterns /= np.abs(patterns).max(axis=1, keepdims=True)
    answers = np.zeros((0, base.shape[1]))
    goal = 2 if heads is None else heads + 1
    while True:
        moved = bag + step * patterns[len(answers) : goal, :, None] * shift
        change = ask_hard(ask, moved, anchor, scale, "leaves") - base
        answers = np.concatenate([answers, change / step])
        asked = patterns[: len(answers)]
        support = support_from_vectors(answers, asked, doubt)
        seen = _MovedBag(anchor, scale, bag, shift, asked, base[0], answers, step, support, doubt)
        if seen.explained or len(answers) > most:
            return seen
        goal += 1
