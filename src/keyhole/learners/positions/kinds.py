"""What kind of positions a box of attention has: about a dozen queries.

A huge token at the first place, and its opposite, that change nothing: where the sequence is short,
the first places are masked, and their number is found by halving; where it is long, a window, whose
length is found so. [x, x] against [x], behind masked places: tokens carry a vector of their place.
A bag of huge tokens, all of them scaled: where scores are bounded nobody wins, and the answer is
linear in the factors. If scores are capped, all weights of huge tokens stay what they are while
these turn a little, and the answer is linear in that too; if queries and keys are normalised, it
bends. The same bag in another order: where other tokens win, the part of the score that grows with
the token depends on the place (rotary positions), else places add to the score.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import ROUNDINGS
from keyhole.oracles.wrappers.places import BehindMasked

PURPOSE = "positions"
EDGE = 8  # huge tokens at the far end: one of them is preferred by some head
HUGE = 1e8  # entries of tokens that outweigh whatever places add
BAG = 64  # tokens of which some win
WORDS = {
    "vectors": "tokens carry a vector of their place",
    "rotary": "the place of a token turns its key (rotary positions)",
    "additive": "the place of a token adds to its score",
    "capped": "scores are capped",
    "normalised": "queries and keys are normalised",
}


@dataclass(frozen=True)
class PositionKind:
    """`name`: vectors, rotary, additive, or one of two kinds of scores that do not grow with the
    tokens, capped and normalised."""

    name: str
    window: int | None = None
    masked: int = 0  # places at the start that are not seen

    @property
    def sentence(self) -> str:
        words = WORDS[self.name]
        seen = "" if self.window is None else f"; a window of {self.window} tokens is seen"
        start = f"; the first {self.masked} places are not seen" if self.masked else ""
        return f"Positions: {words}{seen}{start}."


def recognise_positions(ask: Asker, rng: np.random.Generator, longest: int | None) -> PositionKind:
    """The kind of positions of a box in which the order of the earlier tokens matters."""
    far = 512  # tokens of a sequence whose first place is looked at
    own = rng.spawn(1)[0]
    if is_place_seen(ask, own, min(far, longest or far), 0):
        return recognise_unmasked(ask, rng, longest, windowed=False)
    masked = count_masked(ask, own, longest)
    if not masked:
        return recognise_unmasked(ask, rng, longest, windowed=True)
    behind = replace(ask, oracle=BehindMasked(ask.oracle, masked))
    left = behind.oracle.spec.domain.max_length
    return replace(recognise_unmasked(behind, rng, left, windowed=True), masked=masked)


def is_place_seen(ask: Asker, rng: np.random.Generator, length: int, place: int) -> bool:
    """Whether a huge token at this place, or its opposite, changes the answer: of two opposites
    every head prefers one to zeros."""
    plain = np.zeros((length, ask.width))
    plain[-1] = rng.standard_normal(ask.width)
    marked = np.stack([plain, plain, plain])
    marked[1:, place] = np.outer((HUGE, -HUGE), rng.standard_normal(ask.width))
    one, other = ask(marked[:2], PURPOSE)
    return differ(ask, one, other) or differ(ask, one, ask(marked[2:], PURPOSE)[0])


def count_masked(ask: Asker, rng: np.random.Generator, longest: int | None) -> int:
    """How many places at the start of a sequence no anchor sees."""
    shortest = 4  # tokens: a window is wider
    if (longest or np.inf) < shortest or is_place_seen(ask, rng, shortest, 0):
        return 0
    start = 65  # tokens of the sequence in which places are looked at
    length = min(start, longest or start)
    hidden, seen = 0, 1
    while not is_place_seen(ask, rng, length, seen):
        if seen == length - 2:
            return 0  # nothing but the nearest token is seen: that is a window
        hidden, seen = seen, min(2 * seen, length - 2)
    while seen - hidden > 1:
        middle = (hidden + seen) // 2
        if is_place_seen(ask, rng, length, middle):
            seen = middle
        else:
            hidden = middle
    return seen


def recognise_unmasked(
    ask: Asker, rng: np.random.Generator, longest: int | None, windowed: bool
) -> PositionKind:
    """The kind where the first place is seen, at least by near anchors; by far ones as well, if
    nothing may be `windowed`."""
    width = ask.width
    token = rng.standard_normal(width)
    one, two = (ask(np.repeat(token[None, None], n, axis=1), PURPOSE)[0] for n in (1, 2))
    if differ(ask, one, two):
        return PositionKind("vectors")
    window = find_window(ask, rng, longest) if windowed else None
    room = min(window or BAG + 1, longest or BAG + 1) - 1
    count = min(BAG, room)
    bags = 2  # bags whose winners must not depend on their order
    for _ in range(bags):
        bag = HUGE * rng.standard_normal((count, width))
        anchor = rng.standard_normal((1, width))
        answer = ask(np.concatenate([bag, anchor])[None], PURPOSE)[0]
        turned = ask(np.concatenate([bag[rng.permutation(count)], anchor])[None], PURPOSE)[0]
        if differ(ask, answer, turned):
            return PositionKind(name_bounded(ask, rng, bag, anchor, answer) or "rotary", window)
    return PositionKind("additive", window)


def differ(ask: Asker, one: Array, other: Array) -> bool:
    scale = max(float(np.abs(one).max()), float(np.abs(other).max()))
    gap = float(np.abs(one - other).max())
    return gap > ROUNDINGS**2 * ask.unit * scale + ask.undetected


def describe_bounded(ask: Asker, rng: np.random.Generator) -> str | None:
    """What keeps the scores of a box from growing with its tokens, for the reader; None where
    nothing does."""
    room = min(BAG, (ask.oracle.spec.domain.max_length or BAG + 1) - 1)
    bag = HUGE * rng.standard_normal((room, ask.width))
    name = name_bounded(ask, rng, bag, rng.standard_normal((1, ask.width)))
    return None if name is None else WORDS[name]


def name_bounded(
    ask: Asker,
    rng: np.random.Generator,
    bag: Float[Array, "n d"],
    anchor: Float[Array, "one d"],
    answer: Float[Array, " D"] | None = None,
) -> str | None:
    """Either "capped" or "normalised"; None where scores grow with the tokens. `answer`: to the bag
    as it is, where that is known."""
    # random factors that must all leave the answer linear: a winner may keep its place
    scalings = 4
    known = [answer] + (scalings - 1) * [None]  # the others all differ from each other
    if not all(is_bounded(ask, rng, bag, anchor, each) for each in known):
        return None
    step = ask.unit**0.25  # to all tokens; bends stand out from rounding by as much as from steps
    trials = 4  # of steps on which no score may change its sign
    for _ in range(trials):
        turn = step * HUGE * rng.standard_normal(bag.shape)
        every = np.stack([bag - turn, bag, bag + turn])
        last = np.broadcast_to(anchor, (3, 1, ask.width))
        before, here, behind = ask(np.concatenate([every, last], axis=1), PURPOSE)
        bend = float(np.abs(before - 2.0 * here + behind).max())
        if bend <= ask.unit**0.5 * float(np.abs(behind - before).max()):
            return "capped"
    return "normalised"


def is_bounded(
    ask: Asker,
    rng: np.random.Generator,
    bag: Float[Array, "n d"],
    anchor: Float[Array, "one d"],
    answer: Float[Array, " D"] | None = None,
) -> bool:
    """Whether the answer is linear in positive factors of the tokens: no head then prefers larger
    tokens. With hard attention the token in use changes with the factors, and all of the answer;
    biases of the keys bend it by one part in the tokens' size."""
    factors = 10.0 ** rng.uniform(-1.0, 1.0, (2, len(bag), 1))
    if answer is not None:
        factors[0] = 1.0
    every = np.stack([*factors, factors.mean(axis=0)]) * bag
    last = np.broadcast_to(anchor, (3, 1, ask.width))
    tokens = np.concatenate([every, last], axis=1)
    if answer is None:
        first, second, middle = ask(tokens, PURPOSE)
    else:
        first, (second, middle) = answer, ask(tokens[1:], PURPOSE)
    bend = float(np.abs(0.5 * (first + second) - middle).max())
    linear = 1e-4  # bend relative to the answer that is none
    return bend <= linear * float(np.abs(middle).max())


def find_window(ask: Asker, rng: np.random.Generator, longest: int | None) -> int | None:
    """The number of distances that are seen; None where the far end of a sequence is."""
    far = 512  # distance beyond which no window is looked for
    reach = min(far, longest or far)
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
