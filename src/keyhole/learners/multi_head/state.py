"""What the stages of learners/multi_head/scalar_outputs hand on to each other."""

from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned
from keyhole.learners.multi_head.separators import margins
from keyhole.learners.multi_head.soft_probe import Chamber, Readings, log_odds
from keyhole.measurement.asking import Asker

TARGET = 1.2  # typical log-odds of an opening: long enough to see, short enough to invert
TILT = 0.5  # how far an opening leans towards the head's value
TIGHT = 70.0  # margin below which leakage is looked for: rounding, and what an opening may add
DRY = 1e-14  # leakage, relative to an opening, that is rounding
LEAK_ROUNDS = 6


@dataclass
class Columns:
    """What was measured of one head: for each anchor the openings, and the rank once known."""

    anchors: list[Array] = field(default_factory=list)
    moves: list[Array] = field(default_factory=list)
    changes: list[Array] = field(default_factory=list)
    doubts: list[Array] = field(default_factory=list)  # standard error of each change
    keys: list[Array] = field(default_factory=list)  # p at these anchors
    rank: int | None = None
    searching: bool = True


@dataclass
class Draft:
    """A finished attempt: the parameters and how far replicates of them spread."""

    scores: Float[Array, "h d d"]
    biases: Float[Array, "h d"]
    values: Float[Array, "b d outputs"]  # the uniform head last, if there is one
    score_errors: Float[Array, "h d d"]
    bias_errors: Float[Array, "h d"]
    value_errors: Float[Array, "b d outputs"]
    uniform: bool
    ranks: tuple[int, ...]
    factors: list[tuple[Array, Array] | None]
    gate_norm: float


