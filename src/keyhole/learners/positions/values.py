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
            What single heads add is known less well by what keeps them apart; where that shows,
            some moves more, of all tokens by different ones, are for the fit (`value_fit`).
            Where answers have too few digits for small moves of all tokens, the tokens in use are
            named by halving: whole parts of the bag are left out, which changes the answer if one
            of them is in use. Moves are as large as the rounding of the answers needs.
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
from keyhole.learners.positions.forward import Answered
from keyhole.linalg.rank import count_above, noise_edge
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import REJECTION, ROUNDINGS

PURPOSE = "value maps"
HUGE = 1e5  # entries of tokens that make attention hard
NOTHING = 1e-7  # singular value, relative to the largest, of dependent answers of many digits
APART = 1e-6  # error of what a single head adds, relative, that shows in its weights
NAMING = 1e-3  # moves of all tokens, relative to their size


@dataclass(frozen=True, eq=False)
class Bag:
    """Huge tokens before an anchor, the answer, and the numbers of the tokens in use."""

    tokens: Float[Array, "n d"]
    anchor: Float[Array, "one d"]
    base: Float[Array, "one D"]
    used: Int[Array, " k"]

    @property
    def distances(self) -> Int[Array, " k"]:
        """Of the tokens in use, before the anchor."""
        return np.asarray(len(self.tokens) - self.used)


@dataclass(frozen=True, eq=False)
class Winners:
    """The tokens in use of a bag, alone, moved by known amounts: answers are linear in these."""

    ask: Asker
    bag: Bag
    step: float  # length of a move
    answered: list[Answered]  # every query, for the fit to all answers

    @classmethod
    def of(cls, ask: Asker, bag: Bag) -> "Winners":
        # moves of single tokens, relative to their size: the larger the fewer digits answers have,
        # as long as hardly a head leaves its token for another
        move = min(ask.unit ** (1.0 / 12.0), 0.4)
        return cls(ask, bag, move * HUGE * np.sqrt(ask.width), [])

    @property
    def count(self) -> int:
        return len(self.bag.used)

    def respond(self, moves: Float[Array, "n heads d"]) -> Float[Array, "n D"]:
        """What moves add to the answer, per length of a move."""
        bag, width = self.bag, self.ask.width
        tokens = np.zeros((len(moves), len(bag.tokens) + 1, width))
        tokens[:, bag.used] = bag.tokens[bag.used] + self.step * moves
        tokens[:, -1:] = bag.anchor
        tokens = self.ask.representable(tokens)
        answers = self.ask(tokens, PURPOSE)
        seen, distances = np.append(bag.used, -1), np.append(bag.distances, 0)
        errors = self.ask.unit * np.abs(answers).max(axis=1)
        liked, lasts = np.arange(self.count), np.full(len(tokens), len(bag.tokens))
        self.answered.append(Answered(tokens[:, seen], distances, answers, errors, lasts, liked))
        return np.asarray((answers - bag.base) / self.step)

    def forget(self, rows: Int[Array, " n"]) -> None:
        """Leaves queries of the last move out of the fit: a head had left its token there."""
        last = self.answered.pop()
        kept = np.delete(np.arange(len(last.tokens)), rows)
        if len(kept):
            self.answered.append(last.take(kept))

    def alone(self, head: int, directions: Array) -> Array:
        moves = np.zeros((len(directions), self.count, self.ask.width))
        moves[:, head] = directions
        return moves

    @property
    def error(self) -> float:
        """Standard error of a number in a response: two answers, and the move itself, rounded."""
        size = float(np.abs(self.bag.base).max())
        return float(np.hypot(np.sqrt(2.0) * size / self.step, 1.0) * self.ask.unit)

    def is_zero(self, rows: Array, size: float) -> bool:
        """Whether a few responses, of such a size, are what is left of others by rounding."""
        return bool(np.abs(rows).max(initial=0.0) <= NOTHING * size + REJECTION * self.error)

    def rank(self, rows: Array) -> int:
        return numerical_rank(rows, self.error)


