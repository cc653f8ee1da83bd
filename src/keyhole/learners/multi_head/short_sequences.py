"""First stages of scalar_outputs where sequences are too short for gates: pairs only.

Statement. Pairs show V = sum of v_h and, for every head, J_h tanh(u . p_h(x) / 2) with J_h = v_h:
a head and its mirror image (score, bias and value negated) answer alike, but for the sum V. So the
layer of fewest heads is determined if exactly one choice of signs gives sum of +-J_h = V, and then
it is recovered. If none does, some head attends to all tokens alike, or two have opposite scores,
and every choice of signs is a layer that answers all pairs as the box does: no query can tell.
Three tokens can (learners/multi_head/half_circle, `uniform_value`).

Queries. About 20 per head to find where it switches (half_circle), then values and
openings (learners/multi_head/pair_openings) as many as with gates: H(d² + d).

When it fails. Nearly equal or nearly opposite heads, as everywhere.

Source. Keyhole's own; docs/learners/multi_head/learner.md.
"""

import numpy as np
from scipy.linalg import qr

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import IllConditioned, NotIdentifiable, WrongFamily
from keyhole.learners.multi_head.columns import SHUT, digits
from keyhole.learners.multi_head.half_circle import Switches, find_switches, uniform_value
from keyhole.learners.multi_head.leaves import HARD, NO_VALUE, ask_hard
from keyhole.learners.multi_head.mirror_images import (
    CANCEL,
    MIRRORED,
    OPPOSITE,
    cancelling,
    signs_with_sum,
)
from keyhole.learners.multi_head.pair_openings import PairChamber, pivot_tokens
from keyhole.learners.multi_head.refinement import column_again
from keyhole.learners.multi_head.soft_probe import SATURATED, Unexplained, fan, open_heads
from keyhole.learners.multi_head.state import TARGET, TILT, Scalar
from keyhole.linalg.bases import random_directions
from keyhole.linalg.linear_system import Equations

LONE = 1e300  # reach of a head that no other is beside: there is nothing to shut
SPARE, CLEAR = 4, 1e-2  # directions drawn per value; cosine by which all heads must be decided
SUM_DOUBT = 30.0  # standard errors by which the values may miss their sum


def partition_by_pairs(state: Scalar) -> None:
    """Heads, values and first pivots."""
    ask, anchor = state.ask, state.anchor
    found = find_switches(ask, anchor, state.total, state.rng)
    heads, width = len(found.angles), ask.width
    uniform = None
    if not only_pairs(state):
        uniform = uniform_value(ask, anchor, state.total, state.rng)
    count = heads + (uniform is not None)
    if state.heads is not None and count > state.heads:
        raise WrongFamily(
            f"{count} heads answer where {state.heads} were claimed: pass heads={count}, or leave "
            "heads= out"
        )
    if not heads:
        if np.abs(state.total).max() <= ask.noise:
            raise NotIdentifiable(NO_VALUE)
        state.set_values(state.total[None], np.zeros((width, 0)), True)
        return
    signs = signs_of(state, found, uniform)
    if count == 1:  # the sum of the values is the value
        state.set_values(state.total[None], np.zeros((width, 0)))
        state.chamber = state.chamber_at(anchor, None)
        return
    blocks = signs[:, None, None] * found.jumps
    inverse = np.repeat(signs, width)[:, None] * found.inverse
    if uniform is not None:
        rest = -inverse.reshape(heads, width, -1).sum(axis=0)
        blocks = np.concatenate([blocks, (state.total - blocks.sum(axis=0))[None]])
        inverse = np.concatenate([inverse, rest])
    state.set_values(blocks, inverse, uniform is not None)
    state.sizes = dict(enumerate(found.sharpness * np.sqrt(width / 2)))
    reach = np.sin(found.angles[:, None] - found.angles) * found.sharpness
    np.fill_diagonal(reach, np.inf)
    shut = SHUT * digits(state)
    pivots = found.tokens * (shut / np.abs(reach).min(axis=1).clip(max=LONE))[:, None]
    pivoted(state, pivots, signs * reach > 0, shut)


def pivoted(state: Scalar, pivots: Array, sides: Array, shut: float) -> None:
    """The chamber at the anchor."""
    beside = sides.astype(float)
    np.fill_diagonal(beside, 0.0)
    plain = state.chamber_at(state.anchor, None)
    state.chamber = PairChamber(
        plain.anchor, None, plain.base, plain.values, plain.uniform, plain.mix, pivots, beside, shut
    )
    state.chamber = state.chamber_near(state.anchor)


