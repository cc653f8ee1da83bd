"""One attempt of learners/multi_head_vector: hard attention, value maps, soft questions."""

from copy import copy
from dataclasses import dataclass, field

import numpy as np

from keyhole.algebra.procrustes import spread_tokens
from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned
from keyhole.probes.asking import Asker
from keyhole.probes.hard_attention import (
    REACH,
    Leaves,
    Overcomplete,
    directions,
    find_vector_leaves,
)

SPARE = 8  # one direction in so many is asked beyond the rank
GAP = 1e-4  # ratio of neighbouring singular values that ends a spectrum
FLOOR = 1e4  # singular values below this many rounding errors are noise
PEAK = 2.0  # largest log-odds aimed at
WEAKEST, STRONGEST = 0.3, 5.0  # largest log-odds accepted at the first query
TRIES = 12


@dataclass
class Block:
    """One soft question: query, token directions and their length, and the answer."""

    query: Array
    group: int  # which tokens
    length: float
    answer: Array


@dataclass
class Values:
    """What hard attention and single tokens say, without the offset: total, and each head's
    response."""

    frame: Float[Array, "d d"]
    singles: Float[Array, "n outputs"]  # answers to the first rows of the frame, alone
    moved: list[Float[Array, "e outputs"]]  # per head: responses to the last rows of the frame
    noise: list[float]

    def maps(
        self, ranks: list[int]
    ) -> tuple[list[Array], list[Array], Float[Array, "d outputs"], float]:
        """V_h, O_h (orthonormal rows), M, and the condition of the stacked O."""
        count = len(self.frame) - len(self.singles)
        tail = sum(responses[len(responses) - count :] for responses in self.moved)
        total = self.frame.T @ np.concatenate([self.singles, tail])
        outs = [
            np.linalg.svd(moved, full_matrices=False)[2][:rank]
            for moved, rank in zip(self.moved, ranks, strict=True)
        ]
        stacked = np.concatenate(outs)
        if len(stacked) > stacked.shape[1]:
            raise Overcomplete
        u, s, vt = np.linalg.svd(stacked, full_matrices=False)
        ins = total @ (vt.T / s) @ u.T
        cuts = np.cumsum(ranks)[:-1]
        return np.split(ins, cuts, axis=1), outs, total, float(s[0] / s[-1])


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
    blocks: list[list[Block]] = field(default_factory=list)

    def run(self) -> None:
        self.width = self.ask.width
        self.query = np.sqrt(self.width) * directions(self.rng, 1, self.width)[0]
        self.find_values()
        self.design()
        self.wide_columns()
        self.narrow_columns()

    # --- values -------------------------------------------------------------------------------

    def find_values(self) -> None:
        shift = self.frame[-1]
        leaves, responses = find_vector_leaves(self.ask, self.query, self.heads, shift, self.rng)
        moved, noise = self.moves(leaves, list(range(len(leaves))))
        ranks = [self.numerical_rank(m, n) for m, n in zip(moved, noise, strict=True)]
        if self.suspicious(ranks):
            again, fresh = find_vector_leaves(self.ask, self.query, self.heads, shift, self.rng)
            if len(again) > len(leaves):
                scale = float(np.abs(fresh).max())
                gaps = np.abs(fresh[:, None] - responses[None]).max(axis=2) / scale
                known = {
                    i: int(np.argmin(gaps[i])) for i in range(len(again)) if gaps[i].min() < 1e-6
                }
                rest = [i for i in range(len(again)) if i not in known]
                more, more_noise = self.moves(again, rest)
                moved = [
                    moved[known[i]] if i in known else more[rest.index(i)]
                    for i in range(len(again))
                ]
                noise = [
                    noise[known[i]] if i in known else more_noise[rest.index(i)]
                    for i in range(len(again))
                ]
                ranks = [self.numerical_rank(m, n) for m, n in zip(moved, noise, strict=True)]
        common = min(len(m) for m in moved)
        rows = self.frame[1 : self.width - common]
        answers = self.ask(self.loudness * rows[:, None], "values") / self.loudness
        singles = np.concatenate([self.first, answers])
        self.values = Values(self.frame, singles, moved, noise)
        self.ranks = ranks
        if sum(ranks) > singles.shape[1]:
            raise Overcomplete

    def suspicious(self, ranks: list[int]) -> bool:
        """Whether two heads may share a leaf: one is missing, or one leaf has twice the rank."""
        if self.heads is not None:
            return len(ranks) < self.heads
        return len(ranks) > 1 and max(ranks) > 1.5 * float(np.median(ranks))

    def moves(self, leaves: Leaves, which: list[int]) -> tuple[list[Array], list[float]]:
        """Responses of single leaves to moves along the last rows of the frame, one after the
        other until their rank stops growing."""
        found: list[Array] = [np.zeros((0, 0)) for _ in which]
        noise = [0.0] * len(which)
        base = leaves.equations.answers[0]
        active, asked = list(range(len(which))), 0
        size = REACH
        limit = self.width - 1
        while active:
            stop = min(asked + 1, limit)
            rows = self.frame[::-1][asked:stop]
            tokens = np.repeat(leaves.tokens[None], len(rows) * len(active), axis=0)
            for place, i in enumerate(active):
                part = slice(place * len(rows), (place + 1) * len(rows))
                tokens[part, which[i]] += size * rows
            answers = (leaves.ask(self.ask, tokens, "value maps") - base) / size
            for place, i in enumerate(active):
                part = answers[place * len(rows) : (place + 1) * len(rows)]
                found[i] = np.concatenate([found[i], part]) if asked else part
                noise[i] = self.ask.unit * float(np.abs(base).max()) / size
            asked = stop
            active = [i for i in active if asked < limit and not self.enough(found[i], noise[i])]
        return [responses[::-1] for responses in found], noise

    def enough(self, responses: Array, noise: float) -> bool:
        rank = self.rank if self.rank is not None else self.numerical_rank(responses, noise)
        return len(responses) >= rank + max(1, rank // SPARE)

    def numerical_rank(self, matrix: Array, noise: float) -> int:
        return numerical_rank(np.linalg.svd(matrix, compute_uv=False), noise)

    def read(self, values: Values) -> None:
        """Value maps, and the matrix that takes an answer apart into heads."""
        self.ins, self.outs, self.total, self.condition = values.maps(self.ranks)
        self.reader = np.linalg.pinv(np.concatenate(self.outs))
        self.cuts = np.cumsum(self.ranks)[:-1]

    # --- soft questions -----------------------------------------------------------------------

    def design(self) -> None:
        """Coordinates in which every head's output is read, and tokens they see well."""
        self.read(self.values)
        self.bases = [np.linalg.qr(part)[0] for part in self.ins]
        self.count = min(self.ranks)
        self.cover = -(-self.width // self.count)
        tokens = spread_tokens(self.bases, self.count, self.cover, self.rng).T
        self.groups: list[Array] = []
        self.readers: list[list[Array]] = []
        self.peaks: list[float] = []
        self.covering = self.add_tokens(tokens.reshape(self.cover, self.count, self.width))
        self.length = np.sqrt(self.width)
        self.queries = [np.zeros(self.width), *(np.sqrt(self.width) * self.frame)]

    def add_tokens(self, tokens: Float[Array, "g k d"]) -> list[int]:
        """Registers groups of tokens; how each head reads their weights is worked out once."""
        first = len(self.groups)
        self.groups.extend(tokens)
        self.readers.extend(self.weight_readers(group) for group in tokens)
        return list(range(first, len(self.groups)))

    def weight_readers(self, tokens: Float[Array, "k d"]) -> list[Array]:
        return [np.linalg.pinv(tokens @ part) for part in self.ins]

    def soft(self, query: Array, group: int, length: float, purpose: str) -> Block:
        """Asks one soft question, with shorter tokens where a weight is lost in rounding."""
        for _ in range(TRIES):
            sequence = np.concatenate([query + length * self.groups[group], query[None]])[None]
            block = Block(query, group, length, self.ask(sequence, purpose)[0])
            peak = float(np.abs(self.log_odds(block)).max())
            if np.isfinite(peak):
                self.peaks.append(max(peak / length, 1e-300))
                return block
            length *= 0.25
        raise IllConditioned("soft questions saturate at every length")

    def log_odds(self, block: Block) -> Float[Array, "h k"]:
        """Scores of the tokens relative to the query, for every head; NaN where a weight is not
        positive."""
        left = (block.answer - block.query @ self.total) @ self.reader
        parts = np.split(left, self.cuts)
        readers = self.readers[block.group]
        weights = np.stack([p @ r for p, r in zip(parts, readers, strict=True)]) / block.length
        rest = 1.0 - weights.sum(axis=1, keepdims=True)
        if not ((rest > 0).all() and (weights > 0).all()):
            return np.full(weights.shape, np.nan)
        return np.asarray(np.log(weights / rest))

    def wide_columns(self) -> None:
        """Queries with enough tokens to see all of p_h = W_h x + c_h, until the rank is known."""
        groups = self.covering
        block = self.soft(self.queries[1], groups[0], self.length, "columns")
        for _ in range(TRIES):
            peak = float(np.abs(self.log_odds(block)).max())
            if WEAKEST <= peak <= STRONGEST:
                break
            self.length = block.length * PEAK / max(peak, 1e-9)
            block = self.soft(self.queries[1], groups[0], self.length, "columns")
        self.length, self.peaks = block.length, self.peaks[-1:]
        order = [1, 0, *range(2, len(self.queries))]
        self.queries = [self.queries[i] for i in order]
        goal = max(self.ranks) + max(1, max(self.ranks) // SPARE)
        goal = min(goal, len(self.queries))
        done = 0
        while True:
            for query in self.queries[done:goal]:
                column = [block] if done == 0 and not self.blocks else []
                column += [
                    self.soft(query, group, self.reach(), "columns")
                    for group in groups[len(column) :]
                ]
                self.blocks.append(column)
            self.wide = done = goal
            keys = self.wide_keys()
            self.score_ranks = [self.score_rank(part) for part in keys]
            if goal >= len(self.queries) or max(self.score_ranks) < goal:
                break
            goal = min(goal + max(2, goal // 4), len(self.queries))

    def reach(self) -> float:
        """Token length that should bring the largest log-odds to PEAK."""
        return PEAK / float(np.quantile(self.peaks[-64:], 0.9))

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

    def score_rank(self, keys: Float[Array, "d n"]) -> int:
        sizes = np.linalg.svd(keys, compute_uv=False)
        noise = self.ask.unit * self.condition * float(sizes[0]) * 1e2
        return max(1, numerical_rank(sizes, noise))

    def narrow_columns(self) -> None:
        """The remaining queries: tokens that see the range of every score suffice."""
        rest = self.queries[self.wide :]
        if not rest:
            return
        keys = self.wide_keys()
        ranges = [
            np.linalg.svd(part, full_matrices=False)[0][:, :rank]
            for part, rank in zip(keys, self.score_ranks, strict=True)
        ]
        groups = -(-max(self.score_ranks) // self.count)
        tokens = spread_tokens(self.bases + ranges, self.count, groups, self.rng).T
        parts = self.add_tokens(tokens.reshape(groups, self.count, self.width))
        for query in rest:
            self.blocks.append([self.soft(query, p, self.reach(), "columns") for p in parts])

    # --- from answers to parameters -----------------------------------------------------------

    def replica(self, rng: np.random.Generator) -> "Vector":
        """The same attempt with every answer perturbed by its rounding error."""
        other = copy(self)
        loud = float(np.sqrt(sum(np.linalg.norm(a) ** 2 for a in self.ins) / self.width))
        level = self.ask.unit * loud

        def noisy(answers: Array, size: float) -> Array:
            noise = np.hypot(level * size, self.ask.additive)
            return np.asarray(answers + noise * rng.standard_normal(answers.shape))

        values = self.values
        moved = [noisy(m, 1.0 / REACH) for m in values.moved]
        singles = noisy(values.singles, np.sqrt(self.width))
        other.read(Values(values.frame, singles, moved, values.noise))
        other.readers = [other.weight_readers(group) for group in self.groups]
        other.blocks = [
            [
                Block(
                    b.query,
                    b.group,
                    b.length,
                    noisy(b.answer, float(np.linalg.norm(b.query)) + b.length),
                )
                for b in column
            ]
            for column in self.blocks
        ]
        return other

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
        design = np.stack([column[0].query for column in self.blocks], axis=1)
        design = np.vstack([design, np.ones(design.shape[1])])
        maps = np.linalg.solve(design.T, keys.transpose(0, 2, 1)).transpose(0, 2, 1)
        return maps[:, :, : self.width], maps[:, :, self.width]


def numerical_rank(sizes: Float[Array, " n"], noise: float) -> int:
    """Where a spectrum ends: at a gap, or where it drowns in rounding."""
    above = int((sizes > FLOOR * noise * np.sqrt(len(sizes))).sum())
    for k in range(1, len(sizes)):
        if sizes[k] < GAP * sizes[k - 1] and sizes[k] < 1e-5 * sizes[0]:
            return min(k, max(above, 1))
    return max(above, 1)
