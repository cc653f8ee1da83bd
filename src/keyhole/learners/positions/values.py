"""Value maps of all heads by hard attention, wherever the tokens stand.

Statement.  offset and M_h = V_h O_h of every head, the number of heads and the ranks unknown, from
            2d - r + H + 5 queries or so of vector answers.
Queries.    [0]; a bag of huge tokens before an anchor, again and again with all tokens moved along
            one direction by random amounts; then the tokens in use alone, moved one at a time along
            r common directions, and all at once along the d - r others.
Algebra.    Every head attends to one token, so that the answer is linear in the moves: a pattern c
            of moves along u is answered by sum_h c_i(h) M_h u. After one pattern more than there
            are tokens in use the answers are dependent, and the dependence is orthogonal to
            exactly the columns of the tokens in use. The places stay as they are: positions do not
            matter as long as huge tokens outweigh them.
When it fails.  Two heads on one token look like one of twice the rank: unequal ranks, a single
            token in use and sums that do not fit ask for another bag; where all tokens are shared
            alike, soft queries fail, and another bag has more tokens in use. More inner dimensions
            than outputs, and scalar answers, are left to others.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.learners.base import Inconclusive, Refuted
from keyhole.linalg.rank import count_above_share
from keyhole.measurement.asker import Asker

PURPOSE = "value maps"
HUGE = 1e5  # entries of tokens that make attention hard
NOTHING = 1e-7  # singular value, relative to the largest, of dependent answers
NAMING = 1e-3  # moves of all tokens, relative to their size


@dataclass(frozen=True, eq=False)
class Bag:
    """Huge tokens before an anchor, the answer, and the numbers of the tokens in use."""

    tokens: Float[Array, "n d"]
    anchor: Float[Array, "one d"]
    base: Float[Array, "one D"]
    used: Int[Array, " k"]


@dataclass(frozen=True, eq=False)
class ValueMaps:
    """M_h = ins[h] @ outs[h]; the rows of all `outs` are independent."""

    offset: Float[Array, " D"]
    ins: tuple[Array, ...]  # (d, r_h)
    outs: tuple[Array, ...]  # (r_h, D), orthonormal rows
    error: float  # of what the maps predict, relative, as seen on one query
    liked: Float[Array, "heads d"]  # the token that each head attended to
    anchor: Float[Array, " d"]  # before this anchor

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(len(out) for out in self.outs)

    @property
    def heads(self) -> int:
        return len(self.ins)

    @property
    def maps(self) -> tuple[Array, ...]:
        return tuple(a @ b for a, b in zip(self.ins, self.outs, strict=True))

    @property
    def total(self) -> Float[Array, "d D"]:
        return np.asarray(sum(self.maps))

    def split(self, answers: Float[Array, "n D"]) -> list[Array]:
        """What each head adds to these answers, in the coordinates of its `outs`."""
        stacked = np.concatenate(self.outs)
        parts = np.linalg.lstsq(stacked.T, answers.T, rcond=None)[0]
        cuts = np.cumsum(self.ranks)[:-1]
        return [part.T for part in np.split(parts, cuts)]

    def move_to(self, bag: Bag) -> "ValueMaps":
        """The same maps before another anchor: a head likes the token that explains its part."""
        seen = bag.tokens[bag.used]
        parts = self.split(bag.base - self.offset)
        chosen = [
            int(np.argmin(np.linalg.norm(seen @ own - part, axis=1)))
            for own, part in zip(self.ins, parts, strict=True)
        ]
        return replace(self, liked=seen[chosen], anchor=bag.anchor[0])


def measure_value_maps(
    ask: Asker,
    rng: np.random.Generator,
    longest: int | None,
    size: float = 1.0,
    before: ValueMaps | None = None,
) -> ValueMaps | Refuted | Inconclusive:
    """The value maps; `longest` is the length of the longest sequence that may be asked, `size`
    that of the anchor's entries. With those measured `before`, which led nowhere, another bag is
    asked whether heads shared tokens: if no more tokens are in use there, the maps stand, and its
    tokens and anchor take the place of the old."""
    offset = before.offset if before is not None else ask(np.zeros((1, 1, ask.width)), PURPOSE)[0]
    best, crowded = before, False
    trouble = "no bag of huge tokens led to value maps"
    bags = 6  # bags that are tried
    for _ in range(bags):
        found = measure_with_bag(ask, rng, offset, longest, size, best)
        if not isinstance(found, ValueMaps):
            trouble, crowded = found.reason, crowded or isinstance(found, Inconclusive)
            continue
        if best is not None and found.heads <= best.heads:
            return found  # the same maps: no more tokens are in use than there are heads
        best = found
        if sum(found.ranks) == min(ask.width, ask.outputs) and found.heads > 1:
            return best  # room for all heads, unless every token is shared by equally many
    if best is not None:
        return best
    return Inconclusive(trouble) if crowded else Refuted(trouble)


def draw_bag(
    ask: Asker, rng: np.random.Generator, longest: int | None, size: float
) -> Bag | Refuted | Inconclusive:
    candidates = 256  # tokens of a bag: two heads seldom prefer the same
    count = min(candidates, (longest or candidates + 1) - 1)
    bag = HUGE * rng.standard_normal((count, ask.width))
    anchor = size * rng.standard_normal((1, ask.width))
    base = ask(np.concatenate([bag, anchor])[None], PURPOSE)
    used = name_tokens_in_use(ask, rng, bag, anchor, base)
    return Bag(bag, anchor, base, used) if isinstance(used, np.ndarray) else used


def has_crowd(ask: Asker, used: int) -> bool:
    """Whether heads that share out the width would share tokens, if so many are in use."""
    return used == 1 or min(ask.width, ask.outputs) % used != 0


def measure_with_bag(
    ask: Asker,
    rng: np.random.Generator,
    offset: Array,
    longest: int | None,
    size: float,
    before: ValueMaps | None = None,
) -> ValueMaps | Refuted | Inconclusive:
    """The value maps by one bag of tokens, or why it does not lead to them: crowded tokens say
    nothing of the box, answers that are not linear do. Those from `before`, if this bag has no
    more tokens in use than there are heads."""
    width = ask.width
    drawn = draw_bag(ask, rng, longest, size)
    if not isinstance(drawn, Bag):
        return drawn
    draws = (
        2 if before is None else 0
    )  # further bags, where tokens in use do not share out the width
    while draws and has_crowd(ask, len(drawn.used)):
        other, draws = draw_bag(ask, rng, longest, size), draws - 1
        if isinstance(other, Bag) and len(other.used) > len(drawn.used):
            drawn = other
    bag, anchor, base, used = drawn.tokens, drawn.anchor, drawn.base, drawn.used
    if before is not None and len(used) <= before.heads:
        return before.move_to(drawn)
    count = len(bag)
    tokens = np.zeros((count, width))
    tokens[used] = bag[used]
    frame = np.linalg.qr(rng.standard_normal((width, width)))[0]
    move = 0.05  # moves of single tokens, relative to their size
    step = move * HUGE * np.sqrt(width)

    def respond(moves: Float[Array, "n heads d"]) -> Float[Array, "n D"]:
        moved = np.broadcast_to(tokens, (len(moves), *tokens.shape)).copy()
        moved[:, used] += step * moves
        last = np.broadcast_to(anchor, (len(moves), 1, width))
        return np.asarray((ask(np.concatenate([moved, last], axis=1), PURPOSE) - base) / step)

    def alone(head: int, directions: Array) -> Array:
        moves = np.zeros((len(directions), len(used), width))
        moves[:, head] = directions
        return moves

    rank = max(1, min(width, ask.outputs) // len(used))
    first = respond(alone(0, frame[: min(rank + 1, width)]))
    while len(first) < width and numerical_rank(first) == len(first):
        first = np.concatenate([first, respond(alone(0, frame[len(first) : 2 * len(first)]))])
    rank = numerical_rank(first)

    def call_crowded(reason: str) -> Refuted | Inconclusive:
        """Tokens that heads share say nothing of the box, if half a move does half as much."""
        some = first[:3]
        off = np.abs(some - 2.0 * respond(0.5 * alone(0, frame[: len(some)]))).max()
        linear = off <= NOTHING * np.abs(some).max()
        return Inconclusive(reason) if linear else Refuted("moves of tokens act nonlinearly")

    def respond_clearly(head: int) -> Array:
        """As many responses as span the range of a head, and more where it is seen badly."""
        clear = 1e-3  # singular value, relative to the largest, that costs three digits
        found = respond(alone(head, frame[:rank]))
        while len(found) < width and NOTHING < smallest_share(found, rank) < clear:
            found = np.concatenate([found, respond(alone(head, frame[len(found)][None]))])
        return found

    own = [first, *(respond_clearly(h) for h in range(1, len(used)))]
    if any(numerical_rank(responses) != rank for responses in own):
        return call_crowded("two heads share a token, or heads have value maps of different ranks")
    outs = [np.linalg.svd(responses, full_matrices=False)[2][:rank] for responses in own]
    stacked = np.concatenate(outs)
    if rank * len(used) > ask.outputs or numerical_rank(stacked) < rank * len(used):
        return call_crowded("the heads have more inner dimensions than the answers have numbers")
    ins = [np.zeros((width, rank)) for _ in own]
    for h, responses in enumerate(own):
        ins[h][:rank] = responses[:rank] @ outs[h].T
    if rank < width:
        together = respond(np.repeat(frame[rank:, None], len(used), axis=1))

        def find_odd(rows: Array) -> Array:
            left = rows - np.linalg.lstsq(stacked.T, rows.T, rcond=None)[0].T @ stacked
            usual = float(np.median(np.abs(rows).max(axis=1)))  # a jump is many times larger
            return np.flatnonzero(np.abs(left).max(axis=1) > NOTHING * usual)

        odd = find_odd(together)
        if len(odd):  # a head left its token on the way: the opposite moves lead elsewhere
            back = np.repeat(-frame[rank + odd][:, None], len(used), axis=1)
            together[odd] = -respond(back)
        parts = np.linalg.lstsq(stacked.T, together.T, rcond=None)[0].T
        if len(find_odd(together)):
            return Refuted("what the heads add together is not what they add one at a time")
        for h in range(len(used)):
            ins[h][rank:] = parts[:, h * rank : (h + 1) * rank]
    mixed = rng.standard_normal((1, len(used), width)) / np.sqrt(width)
    maps = [frame.T @ part for part in ins]
    expected = sum(mixed[:, h] @ maps[h] @ outs[h] for h in range(len(used)))
    check = respond(mixed)
    off = float(np.abs(check - expected).max() / np.abs(check).max())
    if off > NOTHING:
        return Refuted("moves of the tokens in use do not add up")
    return ValueMaps(offset, tuple(maps), tuple(outs), max(off, ask.unit), bag[used], anchor[0])


def name_tokens_in_use(
    ask: Asker, rng: np.random.Generator, bag: Array, anchor: Array, base: Array
) -> Array | Refuted | Inconclusive:
    """Numbers of the tokens that some head attends to."""
    count, width = bag.shape
    direction = rng.standard_normal(width)
    patterns: list[Array] = []
    responses: list[Array] = []
    while len(patterns) <= min(width, ask.outputs, count):
        wanted = 2 if not patterns else 1
        drawn = rng.standard_normal((wanted, count))
        moved = bag + NAMING * HUGE * drawn[:, :, None] * direction
        last = np.broadcast_to(anchor, (wanted, 1, width))
        answers = ask(np.concatenate([moved, last], axis=1), PURPOSE) - base
        patterns.extend(drawn)
        responses.extend(answers)
        if numerical_rank(np.array(responses)) < len(responses):
            break
    else:
        return Refuted("the answers to moved tokens stay independent: attention is not hard")
    u, _, _ = np.linalg.svd(np.array(responses), full_matrices=True)
    overlap = np.abs(u[:, -1] @ np.array(patterns))
    used = np.flatnonzero(overlap < NOTHING * 10)
    if len(used) != len(responses) - 1:
        return Inconclusive("the tokens in use cannot be named")
    return used


def smallest_share(rows: Array, rank: int) -> float:
    """The last of so many singular values, relative to the first."""
    sizes = np.linalg.svd(rows, compute_uv=False)
    return float(sizes[rank - 1] / sizes[0]) if sizes[0] > 0 else 0.0


def numerical_rank(rows: Array) -> int:
    sizes = np.linalg.svd(rows, compute_uv=False)
    return count_above_share(sizes, NOTHING)
