"""Second half of learners/multi_head/vector_outputs: soft queries, and scores out of them."""

from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import IllConditioned
from keyhole.learners.multi_head.value_maps import (
    COARSE,
    EXACT,
    NOISE,
    Care,
    ValueMaps,
    Values,
    spectrum_end,
)
from keyhole.linalg.bases import random_directions
from keyhole.linalg.token_frames import spread_tokens
from keyhole.measurement.asking import Asker

WEAKEST, STRONGEST = 0.3, 5.0  # largest log-odds accepted at the first anchor
FAINTEST = 1e-9  # log-odds from which a length is judged: a longer leap would miss the range
TRIES = 12  # shortenings, and corrections of the first length
RECENT, HIGH = 64, 0.9  # soft queries that judge the length of the next, by this quantile
FEW, WIDER = 4, 0.3  # coarse boxes with few heads get wide columns worth so much of the width
CLEAR = 0.3  # ratio of singular values at the expected rank that confirms it


@dataclass
class Block:
    """One soft query: anchor, which tokens, their length, and the answer."""

    anchor: Array
    group: int
    length: float
    answer: Array


@dataclass
class Vector:
    """One attempt; holds what the stages hand on."""

    ask: Asker
    rng: np.random.Generator
    frame: Float[Array, "d d"]
    first: Float[Array, "one outputs"]
    heads: int | None
    rank: int | None
    loudness: float = 1.0  # size of single tokens
    radius: float = np.inf  # norm that no token may exceed
    alike: bool = False  # whether few digits are read for layers whose maps share one rank
    rough: bool = False  # value maps are still rough: ranks of scores are only confirmed
    blocks: list[list[Block]] = field(default_factory=list)

    def run(self) -> None:
        self.width = self.ask.width
        self.care: Care = COARSE if self.ask.coarse else EXACT
        anchor = np.sqrt(self.width) * random_directions(self.rng, 1, self.width)[0]
        stage = ValueMaps(
            self.ask,
            self.rng,
            self.frame,
            self.first,
            self.loudness,
            self.heads,
            self.rank,
            self.care,
            self.alike,
        )
        self.values = stage.measure(anchor)
        self.ranks = self.values.ranks
        self.read(self.values)
        self.design()
        self.wide_columns()
        self.narrow_columns()

    def read(self, values: Values) -> None:
        """Value maps of all heads."""
        self.ins, self.outs, self.total, self.condition = values.maps()
        self.maps = np.stack([a @ b for a, b in zip(self.ins, self.outs, strict=True)])

    # --- soft queries -----------------------------------------------------------------------

    def design(self) -> None:
        """Tokens that cover all directions and that every head sees well."""
        self.bases = [np.linalg.qr(part)[0] for part in self.ins]
        self.count = max(1, int(min(self.ranks) * self.care.share))
        longest = self.ask.oracle.spec.domain.max_length
        self.count = self.count if longest is None else min(self.count, longest - 1)
        cover = -(-self.width // self.count)
        tokens = spread_tokens(self.bases, self.count, cover, self.rng).T
        self.groups: list[Array] = []
        self.readers: list[Array] = []
        self.peaks: list[float] = []
        self.covering = self.add_tokens(tokens.reshape(cover, self.count, self.width))
        zero = np.zeros(self.width)
        size = min(self.care.anchor * np.sqrt(self.width), self.radius / 2)
        self.anchors = [size * self.frame[0], zero, *(size * self.frame[1:])]

    def add_tokens(self, tokens: Float[Array, "g k d"]) -> list[int]:
        """Registers groups of tokens; how their weights are read is worked out once."""
        first = len(self.groups)
        self.groups.extend(tokens)
        self.readers.extend(self.weight_reader(group) for group in tokens)
        return list(range(first, len(self.groups)))

    def weight_reader(self, tokens: Float[Array, "k d"]) -> Float[Array, "outputs n"]:
        """The matrix that takes an answer to the weights of all tokens in all heads: the right
        inverse of the values that tokens have in heads."""
        values = (tokens @ self.maps).reshape(-1, self.maps.shape[2])
        q, r = np.linalg.qr(values.T)
        return np.asarray(q @ np.linalg.inv(r).T)

    def soft(self, anchor: Array, group: int, length: float) -> Block:
        """Asks one soft query, with shorter tokens where a weight is lost in rounding."""
        length = min(length, self.radius / 2)
        for _ in range(TRIES):
            sequence = np.concatenate([anchor + length * self.groups[group], anchor[None]])[None]
            block = Block(anchor, group, length, self.ask(sequence, "columns")[0])
            peak = float(np.abs(self.log_odds(block)).max())
            if np.isfinite(peak):
                self.peaks.append(max(peak / length, TINY))
                return block
            length *= 0.25
        raise IllConditioned("soft queries saturate at every length")

    def log_odds(self, block: Block) -> Float[Array, "h k"]:
        """Scores of the tokens relative to the anchor, for every head; NaN where a weight is not
        positive."""
        left = block.answer - block.anchor @ self.total
        weights = (left @ self.readers[block.group]).reshape(len(self.ranks), -1) / block.length
        rest = 1.0 - weights.sum(axis=1, keepdims=True)
        if not ((rest > 0).all() and (weights > 0).all()):
            return np.full(weights.shape, np.nan)
        return np.asarray(np.log(weights / rest))

    def reach(self) -> float:
        """Token length that should bring the largest log-odds to what is aimed at."""
        return self.care.peak / float(np.quantile(self.peaks[-RECENT:], HIGH))

    def first_block(self) -> Block:
        """The first soft query, its length corrected until it is worth keeping."""
        block = self.soft(self.anchors[0], self.covering[0], np.sqrt(self.width))
        for _ in range(TRIES):
            peak = float(np.abs(self.log_odds(block)).max())
            if peak <= STRONGEST and (peak >= WEAKEST or block.length >= self.radius / 2):
                break
            length = block.length * self.care.peak / max(peak, FAINTEST)
            block = self.soft(self.anchors[0], self.covering[0], length)
        self.peaks = self.peaks[-1:]
        return block

    def wide_columns(self) -> None:
        """Anchors with enough tokens to see all of p_h = W_h x + c_h, until the rank is known."""
        start = [self.first_block()]
        goal = self.care.beyond(max(self.ranks))
        if self.care.groups > 1 and 1 < len(self.ranks) <= FEW:
            goal += int(WIDER * self.width / (2 * len(self.ranks) - 2))
        goal = min(goal, len(self.anchors))
        self.wide = 0
        while True:
            for anchor in self.anchors[self.wide : goal]:
                rest = self.covering[len(start) :]
                self.blocks.append([*start, *(self.soft(anchor, g, self.reach()) for g in rest)])
                start = []
            self.wide = goal
            keys = self.wide_keys()
            pairs = zip(keys, self.ranks, strict=True)
            self.score_ranks = [self.score_rank(part, rank) for part, rank in pairs]
            rank, telling = max(self.score_ranks), goal - self.unbiased(keys)
            if goal >= len(self.anchors) or rank < telling:
                return
            goal = min(goal + (max(2, goal // 4) if rank == goal else 1), len(self.anchors))

    def measured(self, columns: list[list[Block]]) -> Float[Array, "h k n"]:
        """t . p_h for the tokens t of each column (which share their tokens)."""
        rows = [
            np.concatenate([self.log_odds(b) / b.length for b in column], axis=1)
            for column in columns
        ]
        return np.stack(rows, axis=2)

    def tokens_of(self, column: list[Block]) -> Float[Array, "k d"]:
        return np.concatenate([self.groups[b.group] for b in column])

    def wide_keys(self) -> Float[Array, "h d n"]:
        columns = self.blocks[: self.wide]
        return np.asarray(np.linalg.pinv(self.tokens_of(columns[0])) @ self.measured(columns))

    def unbiased(self, keys: Float[Array, "h d n"]) -> bool:
        """Whether the second anchor, zero, found no key bias: then it tells no rank."""
        noise = self.ask.unit * self.condition * float(np.linalg.norm(keys)) * np.sqrt(self.width)
        return keys.shape[2] > 1 and bool(np.linalg.norm(keys[:, :, 1]) <= NOISE * noise)

    def score_rank(self, keys: Float[Array, "d n"], expected: int) -> int:
        """Rank of [W | c], first of all the value map's own, which layers share."""
        sizes = np.linalg.svd(keys, compute_uv=False)
        noise = self.ask.unit * self.condition * float(sizes[0]) * np.sqrt(self.width)
        rank = spectrum_end(sizes, noise)
        if expected < len(sizes) and (self.rough or self.alike):
            ends = sizes[expected] < CLEAR * sizes[expected - 1]
            return expected if ends or rank <= expected else rank
        return rank

    def narrow_columns(self) -> None:
        """The remaining anchors: tokens that see the range of every score suffice."""
        rest = self.anchors[self.wide :]
        if not rest:
            return
        ranges = [
            np.linalg.svd(part, full_matrices=False)[0][:, :rank]
            for part, rank in zip(self.wide_keys(), self.score_ranks, strict=True)
        ]
        groups = -(-max(self.score_ranks) // self.count)
        tokens = spread_tokens(self.bases, self.count, groups, self.rng, whole=ranges).T
        parts = self.add_tokens(tokens.reshape(groups, self.count, self.width))
        for anchor in rest:
            self.blocks.append([self.soft(anchor, part, self.reach()) for part in parts])

    # --- from answers to parameters -----------------------------------------------------------

    def parameters(self) -> tuple[Float[Array, "h d d"], Float[Array, "h d"]]:
        """Scores and key biases from the answers."""
        keys = np.zeros((len(self.ranks), self.width, len(self.blocks)))
        keys[:, :, : self.wide] = self.wide_keys()
        narrow = self.blocks[self.wide :]
        seen = self.measured(narrow) if narrow else None
        for h, rank in enumerate(self.score_ranks):
            u, s, vt = np.linalg.svd(keys[h, :, : self.wide], full_matrices=False)
            # the columns beyond the rank sharpen its range
            keys[h, :, : self.wide] = (u[:, :rank] * s[:rank]) @ vt[:rank]
            if seen is not None:
                inside = self.tokens_of(narrow[0]) @ u[:, :rank]
                keys[h, :, self.wide :] = u[:, :rank] @ (np.linalg.pinv(inside) @ seen[h])
        design = np.stack([column[0].anchor for column in self.blocks], axis=1)
        design = np.vstack([design, np.ones(design.shape[1])])
        maps = np.linalg.solve(design.T, keys.transpose(0, 2, 1)).transpose(0, 2, 1)
        return maps[:, :, : self.width], maps[:, :, self.width]

    def replica(self, rng: np.random.Generator) -> "Vector":
        """The same attempt with every answer perturbed by its rounding error."""
        other = copy(self)
        loud = float(np.linalg.norm(self.maps)) / np.sqrt(self.width)

        def noisy(answers: Array, size: float, share: float = 1.0) -> Array:
            noise = np.hypot(self.ask.unit * loud * size, self.ask.additive) / share
            return np.asarray(answers + noise * rng.standard_normal(answers.shape))

        reach, values = self.values.reach, self.values
        other.read(
            replace(
                values,
                singles=noisy(values.singles, 1.0),
                moved=[noisy(part, 1.0, reach) for part in values.moved],
                grouped=[noisy(part, 1.0, reach) for part in values.grouped],
            )
        )
        other.readers = [other.weight_reader(group) for group in self.groups]
        other.blocks = [
            [
                replace(b, answer=noisy(b.answer, float(np.linalg.norm(b.anchor)) + b.length))
                for b in column
            ]
            for column in self.blocks
        ]
        return other
