"""A sink beside the tokens: attention whose weights do not sum to one.

Statement.  w_i = e^{s_i} / (e^{t(y)} + sum e^{s}), s_i = x_i . (W y + c), t affine in the anchor y;
            the answer is offset + sum_h sum_i w_hi (x_i M_h + b_h). Everything is recovered, the
            value biases b_h, which no other layer shows, and t included.
Queries.    Huge tokens: as without a sink, which they outweigh (values). Single large tokens x
            and 2x: heads with x . W x < 0 leave them to the sink. Soft queries [a + F_1 ...
            a + F_m; a] with m = r - 1 tokens, all directions at r + r/8 anchors, one query at the
            others.
Algebra.    In the coordinates of a head's outputs an answer is sum_i w_i F_i M - w_0 (a M + b), r
            equations for r weights; log-ratios to the anchor's own weight are linear in W a + c,
            and that of the sink gives t(a). Where the ranges of W are known every query gives r - 1
            linear equations for the rest.
When it fails.  Heads of rank one; heads that never leave an anchor to the sink; positions beside
            the sink; scalar answers.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.base import Inconclusive
from keyhole.learners.positions.kinds import BAG, HUGE, is_bounded
from keyhole.learners.positions.soft import Saturated
from keyhole.learners.positions.values import ValueMaps
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import ROUNDINGS

PURPOSE = "sink"
SCORES = "scores"


@dataclass(frozen=True, eq=False)
class SinkValues:
    """The value maps with the offset that remains where no head attends to its sink, and what a
    sink takes away with its weight, in the coordinates of the head's outputs."""

    values: ValueMaps
    biases: tuple[Array, ...]
    error: float  # of the offset


@dataclass(frozen=True, eq=False)
class SinkRatios:
    """Soft queries at one anchor: log-ratios of the tokens and of the sink to the anchor."""

    anchor: Float[Array, " d"]
    moves: Float[Array, "n m d"]
    tokens: Float[Array, "n heads m"]
    sinks: Float[Array, "n heads"]
    errors: Float[Array, "n heads"]

    def perturb(self, rng: np.random.Generator) -> "SinkRatios":
        noise = self.errors[..., None] * rng.standard_normal(self.tokens.shape)
        sinks = self.sinks + self.errors * rng.standard_normal(self.sinks.shape)
        return replace(self, tokens=self.tokens + noise, sinks=sinks)


@dataclass(frozen=True, eq=False)
class Sinks:
    """Scores [W | c] of every head and the scores of the sinks on [y; 1]."""

    scores: Float[Array, "heads d e"]
    sinks: Float[Array, "heads e"]


def has_sink(ask: Asker, rng: np.random.Generator) -> bool:
    """Whether single tokens, which act nonlinearly, act linearly once they are large, and repeated
    tokens as one, while heads prefer larger tokens (behind a norm they do not)."""
    tokens = 32  # of which all heads treat one alike, wherever it stands
    left = 4  # tokens that no head takes from its sink: behind a norm answers never grow
    for _ in range(tokens):
        token = 1e3 * rng.standard_normal(ask.width)
        once = ask(np.outer((1.0, 2.0, 3.0), token)[:, None], PURPOSE)
        allowed = ROUNDINGS**2 * ask.unit * float(np.abs(once).max()) + ask.undetected
        if 4.0 * np.abs(once[2] - once[0]).max() <= np.abs(once[0]).max():
            left -= 1
            if not left:
                return False
            continue
        if np.abs(once[0] - 2.0 * once[1] + once[2]).max() > allowed:
            return False
        # beside rotary positions a head may leave one of two equal tokens to its sink
        twice = ask(np.stack([token, token])[None], PURPOSE)
        if np.abs(twice - once[:1]).max() <= allowed:
            break
    else:
        return False
    room = min(BAG, (ask.oracle.spec.domain.max_length or BAG + 1) - 1)
    bag = HUGE * rng.standard_normal((room, ask.width))
    anchor, scalings = rng.standard_normal((1, ask.width)), 4  # a winner may keep its place
    return not all(is_bounded(ask, rng, bag, anchor) for _ in range(scalings))