@dataclass(frozen=True, eq=False)
class ValueMaps:
    """M_h = ins[h] @ outs[h]; the rows of all `outs` are independent."""

    offset: Float[Array, " D"]
    ins: tuple[Array, ...]  # (d, r_h)
    outs: tuple[Array, ...]  # (r_h, D), orthonormal rows
    error: float  # of what single maps predict, relative, as seen on one query
    total_error: float  # of what their sum predicts, relative: heads need not be kept apart
    liked: Float[Array, "heads d"]  # the token that each head attended to
    anchor: Float[Array, " d"]  # before this anchor
    answered: tuple[Answered, ...] = ()  # the queries with moved tokens

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
    drawn = draw_bag(ask, rng, longest, size)
    if not isinstance(drawn, Bag):
        return drawn
    # further bags, where tokens in use do not share out the width
    draws = 2 if before is None else 0
    while draws and has_crowd(ask, len(drawn.used)):
        other, draws = draw_bag(ask, rng, longest, size), draws - 1
        if isinstance(other, Bag) and len(other.used) > len(drawn.used):
            drawn = other
    if before is not None and len(drawn.used) <= before.heads:
        return before.move_to(drawn)
    return measure_winners(Winners.of(ask, drawn), rng, offset)


def measure_winners(
    winners: Winners, rng: np.random.Generator, offset: Array
) -> ValueMaps | Refuted | Inconclusive:
    """The value maps of the heads that attend to the tokens in use."""
    ask, count = winners.ask, winners.count
    width, outputs = ask.width, ask.outputs
    frame = np.linalg.qr(rng.standard_normal((width, width)))[0]
    own = measure_ranges(winners, frame)
    rank = winners.rank(own[0][: len(frame)])
    if any(winners.rank(responses) != rank for responses in own):
        reason = "two heads share a token, or heads have value maps of different ranks"
        return call_crowded(winners, frame, own[0], reason)
    outs = [np.linalg.svd(responses, full_matrices=False)[2][:rank] for responses in own]
    stacked = np.concatenate(outs)
    if rank * count > outputs or has_common_range(winners, own, rank):
        reason = "the heads have more inner dimensions than the answers have numbers"
        return call_crowded(winners, frame, own[0], reason)
    ins = [np.zeros((width, rank)) for _ in own]
    alone = min(len(responses) for responses in own)
    for h, responses in enumerate(own):
        ins[h][:alone] = responses[:alone] @ outs[h].T
    if alone < width:
        together = measure_together(winners, frame[alone:], stacked)
        if together is None:
            return Refuted("what the heads add together is not what they add one at a time")
        parts = np.linalg.lstsq(stacked.T, together.T, rcond=None)[0].T
        for h in range(count):
            ins[h][alone:] = parts[:, h * rank : (h + 1) * rank]
    mixed = rng.standard_normal((1, count, width)) / np.sqrt(width)
    maps = [frame.T @ part for part in ins]
    expected = sum(mixed[:, h] @ maps[h] @ outs[h] for h in range(count))
    check = winners.respond(mixed)
    size = float(np.abs(check).max())
    off = float(np.abs(check - expected).max() / size)
    if not winners.is_zero((check - expected) / amplify(stacked), size):
        return Refuted("moves of the tokens in use do not add up")
    if count > 1 and alone < width and winners.error * amplify(stacked) > APART * size:
        full = np.array([part @ out for part, out in zip(maps, outs, strict=True)])
        move_apart(winners, frame[alone:], full, rng)
    bag = winners.bag
    return ValueMaps(
        offset,
        tuple(maps),
        tuple(outs),
        max(off, ask.unit),
        max(min(off, winners.error * outputs**0.5 / size), ask.unit),
        bag.tokens[bag.used],
        bag.anchor[0],
        tuple(winners.answered),
    )