def signs_of(state: Scalar, found: Switches, uniform: Array | None) -> Float[Array, " h"]:
    """The choice of signs for which the values add up."""
    heads = len(found.jumps)
    flat = found.jumps.reshape(heads, -1)
    target = (state.total - (0.0 if uniform is None else uniform)).ravel()
    spread = float(np.linalg.norm(found.inverse, axis=1).max()) * float(np.sqrt(heads))
    loud = float(np.linalg.norm(flat, axis=1).sum() + np.linalg.norm(target))
    allowed = max(CANCEL, SUM_DOUBT * state.ask.unit * spread) * loud
    good = signs_with_sum(flat, target, allowed)
    if len(good) == 1:
        return np.asarray(good[0])
    counterexample = found.counterexample(state.rng)
    if counterexample is not None:
        raise Unexplained("softmax heads that explain huge tokens fail at others", counterexample)
    if not only_pairs(state):
        raise IllConditioned(
            "two heads have opposite scores, or the values of some heads cancel: that takes "
            f"sequences of {heads + 4} tokens, longer than max_length="
            f"{state.ask.oracle.spec.domain.max_length}"
        )
    why = cancelling(len(good)) if len(good) else OPPOSITE
    if state.ask.coarse:  # a head may have been missed
        raise IllConditioned(MIRRORED.format(why=why))
    raise NotIdentifiable(MIRRORED.format(why=why))


def only_pairs(state: Scalar) -> bool:
    """Whether the box takes no more than two tokens."""
    return state.ask.oracle.spec.domain.max_length == 2


def first_column_by_pairs(state: Scalar) -> None:
    """p_h at the anchor, with the long pivots from the circle: d openings per head."""
    width = state.ask.width
    for head, value in enumerate(state.values):
        rows = fan(np.zeros((width, 0)), value, state.rng)
        rows = rows + TILT * value / np.linalg.norm(value)
        which = np.full(width, head)
        moves = rows * (TARGET * np.sqrt(width) / state.sizes[head])
        got = open_heads(state.ask, state.chamber, which, moves, "first column")
        state.enter_first(head, got)
    if not state.chamber.holds(np.stack([record.keys[0] for record in state.records])):
        raise IllConditioned("a head that was to stay shut opened")


def values_by_pairs(state: Scalar) -> None:
    """Values once more, now that it is known who attends to a huge token: any direction is an exact
    equation, and the best of many are better conditioned than the small moves before."""
    keys = np.stack([record.keys[0] for record in state.records])
    norms = np.linalg.norm(keys, axis=1)
    blocks, width = len(state.blocks), state.ask.width
    equations = Equations(blocks, width)
    equations.add(np.repeat(state.total_rows[:, None], blocks, axis=1), state.total_answers)
    tokens = random_directions(state.rng, SPARE * blocks * width, width)
    tokens = tokens[np.abs(tokens @ keys.T / norms).min(axis=1) > CLEAR]
    shares = np.full((len(tokens), blocks), 0.5)  # of a uniform head, which comes last
    shares[:, : len(keys)] = tokens @ keys.T > 0
    beyond = (shares - shares.mean(axis=1, keepdims=True))[:, :, None] * tokens[:, None]
    order = qr(beyond.reshape(len(tokens), -1).T, mode="r", pivoting=True)[1]  # the sum is known
    best = order[: (blocks - 1) * width]
    tokens, shares = tokens[best], shares[best]
    scale = HARD / float(np.linalg.norm(state.anchor))
    answers = ask_hard(
        state.ask, tokens[:, None] + state.anchor / scale, state.anchor, scale, "values"
    )
    answers -= state.anchor @ state.total / scale
    equations.add(shares[:, :, None] * tokens[:, None], answers)
    state.set_values(*equations.solve(), state.uniform is not None)


def redesign_by_pairs(state: Scalar) -> None:
    """Shorter pivots, from the measured p_h, and with them the first column once more: its errors
    weigh most, because all other anchors lie close to the first."""
    state.gate_norm, state.step = 0.0, 1.0
    if state.chamber.alone:
        return
    keys = np.stack([record.keys[0] for record in state.records])
    tokens = pivot_tokens(keys, state.values, state.rng)
    norms = np.linalg.norm(keys, axis=1)
    state.gate_norm = float(np.linalg.norm(tokens, axis=1).max())
    shut = SHUT * digits(state)
    pivots = tokens * (shut / norms.min())
    pivoted(state, pivots, pivots @ keys.T > 0, shut)
    moved = state.chamber.far * float(norms.max()) / np.sqrt(state.ask.width)
    state.step = min(0.5, SATURATED / 3 / max(moved, TINY))
    column_again(state)
