"""Leaves by halving groups of tokens that are moved together, where answers have few digits.

Queries. Half of a group of tokens is moved: the answer changes by as much as the heads count that
attend to one of them. A group that nobody attends to is dropped, the others are halved again: about
log2(size) queries per head, of which each needs only a sign of life where moments need digits.
"""

import numpy as np

from keyhole.arrays import Array
from keyhole.learners.multi_head.leaves import MOST_HEADS, REACH, TRIES, Leaves, ask_hard, complete
from keyhole.linalg.bases import random_directions
from keyhole.linalg.linear_system import Equations
from keyhole.measurement.asking import Asker

HALVING_STEP = 2e-3  # relative move of a group of tokens: rarely changes who attends where
HALVING_DOUBT = 30.0  # rounding errors of the loudest answer below which a group counts as silent


def halved_leaves(
    ask: Asker,
    anchor: Array,
    total: Array,
    heads: int | None,
    rng: np.random.Generator,
    size: int,
    scale: float,
) -> Leaves | None:
    """The leaves by halving groups of tokens that are moved together, where answers have too few
    digits for moments: about log2(size) queries per head. None where no bag works out, as with a
    head that attends to all tokens alike."""
    width, outputs = total.shape
    mix = rng.standard_normal(outputs) if outputs > 1 else np.ones(1)
    for _ in range(TRIES):
        bag, shift = random_directions(rng, size, width), random_directions(rng, 1, width)[0]
        base = ask_hard(ask, bag[None], anchor, scale, "leaves")
        loud = max(float(np.abs(base @ mix).max()), float(np.linalg.norm(total @ mix)))
        silent = HALVING_DOUBT * ask.unit / HALVING_STEP * loud
        groups = [(np.arange(size), float(shift @ total @ mix))]
        asked, answers = np.zeros((0, size, width)), np.zeros((0, outputs))
        while len(groups) and max(len(group) for group, _ in groups) > 1:
            halves = [group[: -(-len(group) // 2)] for group, _ in groups]
            moved = np.repeat(bag[None], len(halves), axis=0)
            for place, half in enumerate(halves):
                moved[place, half] += HALVING_STEP * shift
            fresh = ask_hard(ask, moved, anchor, scale, "leaves")
            seen = (fresh - base) @ mix / HALVING_STEP
            asked, answers = np.concatenate([asked, moved]), np.concatenate([answers, fresh])
            parts: list[tuple[Array, float]] = []
            for (group, whole), half, part in zip(groups, halves, seen, strict=True):
                parts += [(half, float(part)), (group[len(half) :], whole - float(part))]
            groups = [(g, part) for g, part in parts if len(g) and abs(part) > silent]
            if len(groups) > (heads or MOST_HEADS):
                break
        nodes = np.sort(np.array([g[0] for g, _ in groups], dtype=int))
        if not len(nodes) or len(nodes) > (heads or MOST_HEADS) or len(groups[0][0]) > 1:
            continue
        equations = Equations(len(nodes), width)
        leaves = Leaves(anchor, bag[nodes], np.full(len(nodes), REACH), scale, equations, False)
        if not complete(ask, leaves, base[0]):
            continue
        equations.add(bag[None][:, nodes], base)
        equations.add(asked[:, nodes], answers, bag[nodes])
        return leaves
    return None
