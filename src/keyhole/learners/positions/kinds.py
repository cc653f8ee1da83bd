"""What kind of positions a box of attention has: about a dozen queries.

[x, x] against [x]: tokens carry a vector of their place. Huge tokens far away that change nothing,
bit for bit: a window, whose length is found by halving. A bag of huge tokens, all of them scaled:
where scores are bounded nobody wins, and the answer is linear in the factors. The same bag in
another order: where other tokens win, the part of the score that grows with the token depends on
the place (rotary positions), else places add to the score.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.measurement.asking import Asker
from keyhole.oracles.noise import ROUNDINGS

PURPOSE = "positions"
FAR = 512  # distance beyond which no window is looked for
EDGE = 8  # huge tokens at the far end: one of them is preferred by some head
HUGE = 1e8  # entries of tokens that outweigh whatever places add
BAG = 64  # tokens of which some win
SCALINGS = 4  # random factors that must all leave the answer linear: a winner may keep its place
BAGS = 2  # bags whose winners must not depend on their order


@dataclass(frozen=True)
class PositionKind:
    """`name`: vectors, rotary, additive, bounded (scores that do not grow with the tokens)."""

    name: str
    window: int | None = None

    @property
    def sentence(self) -> str:
        words = {
            "vectors": "tokens carry a vector of their place",
            "rotary": "the place of a token turns its key (rotary positions)",
            "additive": "the place of a token adds to its score",
            "bounded": "scores are bounded",
        }[self.name]
        seen = "" if self.window is None else f"; a window of {self.window} tokens is seen"
        return f"Positions: {words}{seen}."


def recognise_positions(ask: Asker, rng: np.random.Generator, longest: int | None) -> PositionKind:
    """The kind of positions of a box in which the order of the earlier tokens matters."""
    width = ask.width
    token = rng.standard_normal(width)
    one, two = (ask(np.repeat(token[None, None], n, axis=1), PURPOSE)[0] for n in (1, 2))
    if differ(ask, one, two):
        return PositionKind("vectors")
    window = find_window(ask, rng, longest)
    room = min(window or BAG + 1, longest or BAG + 1) - 1
    count = min(BAG, room)
    for _ in range(BAGS):
        bag = HUGE * rng.standard_normal((count, width))
        anchor = rng.standard_normal((1, width))
        answer = ask(np.concatenate([bag, anchor])[None], PURPOSE)[0]
        turned = ask(np.concatenate([bag[rng.permutation(count)], anchor])[None], PURPOSE)[0]
        if differ(ask, answer, turned):
            bounded = all(is_bounded(ask, rng, bag, anchor) for _ in range(SCALINGS))
            return PositionKind("bounded" if bounded else "rotary", window)
    return PositionKind("additive", window)


def differ(ask: Asker, one: Array, other: Array) -> bool:
    scale = max(float(np.abs(one).max()), float(np.abs(other).max()))
    gap = float(np.abs(one - other).max())
    return gap > ROUNDINGS**2 * ask.unit * scale + ask.undetected


def is_bounded(
    ask: Asker, rng: np.random.Generator, bag: Float[Array, "n d"], anchor: Float[Array, "one d"]
) -> bool:
    """Whether the answer is linear in positive factors of the tokens: no head then prefers larger
    tokens. With hard attention the token in use changes with the factors."""
    factors = 10.0 ** rng.uniform(-1.0, 1.0, (2, len(bag), 1))
    every = np.stack([*(f * bag for f in factors), factors.mean(axis=0) * bag])
    last = np.broadcast_to(anchor, (3, 1, ask.width))
    first, second, middle = ask(np.concatenate([every, last], axis=1), PURPOSE)
    return not differ(ask, 0.5 * (first + second), middle)


def find_window(ask: Asker, rng: np.random.Generator, longest: int | None) -> int | None:
    """The number of distances that are seen; None where the far end of a sequence is."""
    reach = min(FAR, longest or FAR)
    edge = HUGE * rng.standard_normal((EDGE, ask.width))
    anchor = rng.standard_normal(ask.width)

    def is_seen(distance: int) -> bool:
        """Whether one of the tokens from this distance on, as many as fit, changes the answer."""
        length = distance + EDGE
        plain = np.zeros((length, ask.width))
        plain[-1] = anchor
        marked = plain.copy()
        marked[:EDGE] = edge
        one, other = ask(np.stack([plain, marked]), PURPOSE)
        return not np.array_equal(one, other)

    if reach <= 2 * EDGE or is_seen(reach - EDGE):
        return None
    seen, unseen = 0, reach - EDGE  # the nearest of the tokens stands at this distance
    while unseen - seen > 1:
        middle = (seen + unseen) // 2
        seen, unseen = (middle, unseen) if is_seen(middle) else (seen, middle)
    return unseen
