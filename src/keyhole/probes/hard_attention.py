"""Huge tokens: every head attends to exactly one token, and the box becomes linear.

Questions. At a fixed query x the box gets m tokens s t_i with s enormous. Head h picks the
token with the largest t_i . p_h(x) and answers with its value: f = sum_h s t_i(h) . v_h,
exactly. Moving token i by a_i delta changes the answer by sum_h a_i(h) (delta . v_h). The
patterns a = cos(k theta), sin(k theta) make these answers trigonometric moments, which name the
tokens in use (algebra/ trigonometric_moments). With vector answers a few random patterns do.

Inversion. The tokens in use, one per group of heads that attends to it (a leaf), plus all
answers as exact linear equations in the values. A head with score zero attends to all tokens
alike: it shifts the constant moment alone, and is recognised by that.

When it fails. Two heads on one token look like one: probes/leaf_splitting separates them. A box
whose attention never hardens (a cap on scores) explains no moments.
"""

import numpy as np

from keyhole.algebra.bases import random_directions
from keyhole.algebra.linear_equations import Equations
from keyhole.algebra.trigonometric_moments import (
    Support,
    fitted,
    support_from_moments,
    trigonometric_patterns,
)
from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, NotIdentifiable, WrongFamily
from keyhole.probes.asking import Asker
from keyhole.probes.halved_leaves import halved_leaves
from keyhole.probes.leaves import (
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

SHORT = 3  # moments beyond the claimed number of heads before another bag is tried
SPARE = 24  # the same for the last bag, before the family is doubted
SILENT = 1e-280  # answers that are zero


def find_leaves(
    ask: Asker,
    query: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    heads: int | None,
    rng: np.random.Generator,
) -> Leaves:
    """The tokens in use out of a random bag; `total` is the sum of all values."""
    size = bag_size(ask, heads)
    scale = HARD / float(np.linalg.norm(query))
    if ask.coarse and not ask.additive:
        by_halves = halved_leaves(ask, query, total, heads, rng, size, scale)
        if by_halves is not None:
            return by_halves
    crowd: WrongFamily | None = None
    found: Leaves | Counterexample | WrongFamily
    for attempt in range(TRIES):
        patience = SPARE if attempt == TRIES - 1 else SHORT
        found = _one_bag(ask, query, total, heads, rng, size, scale, patience)
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


def _one_bag(
    ask: Asker,
    query: Array,
    total: Array,
    heads: int | None,
    rng: np.random.Generator,
    size: int,
    scale: float,
    patience: int,
) -> Leaves | Counterexample | WrongFamily:
    """One random bag: the leaves, a question nobody explains, or too many heads."""
    width, outputs = total.shape
    bag, shift = random_directions(rng, size, width), random_directions(rng, 1, width)[0]
    mix = rng.standard_normal(outputs) if outputs > 1 else np.ones(1)
    angles = 2 * np.pi * np.arange(size) / size
    step = ask.unit**0.25  # balances rounding of the answer against switching tokens
    doubt = MOMENT_DOUBT * ask.unit / step
    base = ask_hard(ask, bag[None], query, scale, "leaves")
    order, most = (1, MOST_HEADS) if heads is None else (heads, heads + patience)
    suspicious = 2  # how often more heads than claimed must be seen before the claim is doubted
    most = min(most, (size - 1) // 2)
    answers = np.zeros((0, outputs))
    asked = np.zeros((0, size, width))
    while True:
        patterns = trigonometric_patterns(order, angles)[1 + len(answers) :]
        moved = bag + step * patterns[:, :, None] * shift
        fresh = ask_hard(ask, moved, query, scale, "leaves")
        asked, answers = np.concatenate([asked, moved]), np.concatenate([answers, fresh])
        moments = np.concatenate([[shift @ total @ mix], (answers - base) @ mix / step])
        silent = SILENT + 5 * ask.additive / (step * scale)
        if max(np.abs(moments).max(), np.abs(base).max()) <= silent:
            raise NotIdentifiable(NO_VALUE)
        support, uniform = _explained(moments, angles, doubt)
        if support.misfit <= doubt:
            if heads is None or len(support.nodes) + uniform <= heads or suspicious == 0:
                break
            suspicious -= 1
        order += 1
        if order > most:
            return _unexplained(asked, answers @ mix, query, scale, moments, support, angles, step)
    chosen = bag[support.nodes]
    count = len(chosen) + int(uniform)
    if heads is not None and count > heads:
        fewer = fewest(support, heads, angles, moments)
        return WrongFamily(
            too_many(count, heads),
            _unexplained(asked, answers @ mix, query, scale, moments, fewer, angles, step),
        )
    equations = Equations(count, width)
    leaves = Leaves(query, chosen, np.full(len(chosen), REACH), scale, equations, uniform)
    origin = _rows(bag[None], support.nodes, uniform, query / scale)
    equations.add(origin, base)
    equations.add(_rows(asked, support.nodes, uniform, query / scale), answers, origin[0])
    return leaves


def fewest(support: Support, heads: int, angles: Array, moments: Array) -> Support:
    """The best explanation of the moments by the `heads` loudest nodes."""
    loudest = np.sort(np.argsort(-np.abs(support.weights), kind="stable")[:heads])
    patterns = trigonometric_patterns((len(moments) - 1) // 2, angles)
    return fitted(patterns, moments, support.nodes[loudest])


def _rows(tokens: Array, nodes: Array, uniform: bool, query: Array) -> Array:
    rows = tokens[:, nodes]
    if uniform:
        mean = (tokens.sum(axis=1) + query) / (tokens.shape[1] + 1)
        rows = np.concatenate([rows, mean[:, None]], axis=1)
    return rows


def _explained(moments: Array, angles: Array, doubt: float) -> tuple[Support, bool]:
    """The smallest support; where none fits, one next to a uniform head, whose weight is added
    to the constant moment alone and so shifts the whole spectrum of the Toeplitz matrix."""
    if np.abs(moments[1:]).max() <= doubt * abs(moments[0]):  # nobody chooses: all heads uniform
        return Support(np.zeros(0, int), np.zeros(0), 0.0), True
    support = support_from_moments(moments, angles, doubt)
    if support.misfit <= doubt or len(moments) < 5:
        return support, False
    free = support_from_moments(moments, angles, doubt, constant_known=False)
    return (free, True) if free.misfit <= doubt else (support, False)


def _unexplained(
    asked: Array,
    answers: Array,
    query: Array,
    scale: float,
    moments: Array,
    support: Support,
    angles: Array,
    step: float,
) -> Counterexample:
    """The question that the best support explains worst."""
    order = (len(moments) - 1) // 2
    patterns = trigonometric_patterns(order, angles)[1:]
    predicted = patterns[:, support.nodes] @ support.weights
    worst = int(np.argmax(np.abs(predicted - moments[1:])))
    answer = answers[worst] * scale
    change = (predicted[worst] - moments[1 + worst]) * step * scale
    return Counterexample(
        input=np.concatenate([scale * asked[worst], query[None]]),
        box_answer=np.asarray(answer),
        model_answer=np.asarray(answer + change),
        reason=f"best explanation by {len(support.nodes)} heads that each attend to one token",
    )