def measure_ranges(winners: Winners, frame: Float[Array, "d d"]) -> list[Array]:
    """Responses to moves of one token after the other along the first directions of the frame: as
    many as span what a head adds, and more where that is seen badly."""
    width = len(frame)
    rank = max(1, min(width, winners.ask.outputs) // winners.count)
    first = winners.respond(winners.alone(0, frame[: min(rank + 1, width)]))
    while len(first) < width and winners.rank(first) == len(first):
        more = frame[len(first) : 2 * len(first)]
        first = np.concatenate([first, winners.respond(winners.alone(0, more))])
    rank = winners.rank(first)
    own = [first]
    clear = 1e-3  # singular value, relative to the largest, that costs three digits
    for head in range(1, winners.count):
        found = winners.respond(winners.alone(head, frame[:rank]))
        while len(found) < width and NOTHING < smallest_share(found, rank) < clear:
            more = winners.alone(head, frame[len(found)][None])
            found = np.concatenate([found, winners.respond(more)])
        own.append(found)
    if winners.count > 1 and winners.error > APART * min(smallest_share(f, rank) for f in own):
        spare = max(1, rank // 4)  # responses more, which a weak direction needs most
        for head, found in enumerate(own):
            more = frame[len(found) : rank + spare]
            if len(more):
                own[head] = np.concatenate([found, winners.respond(winners.alone(head, more))])
    return own


def measure_together(
    winners: Winners, frame: Float[Array, "n d"], stacked: Float[Array, "k D"]
) -> Float[Array, "n D"] | None:
    """Responses to moves of all tokens at once; None where heads add something new to them."""
    together = winners.respond(np.repeat(frame[:, None], winners.count, axis=1))
    usual = float(np.median(np.abs(together).max(axis=1)))  # a jump is many times larger

    def find_odd(rows: Array) -> Array:
        left = rows - np.linalg.lstsq(stacked.T, rows.T, rcond=None)[0].T @ stacked
        return np.flatnonzero([not winners.is_zero(row, usual) for row in left])

    odd = find_odd(together)
    if len(odd):  # a head left its token on the way: the opposite moves lead elsewhere
        winners.forget(odd)
        back = np.repeat(-frame[odd][:, None], winners.count, axis=1)
        together[odd] = -winners.respond(back)
    return None if len(find_odd(together)) else together


def move_apart(
    winners: Winners,
    frame: Float[Array, "n d"],
    maps: Float[Array, "heads d D"],
    rng: np.random.Generator,
) -> None:
    """Moves of every token in use along directions of its own, for the fit to all answers. Of
    common moves each leaves a number open where the ranges of the heads nearly depend on each
    other, of these each closes one less than there are heads."""
    spare = 1.25  # equations for each of these numbers
    some = int(np.ceil(spare * len(frame) / (winners.count - 1)))
    chosen = rng.spawn(1)[0].standard_normal((some, winners.count, len(frame)))
    moves = chosen @ frame / np.sqrt(len(frame))
    expected = np.einsum("nhd,hdo->no", moves, maps)
    off = np.linalg.norm(winners.respond(moves) - expected, axis=1)
    # tokens differ by several moves: a head that leaves its own for another adds more than all do
    winners.forget(np.flatnonzero(off > np.linalg.norm(expected, axis=1)))


def call_crowded(
    winners: Winners, frame: Float[Array, "d d"], first: Array, reason: str
) -> Refuted | Inconclusive:
    """Tokens that heads share say nothing of the box, if half a move does half as much."""
    some = first[:3]
    off = some - 2.0 * winners.respond(0.5 * winners.alone(0, frame[: len(some)]))
    linear = winners.is_zero(off / 2.0, float(np.abs(some).max()) / 2.0)
    return Inconclusive(reason) if linear else Refuted("moves of tokens act nonlinearly")


def has_common_range(winners: Winners, own: list[Array], rank: int) -> bool:
    """Whether what two heads add lies in one space, as far as responses tell."""
    return winners.rank(np.concatenate(own)) < rank * len(own)


def amplify(stacked: Float[Array, "k D"]) -> float:
    """How much larger errors are in what single heads add than in answers, at most."""
    return max(1.0, 1.0 / float(np.linalg.svd(stacked, compute_uv=False)[-1]))


def name_tokens_in_use(
    ask: Asker, rng: np.random.Generator, bag: Array, anchor: Array, base: Array
) -> Array | Refuted | Inconclusive:
    """Numbers of the tokens that some head attends to."""
    count, width = bag.shape
    # standard error of an answer, in what a move adds to it
    doubt = np.sqrt(2.0) * ask.unit / NAMING
    if doubt > NAMING:
        return name_by_halving(ask, bag, anchor, base)
    direction = rng.standard_normal(width)
    overlap_by_error = max(10.0 * NOTHING, 10.0 * doubt)
    spare = 1  # dependences among the answers: a token that is in none of them by chance is rare
    while count * overlap_by_error**spare > 1e-2:
        spare += 1
    error = doubt * NAMING * float(np.abs(base).max())
    patterns: list[Array] = []
    responses: list[Array] = []
    while len(patterns) <= min(width, ask.outputs, count):
        wanted = 1 + spare if not patterns else 1
        drawn = rng.standard_normal((wanted, count))
        moved = bag + NAMING * HUGE * drawn[:, :, None] * direction
        last = np.broadcast_to(anchor, (wanted, 1, width))
        answers = ask(np.concatenate([moved, last], axis=1), PURPOSE) - base
        patterns.extend(drawn)
        responses.extend(answers)
        rank = numerical_rank(np.array(responses), error)
        if rank <= len(responses) - spare:
            break
    else:
        return Refuted("the answers to moved tokens stay independent: attention is not hard")
    u, _, _ = np.linalg.svd(np.array(responses), full_matrices=True)
    overlap = np.linalg.norm(u[:, rank:].T @ np.array(patterns), axis=0)
    used = np.flatnonzero(overlap < overlap_by_error)
    if len(used) != rank:
        return Inconclusive("the tokens in use cannot be named")
    return used


def name_by_halving(
    ask: Asker, bag: Array, anchor: Array, base: Array
) -> Array | Refuted | Inconclusive:
    """Numbers of the tokens that some head attends to: without them the answer is another."""
    count = len(bag)
    allowed = ROUNDINGS * ask.unit * float(np.abs(base).max()) / 8.0

    def is_used(parts: list[Array]) -> list[bool]:
        """Whether the answer changes without these tokens, part by part."""
        tokens = np.repeat(np.concatenate([bag, anchor])[None], len(parts), axis=0)
        for row, part in zip(tokens, parts, strict=True):
            row[part] = 0.0
        return list((np.abs(ask(tokens, PURPOSE) - base) > allowed).any(axis=1))

    parts = [np.arange(count)]
    while max(len(part) for part in parts) > 1:
        halves = [half for part in parts for half in np.array_split(part, 2) if len(half)]
        used = is_used(halves)
        parts = [half for half, in_use in zip(halves, used, strict=True) if in_use]
        if not parts:
            return Inconclusive("the tokens in use cannot be named")
        if len(parts) > min(ask.width, ask.outputs):
            return Refuted("the answer depends on all tokens: attention is not hard")
    return np.concatenate(parts)


def smallest_share(rows: Array, rank: int) -> float:
    """The last of so many singular values, relative to the first."""
    sizes = np.linalg.svd(rows, compute_uv=False)
    return float(sizes[rank - 1] / sizes[0]) if sizes[0] > 0 else 0.0


def numerical_rank(rows: Array, error: Array | float = 0.0) -> int:
    """How many singular values neither errors of the entries nor what is neglected make."""
    sizes = np.linalg.svd(rows, compute_uv=False)
    edge = max(2.0 * noise_edge(error, rows.shape), NOTHING * float(sizes.max(initial=0.0)))
    return count_above(sizes, edge) if sizes.any() else 0
