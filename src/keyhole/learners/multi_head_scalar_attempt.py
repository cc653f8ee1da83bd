"""One attempt of learners/multi_head_scalar: from one base query to parameters with errors."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned
from keyhole.probes.asking import Asker
from keyhole.probes.gates import gate_tokens, margins
from keyhole.probes.hard_attention import (
    Leaves,
    directions,
    find_leaves,
    measure_values,
    split,
)
from keyhole.probes.openings import Chamber, Readings, Unexplained, fan, log_odds, open_heads
from keyhole.results import Counterexample

TARGET = 1.2  # typical log-odds of an opening: long enough to see, short enough to invert
TILT = 0.5  # how far an opening leans towards the head's value
SHUT = 80.0  # margin, in log-odds, by which the gates hold at the first query
HOLDS = 14.0  # margin below which a column is asked again closer to the first query
TIGHT = 36.0  # margin below which leakage is corrected for
WIDE = 1e4  # size of the first, undesigned gates in units of a head's soft length
TOO_WIDE = 30.0  # first gates this much too large are made again
GROWTH, GROWTHS = 30.0, 6  # first gates that do not hold grow, so often
GATE_DOUBT = 1e4  # deviation of the gates' answer, in rounding errors, that is not rounding
VALUE_DOUBT = 1e4  # rounding errors a value may carry after its own measurement
WEAK, FLAT = 0.02, 1e-9  # log-odds worth a longer opening; log-odds of no reaction at all
LEAK_ROUNDS = 6
CAUTION = 0.3  # the first column next to the base query is asked this much closer
EASE = (0.02, 2.0)  # later ones by what the columns before have shown, within these bounds
LOSS, TAIL = 0.8, 2.5  # share of a margin that may be lost, at so many standard deviations
RETREAT, RETREATS = 0.25, 8  # a column whose gates gave way is asked closer, so often
STRETCH = 30.0  # log-odds an opening may reach in a head that is to stay shut
SINGLE = 1e2  # misfit of a second opening, in standard errors, that betrays two heads
LOWER = 1e-7  # relative size of a column outside the range so far that counts as rank reached
REPLICATES = 8  # repetitions of the algebra on perturbed answers for the error bars
BARS = 1.0  # error bars, in units of the spread of the replicates


@dataclass
class Columns:
    """What was measured of one head: for each query the openings, and the rank once known."""

    queries: list[Array] = field(default_factory=list)
    moves: list[Array] = field(default_factory=list)
    changes: list[Array] = field(default_factory=list)
    doubts: list[Array] = field(default_factory=list)  # standard error of each change
    keys: list[Array] = field(default_factory=list)  # p at these queries
    rank: int | None = None
    searching: bool = True


@dataclass
class Draft:
    """A finished attempt: the parameters and how far replicates of them spread."""

    scores: Float[Array, "h d d"]
    biases: Float[Array, "h d"]
    values: Float[Array, "h d outputs"]
    score_errors: Float[Array, "h d d"]
    bias_errors: Float[Array, "h d"]
    value_errors: Float[Array, "h d outputs"]
    uniform: bool
    ranks: tuple[int, ...]
    factors: list[tuple[Array, Array] | None]
    gate_norm: float


@dataclass
class Scalar:
    """One attempt from one base query; holds what the stages hand on."""

    ask: Asker
    rng: np.random.Generator
    total: Float[Array, "d outputs"]
    total_rows: Float[Array, "n d"]
    total_answers: Float[Array, "n outputs"]
    heads: int | None
    rank: int | None
    search_rank: bool
    bias: bool
    reach: float  # norm of the base query
    suspicion: float = 1.0  # factor on the misfit that betrays two heads in one

    def run(self) -> Draft:
        width = self.ask.width
        self.mix = (
            self.rng.standard_normal(self.total.shape[1]) if self.total.shape[1] > 1 else np.ones(1)
        )
        self.query = self.reach * directions(self.rng, 1, width)[0]
        self.sizes: dict[int, float] = {}
        self.begun: dict[int, tuple[Array, Readings]] = {}
        if self.heads == 1:
            self.set_values(self.total[None], np.zeros((width, 0)), None)
            self.chamber = self.chamber_at(self.query, None)
        else:
            self.partition()
        if not len(self.values):
            return self.all_uniform()
        self.records = [Columns(rank=self.rank, searching=self.search_rank) for _ in self.values]
        try:
            self.first_column()
        except Flat:
            if len(self.values) > 1:
                raise IllConditioned("a head does not react to any opening") from None
            return self.all_uniform()
        self.redesign()
        self.other_columns()
        return self.conclude()

    def all_uniform(self) -> Draft:
        """Nobody chooses between tokens: one head with score zero holds all the value."""
        width = self.ask.width
        none, blocks = np.zeros((0, width, width)), self.total[None]
        noise = self.ask.unit * np.abs(blocks).max() + self.ask.additive
        return Draft(
            none,
            none[:, 0],
            blocks,
            none,
            none[:, 0],
            np.full(blocks.shape, noise),
            True,
            (),
            [],
            0.0,
        )

    # --- values and gates -----------------------------------------------------------------

    def set_values(self, blocks: Array, inverse: Array, leaves: Leaves | None) -> None:
        """`blocks` holds the uniform head last, if there is one."""
        self.leaves, self.inverse, self.blocks = leaves, inverse, blocks
        mixed = blocks @ self.mix
        uniform = leaves is not None and leaves.uniform
        self.values = mixed[:-1] if uniform else mixed
        self.uniform = mixed[-1] if uniform else None

    def chamber_at(self, query: Array, gates: Array | None, base: Array | None = None) -> Chamber:
        if base is None:
            base = np.full(len(self.values), float(query @ self.total @ self.mix))
        mix = np.asarray(self.mix)
        return Chamber(query, gates, base, self.values, self.uniform, mix)

    def partition(self) -> None:
        """Leaves, all values, and first gates; leaves with several heads are split."""
        leaves = find_leaves(self.ask, self.query, self.total, self.heads, self.rng)
        shared = np.repeat(self.total_rows[:, None], leaves.blocks, axis=1)
        leaves.equations.add(shared, self.total_answers)
        self.checked = 0
        while True:
            measure_values(self.ask, leaves)
            self.set_values(*leaves.equations.solve(), leaves)
            if not len(leaves):
                return
            self.shut(leaves)
            if self.heads is not None and leaves.blocks >= self.heads:
                return
            crowded = self.first_crowded()
            if crowded is None:
                return
            if split(self.ask, leaves, crowded, self.rng):
                self.begun.pop(crowded, None)
            else:
                self.checked = crowded + 1

    def shut(self, leaves: Leaves) -> None:
        """Gates around the base query; none where one head is alone."""
        if len(leaves) == 1 and not leaves.uniform:
            self.chamber = self.chamber_at(self.query, None)
            return
        guess = self.scale_of(0)
        self.chamber = self.first_gates(leaves, guess)
        self.begin(0)
        if self.sizes[0] > TOO_WIDE * guess:  # gates far larger than needed cost digits
            del self.begun[0]
            self.chamber = self.first_gates(leaves, self.sizes[0])

    def first_gates(self, leaves: Leaves, size: float) -> Chamber:
        """The leaves as gates, as small as they still hold."""
        tokens = leaves.tokens * (WIDE / size)
        for _ in range(GROWTHS):
            chamber = self.measured_base(self.query, tokens)
            expected = float(np.einsum("hd,hd->", tokens, self.values))
            loudness = float(np.linalg.norm(tokens, axis=1) @ np.linalg.norm(self.values, axis=1))
            allowed = GATE_DOUBT * self.ask.unit * loudness + 5 * self.ask.additive
            if np.abs(chamber.base - expected).max() <= allowed:
                return chamber
            tokens = tokens * GROWTH
        raise Unexplained(
            "the gates do not hold at any size that was tried",
            Counterexample(
                input=np.concatenate([tokens / GROWTH, self.query[None]]),
                box_answer=np.asarray(chamber.base[0]),
                model_answer=np.asarray(expected),
                reason="huge tokens: each head should attend to one of them alone",
            ),
        )

    def measured_base(self, query: Array, gates: Array) -> Chamber:
        """Gates with their own answer asked, so that no error of the values enters it. A uniform
        head sees the competitor too: then each head has an answer of its own."""
        blank = self.chamber_at(query, gates)
        if self.uniform is None:
            tokens = np.concatenate([gates, query[None]])[None]
        else:
            every = np.arange(len(gates))
            tokens = blank.sequences(every, np.zeros((len(gates), len(query))))
        base = blank.selective(self.ask(tokens, "gates"), tokens)
        return self.chamber_at(query, gates, np.broadcast_to(base, (len(gates),)))

    # --- openings at the first query ------------------------------------------------------

    def scale_of(self, head: int) -> float:
        """Estimate of |p_h| at the first query, from other heads where this one is unknown."""
        return self.sizes.get(head, float(np.median(list(self.sizes.values()) or [self.reach])))

    def begin(self, head: int) -> None:
        """The first opening of a head, which also tells its scale."""
        if head in self.begun:
            return
        width, value = self.ask.width, self.values[head]
        rows = fan(np.zeros((width, 0)), value, self.rng)
        rows = rows + TILT * value / np.linalg.norm(value)
        which = np.array([head])
        moves = rows[:1] * (TARGET * np.sqrt(width) / self.scale_of(head))
        got = open_heads(self.ask, self.chamber, which, moves, "first column")
        if abs(got.log_odds[0]) < WEAK:
            longer = min(TARGET / max(abs(float(got.log_odds[0])), 1e-10), 1e10)
            got = open_heads(self.ask, self.chamber, which, longer * got.moves, "first column")
        if abs(got.log_odds[0]) < FLAT:
            raise Flat
        self.begun[head] = (rows, got)
        seen = abs(float(got.log_odds[0])) / float(np.linalg.norm(got.moves[0]))
        self.sizes[head] = seen * np.sqrt(width)

    def first_crowded(self) -> int | None:
        """The first leaf that answers unlike a single head when the same opening is doubled."""
        for head in range(self.checked, len(self.values)):
            self.begin(head)
            reading = self.begun[head][1]
            which = np.array([head])
            factor = 2.0 if abs(reading.log_odds[0]) < 3 else 0.5
            second = open_heads(self.ask, self.chamber, which, factor * reading.moves, "single?")
            used = float(np.linalg.norm(second.moves[0]) / np.linalg.norm(reading.moves[0]))
            misfit = abs(float(second.log_odds[0] - used * reading.log_odds[0]))
            allowed = self.odds_doubt(head, second) + used * self.odds_doubt(head, reading)
            if misfit > SINGLE * self.suspicion * allowed:
                return head
        return None

    def odds_doubt(self, head: int, reading: Readings) -> float:
        """Standard error of the log-odds of a single opening."""
        which = np.array([head])
        doubt = float(self.doubt(self.chamber, which, reading.moves)[0])
        weight = abs(float(reading.moves[0] @ self.values[head]))
        fading = np.exp(-abs(float(reading.log_odds[0])))
        slope = fading / (1 + fading) ** 2
        own = VALUE_DOUBT * self.ask.unit * weight
        return float((doubt + own) / (weight * slope))

    def doubt(self, chamber: Chamber, heads: Array, moves: Array) -> Float[Array, " n"]:
        """Standard error of the change of an answer: rounding of sums over all gates."""
        sizes = np.linalg.norm(self.values, axis=1)
        if chamber.gates is None:
            loud = float(np.linalg.norm(chamber.query) * sizes.sum())
        else:
            loud = float(np.linalg.norm(chamber.gates, axis=1) @ sizes)
        if self.uniform is not None and chamber.gates is not None:
            mean = float(np.linalg.norm(chamber.gates, axis=1).sum()) / (len(self.values) + 2)
            loud += mean * float(np.linalg.norm(self.uniform))
        each = np.linalg.norm(moves, axis=1) * sizes[heads]
        noise = self.ask.additive * float(np.linalg.norm(self.mix)) * np.sqrt(2.0)
        return np.asarray(np.hypot(self.ask.unit * (loud + each), noise))

    def first_column(self) -> None:
        """p_h at the base query: d openings per head, their length found on the way."""
        width = self.ask.width
        for head, record in enumerate(self.records):
            self.begin(head)
            rows, got = self.begun[head]
            which = np.full(width, head)
            for stop in sorted({min(3, width), width} - {1}):
                seen = np.abs(got.log_odds) / np.linalg.norm(got.moves, axis=1)
                length = TARGET / float(np.sqrt(np.mean(np.square(seen))))
                start = len(got.moves)
                asked = rows[start:stop] * min(length, TARGET * np.sqrt(width) / seen.max())
                more = open_heads(self.ask, self.chamber, which[start:stop], asked, "first column")
                got = Readings(
                    np.concatenate([got.moves, more.moves]),
                    np.concatenate([got.changes, more.changes]),
                    np.concatenate([got.log_odds, more.log_odds]),
                )
            record.queries.append(self.query)
            record.moves.append(got.moves)
            record.changes.append(got.changes)
            record.doubts.append(self.doubt(self.chamber, which, got.moves))
            record.keys.append(np.linalg.solve(got.moves, got.log_odds))
            self.sizes[head] = float(np.linalg.norm(record.keys[0]))
        self.correct_leaks(0)

    # --- gates of least norm, and the other queries -----------------------------------------

    def redesign(self) -> None:
        """Gates that hold around the base query, from the measured p_h."""
        self.gate_norm, self.step = 0.0, 1.0
        if self.chamber.gates is None:
            return
        width = self.ask.width
        keys = np.stack([record.keys[0] for record in self.records])
        gates = gate_tokens(keys)
        self.gate_norm = float(np.linalg.norm(gates, axis=1).max())
        smallest = float(np.linalg.norm(keys, axis=1).min())
        own = np.einsum("hd,hd->h", keys, gates)
        itself = float(((SHUT + keys @ self.query) / own).max())
        scale = max(SHUT / smallest, itself)  # the query must lose against the gates as well
        self.chamber = self.measured_base(self.query, gates * scale)
        self.step = 0.5 * min(1.0, np.sqrt(width) / 8) / max(1.0, self.gate_norm / 4)

    def other_columns(self) -> None:
        """p_h at the remaining queries, closer to the first where the gates demand it."""
        width = self.ask.width
        frame = fan((self.query / np.linalg.norm(self.query))[:, None], self.query, self.rng)
        if self.chamber.gates is None:
            others = list(self.reach * frame[1:])
            if self.bias:
                others.append(np.zeros(width))
        else:
            rows = frame if self.bias else frame[1:]
            others = [self.query + self.step * self.reach * row for row in rows]
        self.gave_way = IllConditioned("the gates do not hold at any other query")
        for query in others:
            ease = self.ease()
            near = self.query + ease * (query - self.query)
            for _ in range(RETREATS):
                if self.column(near):
                    break
                near = self.query + RETREAT * (near - self.query)
            else:
                raise self.gave_way

    def ease(self) -> float:
        """How far the next query may lie from the first, in planned steps: as far as the gates
        can be expected to hold, judged by how much keys have moved so far."""
        gates = self.chamber.gates
        if gates is None:
            return 1.0
        worst = 0.0
        for head, record in enumerate(self.records):
            if len(record.keys) < 2:
                return CAUTION
            first = record.keys[0]
            moved = [
                np.linalg.norm(key - first) / np.linalg.norm(query - self.query)
                for key, query in zip(record.keys[1:], record.queries[1:], strict=True)
            ]
            spread = float(np.linalg.norm(gates - gates[head], axis=1).max())
            share = record.rank or min(len(record.keys), self.ask.width)
            margin = float(margins(gates, np.stack([r.keys[0] for r in self.records]))[head])
            typical = float(np.sqrt(np.mean(np.square(moved)))) * self.step * self.reach
            worst = max(worst, typical * spread / (margin * np.sqrt(share)))
        return float(np.clip(LOSS / (TAIL * worst), *EASE))

    def range_of(self, record: Columns) -> Float[Array, "d k"]:
        """Orthonormal basis of the keys so far, the first key's direction first."""
        first = record.keys[0]
        if self.chamber.gates is None:
            stack = np.stack(record.keys, axis=1)
        else:
            stack = np.stack([first, *(key - first for key in record.keys[1:])], axis=1)
        full = [len(moves) == self.ask.width for moves in record.moves]
        return np.linalg.qr(stack[:, full] / np.linalg.norm(stack[:, full], axis=0))[0]

    def lengths(self, head: int, rows: Array, query: Array) -> Float[Array, " n"]:
        """How far to open along each row at a new query, from what p_h is expected to be."""
        record = self.records[head]
        width = self.ask.width
        if self.chamber.gates is None:
            spread = float(np.mean([np.linalg.norm(key) for key in record.keys])) / np.sqrt(width)
            inside = np.linalg.norm(rows @ self.range_of(record), axis=1)
            share = np.sqrt(max(1, width / max(1, len(record.keys))))
            expected = spread * np.where(inside > 0.9, min(share, 3.0), 1.0)
            return np.asarray(TARGET / expected)
        first = record.keys[0]
        slopes = [
            np.linalg.norm(key - first) / np.linalg.norm(other - self.query)
            for key, other in zip(record.keys[1:], record.queries[1:], strict=True)
        ]
        slope = (
            float(np.sqrt(np.mean(np.square(slopes))))
            if slopes
            else (float(np.linalg.norm(first)) / self.reach)
        )
        step = float(np.linalg.norm(query - self.query))
        count = record.rank or width
        expected = np.abs(rows @ first) + slope * step / np.sqrt(min(width, count))
        keys = np.stack([other.keys[0] for other in self.records])
        reach = np.abs(rows @ keys.T)
        reach[:, head] = 0.0
        return np.asarray(np.minimum(TARGET / expected, STRETCH / (reach.max(axis=1) + 1e-300)))

    def column(self, query: Array) -> bool:
        """One more query for every head; False where the gates did not hold there."""
        base = None if self.chamber.gates is None else self.chamber.base
        chamber = self.chamber_at(query, self.chamber.gates, base)
        plans, firsts = [], []
        for head, record in enumerate(self.records):
            known = self.range_of(record)
            count = known.shape[1]
            rows = fan(self.turned(known), self.values[head], self.rng)
            rows = rows + TILT * self.lean(head, record)
            rows = rows * self.lengths(head, rows, query)[:, None]
            plans.append(rows)
            if record.rank is not None and count >= record.rank:
                firsts.append(record.rank)
            else:
                firsts.append(min(count + 1, self.ask.width) if record.searching else len(rows))
        try:
            got = self.open_many(chamber, plans, [(0, first) for first in firsts])
        except Unexplained as error:  # the gates gave way
            self.gave_way = error
            return False
        rest = []
        for head, record in enumerate(self.records):
            done = record.rank is not None and len(record.keys) >= record.rank
            if not done and record.searching and self.explained(head, got[head]):
                record.rank = self.range_of(record).shape[1]
                done = True
            rest.append((firsts[head], firsts[head] if done else len(plans[head])))
        try:
            more = self.open_many(chamber, plans, rest)
        except Unexplained as error:
            self.gave_way = error
            return False
        joined = [
            tuple(np.concatenate([a, b]) for a, b in zip(x, y, strict=True))
            for x, y in zip(got, more, strict=True)
        ]
        keys = [self.key(head, moves, odds) for head, (moves, _, odds) in enumerate(joined)]
        gates = chamber.gates
        if gates is not None and not margins(gates, np.stack(keys), query).min() > HOLDS:
            return False
        for head, (moves, changes, _) in enumerate(joined):
            record = self.records[head]
            record.queries.append(query)
            record.moves.append(moves)
            record.changes.append(changes)
            record.doubts.append(self.doubt(chamber, np.full(len(moves), head), moves))
            record.keys.append(keys[head])
        self.correct_leaks(-1)
        return True

    def turned(self, known: Float[Array, "d k"]) -> Float[Array, "d k"]:
        """The known directions, those after the first in a random rotation; for a single head,
        which has no gates to respect, all of them."""
        start = 0 if self.chamber.gates is None else 1
        count = known.shape[1] - start
        if count < 2:
            return known
        turn = np.linalg.qr(self.rng.standard_normal((count, count)))[0]
        return np.concatenate([known[:, :start], known[:, start:] @ turn], axis=1)

    def lean(self, head: int, record: Columns) -> Float[Array, " d"]:
        """The value's direction without its part along the first key, which would saturate."""
        value = self.values[head] / np.linalg.norm(self.values[head])
        if self.chamber.gates is not None:
            first = record.keys[0] / np.linalg.norm(record.keys[0])
            value = value - first * (first @ value)
        return np.asarray(value)

    def open_many(
        self, chamber: Chamber, plans: list[Array], parts: list[tuple[int, int]]
    ) -> list[tuple[Array, Array, Array]]:
        """Openings of several heads in one batch: moves, changes and log-odds per head."""
        counts = [stop - start for start, stop in parts]
        which = np.repeat(np.arange(len(plans)), counts)
        moves = np.concatenate([p[a:b] for p, (a, b) in zip(plans, parts, strict=True)])
        if not len(moves):
            return [(moves, np.zeros(0), np.zeros(0)) for _ in plans]
        rounds = 3 if chamber.gates is not None else 40
        got = open_heads(self.ask, chamber, which, moves, "columns", rounds)
        cuts = np.cumsum(counts)[:-1]
        return list(
            zip(
                np.split(got.moves, cuts),
                np.split(got.changes, cuts),
                np.split(got.log_odds, cuts),
                strict=True,
            )
        )

    def explained(self, head: int, got: tuple[Array, Array, Array]) -> bool:
        """Whether a column lies in the range of those before it, judged by one opening more than
        that range has dimensions."""
        record = self.records[head]
        moves, _, odds = got
        known = self.range_of(record)
        if len(moves) <= known.shape[1]:
            return False
        seen = odds if self.chamber.gates is None else odds - moves @ record.keys[0]
        fit = np.linalg.lstsq(moves @ known, seen, rcond=None)[0]
        weights = np.abs(moves @ self.values[head])
        noise = self.doubt(self.chamber, np.full(len(moves), head), moves) / weights
        allowed = LOWER * np.linalg.norm(seen) + 200 * np.linalg.norm(noise)
        return bool(np.linalg.norm(moves @ known @ fit - seen) <= allowed)

    def key(self, head: int, moves: Array, odds: Array) -> Float[Array, " d"]:
        """p from log-odds: all of it, or its coordinates in the known range."""
        if len(moves) == self.ask.width:
            return np.asarray(np.linalg.solve(moves, odds))
        record = self.records[head]
        known = self.range_of(record)
        if self.chamber.gates is None:
            return np.asarray(known @ np.linalg.lstsq(moves @ known, odds, rcond=None)[0])
        first = record.keys[0]
        rest = np.linalg.lstsq(moves @ known, odds - moves @ first, rcond=None)[0]
        return np.asarray(first + known @ rest)

    def correct_leaks(self, column: int) -> None:
        """Where gates hold only just, what leaks through them is computed and removed."""
        gates = self.chamber.gates
        if gates is None:
            return
        query = self.records[0].queries[column]
        chamber = self.chamber_at(query, gates, self.chamber.base)
        for _ in range(LEAK_ROUNDS):
            keys = np.stack([record.keys[column] for record in self.records])
            if margins(gates, keys, query).min() > TIGHT:
                return
            own = np.stack([record.keys[0] for record in self.records])  # where base was asked
            still = leakage(
                np.concatenate([gates, self.query[None]])[None], own, self.values, gates
            )
            for head, record in enumerate(self.records):
                moves = record.moves[column]
                tokens = chamber.sequences(np.full(len(moves), head), moves)
                leak = leakage(tokens, keys, self.values, gates) - still
                weights = moves @ self.values[head]
                leak -= weights / (1 + np.exp(-(moves @ keys[head])))
                odds = log_odds(record.changes[column] - leak, weights)
                if np.isnan(odds).any():
                    return
                record.keys[column] = self.key(head, moves, odds)

    # --- from openings to parameters ----------------------------------------------------------

    def conclude(self) -> Draft:
        """Parameters, and their spread over replicates with perturbed answers."""
        scores, biases = self.parameters(self.values, None)
        score_spread, bias_spread = np.zeros_like(scores), np.zeros_like(biases)
        value_spread = np.zeros_like(self.blocks)
        for _ in range(REPLICATES):
            blocks = self.perturbed_blocks()
            other = self.parameters((blocks @ self.mix)[: len(self.values)], self.rng)
            value_spread += (blocks - self.blocks) ** 2
            score_spread += (other[0] - scores) ** 2
            bias_spread += (other[1] - biases) ** 2
        width = self.ask.width
        ranks = tuple(width if r.rank is None else r.rank for r in self.records)
        return Draft(
            scores,
            biases,
            self.blocks,
            smoothed(BARS * np.sqrt(score_spread / REPLICATES)),
            smoothed(BARS * np.sqrt(bias_spread / REPLICATES)),
            smoothed(BARS * np.sqrt(value_spread / REPLICATES)),
            self.uniform is not None,
            ranks,
            [low_rank_factors(s, r) for s, r in zip(scores, ranks, strict=True)],
            self.gate_norm,
        )

    def perturbed_blocks(self) -> Float[Array, "b d outputs"]:
        """The values, had the answers been rounded otherwise."""
        loud = float(np.linalg.norm(self.blocks, axis=1).sum(axis=0).max())
        shape = self.blocks.shape
        if self.leaves is None:
            level = self.ask.unit * loud + self.ask.additive
            return np.asarray(self.blocks + level * self.rng.standard_normal(shape))
        noise = self.rng.standard_normal((self.inverse.shape[1], shape[2]))
        change = self.ask.unit * loud * (self.inverse @ noise)
        return np.asarray(self.blocks + change.reshape(shape))

    def parameters(
        self, values: Float[Array, "h d"], rng: np.random.Generator | None
    ) -> tuple[Float[Array, "h d d"], Float[Array, "h d"]]:
        """Scores and key biases; with `rng`, from answers perturbed by their errors."""
        scores, biases = [], []
        for head, record in enumerate(self.records):
            keys: list[Array] = []
            shared = 0.0 if rng is None else rng.standard_normal()
            for j, moves in enumerate(record.moves):
                odds = moves @ record.keys[j]
                if rng is not None:
                    # First order around what was measured: later leaks stay corrected.
                    weights = moves @ self.values[head]
                    ratio = 1 / (1 + np.exp(-odds))
                    slope = weights * ratio * (1 - ratio)
                    noise = record.doubts[j] * (rng.standard_normal(len(moves)) + shared)
                    tilt = -(moves @ (values[head] - self.values[head])) * ratio
                    odds = odds + (noise + tilt) / slope
                    odds = odds + self.score_noise(record, j) * rng.standard_normal(len(moves))
                keys.append(self.solved(record, j, odds, keys))
            stack = np.stack(keys, axis=1)
            design = np.stack(record.queries, axis=1)
            if self.bias:
                design = np.vstack([design, np.ones(design.shape[1])])
            map_ = np.linalg.solve(design.T, stack.T).T
            scores.append(map_[:, : self.ask.width])
            biases.append(map_[:, self.ask.width] if self.bias else np.zeros(self.ask.width))
        return np.stack(scores), np.stack(biases)

    def score_noise(self, record: Columns, column: int) -> float:
        """Rounding of the scores themselves, which are large at the gates."""
        gates = self.chamber.gates
        size = float(np.linalg.norm(record.queries[column]))
        if gates is not None:
            size = max(size, float(np.linalg.norm(gates, axis=1).max()))
        return self.ask.unit * size * float(np.linalg.norm(record.keys[column]))

    def solved(self, record: Columns, column: int, odds: Array, keys: list[Array]) -> Array:
        """The key of one column, given the columns before it."""
        moves = record.moves[column]
        if len(moves) == self.ask.width:
            return np.asarray(np.linalg.solve(moves, odds))
        full = [k for k, m in zip(keys, record.moves, strict=False) if len(m) == self.ask.width]
        gated = self.chamber.gates is not None
        stack = np.stack([full[0], *(k - full[0] if gated else k for k in full[1:])], axis=1)
        known = np.linalg.qr(stack / np.linalg.norm(stack, axis=0))[0]
        start = full[0] if gated else np.zeros(self.ask.width)
        rest = np.linalg.lstsq(moves @ known, odds - moves @ start, rcond=None)[0]
        return np.asarray(start + known @ rest)


class Flat(Exception):
    """A head that no opening moves: its score is zero."""


def leakage(tokens: Array, keys: Array, values: Array, gates: Array) -> Float[Array, " n"]:
    """How far an answer exceeds the one where every head attends to its own gate."""
    query = tokens[:, -1]
    answer = np.zeros(len(tokens))
    for h in range(len(keys)):
        scores = (tokens - query[:, None]) @ keys[h]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        answer += np.einsum("nl,nl->n", weights, (tokens - gates[h]) @ values[h])
    return answer


def low_rank_factors(score: Array, rank: int | None) -> tuple[Array, Array] | None:
    """The score in factors where its rank is known to be smaller than the width."""
    if rank is None or rank >= len(score):
        return None
    u, s, vt = np.linalg.svd(score)
    root = np.sqrt(s[:rank])
    return u[:, :rank] * root, root[:, None] * vt[:rank]


def smoothed(errors: Array) -> Array:
    """Each error at least the root mean square over its block: few replicates make single
    entries look better than they are."""
    flat = errors.reshape(len(errors), -1)
    level = np.sqrt((flat**2).mean(axis=1))
    return np.asarray(np.maximum(flat, level[:, None]).reshape(errors.shape))