@dataclass
class Scalar:
    """One attempt from one anchor; holds what the stages hand on."""

    ask: Asker
    rng: np.random.Generator
    total: Float[Array, "d outputs"]
    total_rows: Float[Array, "n d"]
    total_answers: Float[Array, "n outputs"]
    heads: int | None
    rank: int | None  # None: it is searched for
    bias: bool
    reach: float  # norm of the anchor
    suspicion: float = 1.0  # factor on the misfit that betrays two heads in one
    pairs: bool = False  # whether queries hold two tokens only
    # what the stages find out
    mix: Array = field(init=False)  # of the outputs, where there are several
    anchor: Array = field(init=False)  # the anchor
    blocks: Array = field(init=False)  # values of all heads, all outputs
    inverse: Array = field(init=False)  # from errors of answers to errors of blocks
    values: Array = field(init=False)  # values of the heads that choose, outputs mixed
    uniform: Array | None = field(init=False)  # value of a head that does not
    chamber: Chamber = field(init=False)
    sizes: dict[int, float] = field(default_factory=dict)  # |p_h| at the anchor
    begun: dict[int, tuple[Array, Readings]] = field(default_factory=dict)  # first openings
    checked: int = 0  # leaves known to hold one head each
    records: list[Columns] = field(default_factory=list)
    gate_norm: float = 0.0
    step: float = 1.0  # distance of the other anchors, relative to the anchor
    gave_way: IllConditioned = field(
        default_factory=lambda: IllConditioned("the gates do not hold at any other anchor")
    )

    def set_values(self, blocks: Array, inverse: Array, uniform: bool = False) -> None:
        """`blocks` holds the uniform head last, if there is one."""
        self.inverse, self.blocks = inverse, blocks
        mixed = blocks @ self.mix
        self.values = mixed[:-1] if uniform else mixed
        self.uniform = mixed[-1] if uniform else None

    def chamber_at(self, anchor: Array, gates: Array | None, base: Array | None = None) -> Chamber:
        if base is None:
            base = np.full(len(self.values), float(anchor @ self.total @ self.mix))
        mix = np.asarray(self.mix)
        return Chamber(anchor, gates, base, self.values, self.uniform, mix)

    def chamber_near(self, anchor: Array) -> Chamber:
        """What shuts the heads at the anchor, at another one."""
        base = self.chamber.base
        if self.chamber.gates is None:  # answers are compared with that to the anchor alone
            total = self.total @ self.mix - (0.0 if self.uniform is None else self.uniform)
            base = np.full(len(self.values), float(anchor @ total))
        return replace(self.chamber, anchor=anchor, base=base)

    def measured_base(self, anchor: Array, gates: Array) -> Chamber:
        """Gates with their own answer asked, so that no error of the values enters it. A uniform
        head sees the competitor too: then each head has an answer of its own."""
        blank = self.chamber_at(anchor, gates)
        if self.uniform is None:
            tokens = np.concatenate([gates, anchor[None]])[None]
        else:
            every = np.arange(len(gates))
            tokens = blank.sequences(every, np.zeros((len(gates), len(anchor))))
        base = blank.selective(self.ask(tokens, "gates"), tokens)
        return self.chamber_at(anchor, gates, np.broadcast_to(base, (len(gates),)))

    def doubt(self, chamber: Chamber, heads: Array, moves: Array) -> Float[Array, " n"]:
        """Standard error of the change of an answer: rounding of sums over all gates."""
        sizes = np.linalg.norm(self.values, axis=1)
        loud = chamber.loudness(sizes)
        if self.uniform is not None and chamber.gates is not None:
            mean = float(np.linalg.norm(chamber.gates, axis=1).sum()) / (len(self.values) + 2)
            loud += mean * float(np.linalg.norm(self.uniform))
        each = np.linalg.norm(moves, axis=1) * sizes[heads]
        noise = self.ask.additive * float(np.linalg.norm(self.mix)) * np.sqrt(2.0)
        return np.asarray(np.hypot(self.ask.unit * (loud + each), noise))

    def enter(
        self, head: int, anchor: Array, chamber: Chamber, moves: Array, changes: Array, key: Array
    ) -> None:
        """One more column of a head: its openings at an anchor, and the key they gave."""
        record = self.records[head]
        record.anchors.append(anchor)
        record.moves.append(moves)
        record.changes.append(changes)
        record.doubts.append(self.doubt(chamber, np.full(len(moves), head), moves))
        record.keys.append(key)

    def enter_first(self, head: int, got: Readings) -> None:
        """The column at the anchor, d openings."""
        key = np.linalg.solve(got.moves, got.log_odds)
        self.enter(head, self.anchor, self.chamber, got.moves, got.changes, key)
        self.sizes[head] = float(np.linalg.norm(self.records[head].keys[0]))

    def range_of(self, record: Columns) -> Float[Array, "d k"]:
        """Orthonormal basis of the keys so far, the first key's direction first."""
        first = record.keys[0]
        if self.chamber.alone:
            stack = np.stack(record.keys, axis=1)
        else:
            stack = np.stack([first, *(key - first for key in record.keys[1:])], axis=1)
        full = [len(moves) == self.ask.width for moves in record.moves]
        return np.linalg.qr(stack[:, full] / np.linalg.norm(stack[:, full], axis=0))[0]

    def key(self, head: int, moves: Array, odds: Array) -> Float[Array, " d"]:
        """p from log-odds: all of it, or its coordinates in the known range."""
        if len(moves) == self.ask.width:
            return np.asarray(np.linalg.solve(moves, odds))
        record = self.records[head]
        known = self.range_of(record)
        if self.chamber.alone:
            return np.asarray(known @ np.linalg.lstsq(moves @ known, odds, rcond=None)[0])
        first = record.keys[0]
        rest = np.linalg.lstsq(moves @ known, odds - moves @ first, rcond=None)[0]
        return np.asarray(first + known @ rest)

    def correct_leaks(self, column: int) -> None:
        """Where gates hold only just, what leaks through them is computed and removed."""
        gates = self.chamber.gates
        if gates is None:
            return
        anchor = self.records[0].anchors[column]
        chamber = self.chamber_at(anchor, gates, self.chamber.base)
        for _ in range(LEAK_ROUNDS):
            keys = np.stack([record.keys[column] for record in self.records])
            if margins(gates, keys, anchor).min() > TIGHT:
                return
            own = np.stack([record.keys[0] for record in self.records])  # where base was asked
            still = leakage(
                np.concatenate([gates, self.anchor[None]])[None], own, self.values, gates
            )
            worst = 0.0
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
                worst = max(worst, float(np.abs(leak / weights).max()))
            if worst <= DRY:
                return


class Flat(Exception):
    """A head that no opening moves: its score is zero."""


def leakage(tokens: Array, keys: Array, values: Array, gates: Array) -> Float[Array, " n"]:
    """How far an answer exceeds the one where every head attends to its own gate."""
    anchor = tokens[:, -1]
    answer = np.zeros(len(tokens))
    for h in range(len(keys)):
        scores = (tokens - anchor[:, None]) @ keys[h]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        answer += np.einsum("nl,nl->n", weights, (tokens - gates[h]) @ values[h])
    return answer