def measure_biases(
    ask: Asker, rng: np.random.Generator, values: ValueMaps
) -> SinkValues | Inconclusive:
    """The offset from tokens that outweigh the sink, at two sizes; the value biases from single
    tokens that some heads leave to it."""
    for size in (1e-4, 1e-3, 1e-2):  # of the huge tokens: outweighing the sink, digits remain
        liked = size * values.liked
        hard = [np.concatenate([t * liked, values.anchor[None]]) for t in (1.0, 2.0, 3.0)]
        one, two, three = ask(np.stack(hard), PURPOSE)
        offset, error = 2.0 * one - two, ROUNDINGS * ask.unit * float(np.abs(three).max())
        if np.abs(one - 2.0 * two + three).max() <= error:
            break
    else:
        return Inconclusive("no tokens outweigh the sink")
    biases: list[Array | None] = [None] * values.heads
    draws = 40  # single tokens until every head has left one to its sink
    clear = 1e-6  # share of a head in an answer that is none or all
    for _ in range(draws):
        token = 1e2 * rng.standard_normal(ask.width)
        one, two = ask(np.stack([token, 2.0 * token])[:, None], PURPOSE)
        parts = values.split((two - one)[None])
        left = values.split((offset - (2.0 * one - two))[None])
        shares = [
            float(part[0] @ (token @ ins) / np.sum((token @ ins) ** 2))
            for part, ins in zip(parts, values.ins, strict=True)
        ]
        if any(min(abs(s), abs(s - 1.0)) > clear for s in shares):
            continue
        for h, share in enumerate(shares):
            if share < 0.5:
                biases[h] = left[h][0]
        found = [b for b in biases if b is not None]
        if len(found) == values.heads:
            return SinkValues(replace(values, offset=offset), tuple(found), error / ROUNDINGS)
    return Inconclusive("a head leaves no anchor to its sink")


def read_ratios(
    ask: Asker, known: SinkValues, anchor: Float[Array, " d"], moves: Float[Array, "n m d"]
) -> SinkRatios:
    """Asks the queries and solves for the weights; Saturated where one is too small."""
    values, count = known.values, len(moves)
    last = np.broadcast_to(anchor, (count, 1, len(anchor)))
    answers = ask(np.concatenate([anchor + moves, last], axis=1), SCORES)
    rest = answers - values.offset - anchor @ values.total
    noise = ask.unit * float(np.abs(answers).max()) + 4.0 * known.error
    noise += values.error * float(np.abs(anchor @ values.total).max())
    parts = values.split(rest)
    tokens = np.empty((count, values.heads, moves.shape[1]))
    sinks, errors = np.empty((2, count, values.heads))
    smallest = 1e-8  # weight below which its logarithm has no digits
    for h, part in enumerate(parts):
        taken = -(anchor @ values.ins[h] + known.biases[h])
        for n in range(count):
            columns = np.column_stack([(moves[n] @ values.ins[h]).T, taken])
            inverse = np.linalg.pinv(columns)
            weights = inverse @ part[n]
            own = 1.0 - weights.sum()
            least = float(min(weights.min(), own))
            if least < smallest:
                raise Saturated("a weight is too small to be read, or not positive")
            tokens[n, h] = np.log(weights[:-1]) - np.log(own)
            sinks[n, h] = np.log(weights[-1]) - np.log(own)
            errors[n, h] = noise * float(np.linalg.norm(inverse, 2)) / least
    return SinkRatios(anchor, moves, tokens, sinks, errors)


