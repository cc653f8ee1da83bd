"""Positions that add to the scores: linear biases (ALiBi), tables and buckets (T5), windows.

Statement.  s_h(D) = x . (W_h y + c_h) + b_h(D), b_h(0) = 0, is recovered from about 2d + H soft
            queries behind the value maps and one query per r distances of the table.
Queries.    At r + r/8 anchors tokens next to each other cover all directions (d / r queries each,
            one more at the first, which tells b_h(1 ... r)); one query at each of the others; then
            blocks of r further distances, nearer places filled with copies of the anchor. A table
            that is zero so far is asked at r distances more, spread over the decades.
Algebra.    Log-ratios minus the table are linear in the key W_h y + c_h. The keys of the first
            anchors span the range of the scores, so that r numbers tell the others. The sum L over
            the copies is known from the part of the table that is known already.
When it fails.  Distances that cannot be asked are not known: a table that is linear, or constant
            at its end, is taken to stay so, which fresh sequences longer than it check.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from keyhole.arrays import Array, Float, Int
from keyhole.learners.base import Inconclusive, Refuted
from keyhole.learners.positions.forward import Answered
from keyhole.learners.positions.soft import NEGATIVE, Reader, Saturated
from keyhole.learners.positions.values import ValueMaps
from keyhole.linalg.token_frames import spread_tokens
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import REJECTION

HALVINGS = 12  # times that tokens come nearer to each other until no weight vanishes
NO_WEIGHT = 1e-6  # what places may add to a score without changing any weight to speak of


@dataclass(frozen=True, eq=False)
class Additive:
    """Scores [W | c] (heads, d, d + 1) and the table of the distances, or slopes."""

    scores: Float[Array, "heads d e"]
    table: Float[Array, "heads n"]  # of distances 0 ... n - 1, the first is zero
    error: float  # standard error of a log-ratio
    answered: tuple[Answered, ...] = ()  # the queries

    @property
    def flat(self) -> bool:
        """Whether places add nothing that is seen."""
        return bool(np.abs(self.table).max() <= self.unseen)

    @property
    def unseen(self) -> float:
        """Size of table entries that are none."""
        return max(NO_WEIGHT, REJECTION * self.error)

    @property
    def slopes(self) -> Float[Array, " heads"] | None:
        """What is subtracted per place, where every table is a line."""
        distances = np.arange(self.table.shape[1])
        slopes = -(self.table @ distances) / (distances @ distances)
        off = np.abs(self.table + slopes[:, None] * distances).max()
        linear = NO_WEIGHT * np.abs(self.table).max()
        return slopes if off <= max(linear, REJECTION * self.error) else None


def learn_additive(
    ask: Asker,
    rng: np.random.Generator,
    values: ValueMaps,
    longest: int | None,
    flat: bool = False,
) -> Additive | Refuted | Inconclusive:
    """Scores and table; `longest` is the longest sequence that may be asked. Where the table is
    claimed to be flat no more of it is asked than comes with the scores."""
    reader = Reader(ask, values)
    rank = min(values.ranks)
    if (longest or np.inf) < rank + 1:
        return Inconclusive("sequences are too short for as many tokens as a head has dimensions")
    size, negative = reader.first_size, True
    for _ in range(HALVINGS):
        try:
            scores, near, error = measure_scores(reader, rng, size)
            break
        except Saturated as seen:
            size, negative = 0.5 * size, negative and seen.negative
    else:
        if negative:
            return Refuted(NEGATIVE)
        return Inconclusive("no tokens are so near to the anchors that every weight shows")
    table = np.column_stack([np.zeros(values.heads), near])
    found = Additive(scores, table, error, tuple(reader.answered))
    if flat or (found.slopes is not None and not found.flat):
        return found
    asked = 136  # distances of the table that are asked one by one
    reach = min(asked, (longest or asked + 1) - 1)
    if found.flat and reach > 2 * rank:
        spread = np.unique(np.geomspace(rank + 1, reach, rank).astype(int))
        zeros = np.zeros((values.heads, reach + 1 - len(spread)))
        block = measure_block(reader, rng, scores, zeros, spread, size)
        far = 1e2  # standard error of a weight among so many copies, in that of near tokens
        if (
            not isinstance(block, Refuted | Inconclusive)
            and np.abs(block).max() <= far * found.unseen
        ):
            return found
    while table.shape[1] <= reach:
        start = table.shape[1]
        distances = np.arange(start, min(start + rank, reach + 1))
        block = measure_block(reader, rng, scores, table, distances, size)
        if isinstance(block, Refuted | Inconclusive):
            return block
        table = np.column_stack([table, block])
    return Additive(scores, table, error, tuple(reader.answered))


def measure_scores(
    reader: Reader, rng: np.random.Generator, size: float
) -> tuple[Float[Array, "heads d e"], Float[Array, "heads r"], float]:
    """[W | c], b(1 ... r), and the standard error of a log-ratio."""
    values, width = reader.values, reader.ask.width
    heads, rank = values.heads, min(values.ranks)
    bases = [np.linalg.qr(ins)[0] for ins in values.ins]
    blocks = -(-width // rank)
    frame = size * spread_tokens(bases, rank, blocks, rng).T
    parts = frame.reshape(blocks, rank, width)
    distances = np.arange(1, rank + 1)
    full = min(width + 1, rank + max(1, rank // 8))
    anchors = np.zeros((width + 1, width))
    anchor = 0.5  # entries of the anchors
    anchors[1:] = (
        min(size, 1.0)
        * anchor
        * np.sqrt(width)
        * np.linalg.qr(rng.standard_normal((width, width)))[0]
    )
    keys = np.zeros((heads, width + 1, width))
    near = np.zeros((heads, rank))
    error = 0.0
    for n in range(full):
        tokens = anchors[n] + (np.concatenate([parts, -parts[:1]]) if n == 0 else parts)
        found = reader.log_ratios(anchors[n], None, tokens, distances)
        ratios = found.ratios
        error = max(error, float(np.median(found.errors)))
        if n == 0:
            near = 0.5 * (ratios[0] + ratios[-1])
            ratios = ratios[:-1]
        along = (ratios - near).transpose(1, 0, 2).reshape(heads, -1)
        keys[:, n] = np.linalg.lstsq(frame, along.T, rcond=None)[0].T
    ranges = [np.linalg.svd(keys[h, :full])[2][:rank].T for h in range(heads)]
    few = size * spread_tokens([*bases, *ranges], rank, 1, rng).T
    for n in range(full, width + 1):
        ratios = reader.log_ratios(anchors[n], None, anchors[n] + few[None], distances).ratios[0]
        for h in range(heads):
            inside = np.linalg.solve(few @ ranges[h], ratios[h] - near[h])
            keys[h, n] = ranges[h] @ inside
    places = np.column_stack([anchors, np.ones(width + 1)])
    scores = np.stack([np.linalg.solve(places, keys[h]).T for h in range(heads)])
    return scores, near, error


def measure_block(
    reader: Reader,
    rng: np.random.Generator,
    scores: Float[Array, "heads d e"],
    table: Float[Array, "heads n"],
    distances: Int[Array, " m"],
    size: float,
) -> Float[Array, "heads m"] | Refuted | Inconclusive:
    """The table at further distances, all nearer places filled with copies of the anchor."""
    values, width = reader.values, reader.ask.width
    bases = [np.linalg.qr(ins)[0] for ins in values.ins]
    steps = size * spread_tokens(bases, len(distances), 1, rng).T[: len(distances)]
    anchor, negative = np.zeros(width), True
    for _ in range(HALVINGS):
        try:
            ratios = reader.log_ratios(anchor, values.offset, (anchor + steps)[None], distances)
            break
        except Saturated as seen:
            steps = steps * 1.5  # far tokens must be preferred to be seen
            negative = negative and seen.negative
    else:
        if negative:
            return Refuted(NEGATIVE)
        return Inconclusive("no tokens are so strong that their weights show at every distance")
    keys = scores[:, :, -1]
    copies = logsumexp(table, axis=1)
    return np.asarray(ratios.ratios[0] - keys @ steps.T + copies[:, None])