def learn_sinks(
    ask: Asker, rng: np.random.Generator, known: SinkValues
) -> tuple[Sinks, Sinks] | Inconclusive:
    """Scores and sinks, and their standard errors."""
    width, rank = ask.width, min(known.values.ranks)
    if rank < 2:
        return Inconclusive("heads of rank one do not tell a sink from a token")
    full, tokens = min(width + 1, rank + max(1, rank // 8)), rank - 1
    spare = 3  # queries beyond as many equations as unknowns, for their condition
    more = max(width + 1 - full, -(-(rank * (width + 1 - full)) // tokens) + spare)
    asked: list[SinkRatios] = []
    directions = np.linalg.qr(rng.standard_normal((width, width)))[0]
    for number in range(full + more):
        blocks = -(-width // tokens) if number < full else 1
        step = directions[number % width] if number < width else rng.standard_normal(width)
        found = ask_anchor(ask, rng, known, step / np.linalg.norm(step), blocks)
        if found is None:
            return Inconclusive("no tokens are so near to an anchor that every weight shows")
        asked.append(found)
    best = solve_sinks(asked, full, rank)
    squares = [np.zeros_like(best.scores), np.zeros_like(best.sinks)]
    replicates = 6  # repetitions of the algebra for the standard errors
    for _ in range(replicates):
        other = solve_sinks([each.perturb(rng) for each in asked], full, rank)
        squares[0] += (other.scores - best.scores) ** 2
        squares[1] += (other.sinks - best.sinks) ** 2
    spread = [np.sqrt(total / replicates) for total in squares]
    return best, Sinks(spread[0], spread[1])


def ask_anchor(
    ask: Asker, rng: np.random.Generator, known: SinkValues, step: Array, blocks: int
) -> SinkRatios | None:
    """Moves around an anchor for which the weights of the worst head are conditioned best."""
    width, values = ask.width, known.values
    tokens = min(values.ranks) - 1
    length, size = 0.5 * np.sqrt(width), 1.0
    candidates, halvings = 150, 12
    for _ in range(halvings):
        anchor = length * step
        taken = [anchor @ ins + b for ins, b in zip(values.ins, known.biases, strict=True)]
        best, chosen = np.inf, np.zeros((blocks, tokens, width))
        for _ in range(candidates):
            turned = np.linalg.qr(rng.standard_normal((width, width)))[0]
            rows = np.concatenate([turned, turned])[: blocks * tokens]
            moves = rows.reshape(blocks, tokens, width)
            worst = max(
                float(np.linalg.cond(np.column_stack([(size * m @ ins).T, own])))
                for ins, own in zip(values.ins, taken, strict=True)
                for m in moves
            )
            if worst < best:
                best, chosen = worst, size * moves
        try:
            return read_ratios(ask, known, anchor, chosen)
        except Saturated:
            length, size = -0.7 * length, 0.7 * size
    return None


def solve_sinks(asked: list[SinkRatios], full: int, rank: int) -> Sinks:
    """Everything from the log-ratios; the first `full` anchors were asked in all directions."""
    heads, width = asked[0].tokens.shape[1], len(asked[0].anchor)
    places = np.column_stack([[each.anchor for each in asked], np.ones(len(asked))])
    scores, sinks = [], []
    for h in range(heads):
        keys = np.array(
            [
                np.linalg.lstsq(
                    each.moves.reshape(-1, width), each.tokens[:, h].ravel(), rcond=None
                )[0]
                for each in asked[:full]
            ]
        )
        span = np.linalg.svd(keys)[2][:rank].T
        rows, right = [], []
        for each, place in zip(asked, places, strict=True):
            moves = each.moves.reshape(-1, width) @ span
            rows.append(np.einsum("nr,e->nre", moves, place).reshape(len(moves), -1))
            right.append(each.tokens[:, h].ravel())
        inner = np.linalg.lstsq(np.concatenate(rows), np.concatenate(right), rcond=None)[0]
        score = span @ inner.reshape(rank, width + 1)
        own = np.einsum("nd,de,ne->n", places[:, :-1], score, places)
        level = np.array([each.sinks[:, h].mean() for each in asked]) + own
        scores.append(score)
        sinks.append(np.linalg.lstsq(places, level, rcond=None)[0])
    return Sinks(np.array(scores), np.array(sinks))
