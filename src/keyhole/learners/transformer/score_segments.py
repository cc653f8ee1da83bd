"""The score matrix of a Transformer layer with a known network, entry by entry.

Probe p_i and anchor w_j are orthonormal; entry (i, j) is p_i . score w_j. The query
[x + u ; x] with u = ±length p_i, x = ±size w_j measures it, and lengths, sizes and signs are free:
for each entry those are chosen where the known network is steepest and the log-odds about one.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import NotIdentifiable
from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.transformer.segments import Lifted, gradients_at, read_weights, steepness
from keyhole.linalg.bases import equal_overlap, random_rotation
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import QueryBatch

SIZES = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)  # of an anchor, in typical lengths of an input
LENGTHS = (0.004, 0.02, 0.1, 0.3, 0.7, 1.5, 3.0, 6.0)  # of a probe
SIGNS = (-1.0, 1.0)
EASY, HARDENING = 1.2, 5  # log-odds beyond the first spoil a segment, with this power
HARD = 7.0  # log-odds beyond this are measured again with a shorter probe
FLAT = 0.03  # speed at the answer, relative to the mean along the segment, that tells nothing
GROWTH = 10.0  # of the supposed size of the score, where a first answer is saturated
EDGE = 1e-16  # weights are kept this far inside (0, 1) before their logarithm is taken
FAINT = 0.02  # log-odds below this say that the score is smaller than supposed
FIRST = 6  # entries measured before the size of the score is settled
LEAST = 0.3  # of the supposed size that a few small entries make of it
INFLATED = 1.2  # size of the score after a few entries, times this: they may all be small
CALIBRATIONS = 12  # rounds of looking for the size of the score
DIRECTIONS = 40  # tried for the query whether there is a key bias
REPEATS = 6  # rounds of measuring entries again
ZERO_BIAS = 30.0  # a key bias is zero if its log-odds are this many errors from zero at most
FLAT_NETWORK = (
    "the network does not change along any segment that was tried, so the answers say nothing "
    "about the attention in front of it"
)


@dataclass(frozen=True, eq=False)
class ScoreSegments:
    """`exactness` is the error of the known network, in units of its answers."""

    oracle: Oracle
    network: ReluNetwork
    region: InputRegion
    probes: Float[Array, "bases d d"]  # a basis for each anchor, and one for zero
    anchors: Float[Array, "d d"]
    exactness: float

    @classmethod
    def design(
        cls,
        oracle: Oracle,
        network: ReluNetwork,
        region: InputRegion,
        exactness: float,
        rng: np.random.Generator,
    ) -> "ScoreSegments":
        """Random anchors, each with probes that overlap equally with the gradient there: none of
        them runs along a level set of the network."""
        anchors = random_rotation(rng, network.width)
        typical = region.scale * np.sqrt(network.width)
        probes = []
        for anchor in [*anchors, np.zeros(network.width)]:
            around = np.outer(np.array(SIGNS) * typical, anchor) + region.centre
            slopes = gradients_at(network, around)
            steepest = slopes[int(np.argmax(np.linalg.norm(slopes, axis=(1, 2))))]
            direction = np.linalg.svd(steepest, full_matrices=False)[0][:, :1]
            probes.append(equal_overlap(rng, direction).rows(np.arange(network.width)))
        return cls(oracle, network, region, np.stack(probes), anchors, exactness)

    def score(self, key_bias: Float[Array, " d"]) -> tuple[Array, Array]:
        """The matrix and its standard errors."""
        width = self.network.width
        rows, columns = (part.ravel() for part in np.indices((width, width)))
        table, error, size = self.first_entries(key_bias)
        open_entries = np.flatnonzero(~np.isfinite(table.ravel()))
        sizes = np.full(width * width, size)
        for _ in range(REPEATS):
            if len(open_entries) == 0:
                break
            i, j = rows[open_entries], columns[open_entries]
            value, spread, hard = self.entries(i, j, sizes[open_entries], key_bias)
            table[i, j], error[i, j] = value, spread
            sizes[open_entries[hard]] = np.maximum(
                2 * np.abs(value[hard]), GROWTH * sizes[open_entries[hard]]
            )
            open_entries = open_entries[hard]
        columns_of = np.einsum("jid,ij->dj", self.probes[:-1], table)
        spread = np.einsum("jid,ij->dj", self.probes[:-1] ** 2, error**2)
        return columns_of @ self.anchors, np.sqrt(spread @ self.anchors**2)

    def first_entries(self, key_bias: Array) -> tuple[Array, Array, float]:
        """A few entries, until the size of the score is known."""
        width = self.network.width
        table, error = np.full((width, width), np.nan), np.zeros((width, width))
        i = np.arange(min(width, FIRST))
        j = (i + 1) % width
        size = 1 / np.sqrt(width)
        for _ in range(CALIBRATIONS):
            value, spread, hard = self.entries(i, j, np.full(len(i), size), key_bias)
            table[i, j] = np.where(hard, np.nan, value)
            error[i, j] = spread
            found = float(np.sqrt(np.mean(value**2)))
            if not hard.any() and found > FAINT * size:
                return table, error, INFLATED * max(found, LEAST * size)
            if hard.any():
                i, j = i[hard], j[hard]
                size *= GROWTH
            else:
                i, j = i[:1], j[:1]
                size /= GROWTH
        return table, error, size

    def key_bias(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """One query whether there is a key bias, and one per entry if so."""
        width = self.network.width
        odds, error, hard, length = self.odds_anywhere(rng)
        if abs(odds[0]) <= ZERO_BIAS * error[0] and not hard[0]:
            return np.zeros(width), np.zeros(width)
        size, basis = 2 * abs(odds[0] / length[0]), self.probes[-1]
        values, spread = np.zeros(width), np.zeros(width)
        left, sizes = np.arange(width), np.full(width, size)
        for _ in range(REPEATS):
            odds, error, hard, length = self.odds(basis[left], sizes[left])
            values[left], spread[left] = odds / length, error / np.abs(length)
            sizes[left[hard]] *= GROWTH
            left = left[hard]
            if len(left) == 0:
                break
        return basis.T @ values, np.sqrt(basis.T**2 @ spread**2)

    def entries(
        self, rows: Int[Array, " n"], columns: Int[Array, " n"], sizes: Array, key_bias: Array
    ) -> tuple[Array, Array, Array]:
        """Entries of the table, their errors, and which have log-odds too large to trust."""
        directions = self.probes[columns, rows]
        start, step, product = self.chosen(
            self.anchors[columns], directions, sizes, np.abs(directions @ key_bias)
        )
        odds, error, hard = self.measured(start, step)
        return (odds - step @ key_bias) / product, error / np.abs(product), hard

    def odds_anywhere(self, rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
        """Log-odds of one random probe against zero, along which the network changes."""
        for _ in range(DIRECTIONS):
            direction = rng.standard_normal(self.network.width)
            direction /= np.linalg.norm(direction)
            try:
                return self.odds(direction[None], np.zeros(1))
            except NotIdentifiable:
                continue  # a level set, or a path that turns back: nothing was asked yet
        raise NotIdentifiable(FLAT_NETWORK)

    def odds(
        self, directions: Float[Array, "n d"], sizes: Array
    ) -> tuple[Array, Array, Array, Float[Array, " n"]]:
        """Log-odds along the best segments in the given directions from zero."""
        start, step, length = self.chosen(None, directions, sizes, np.zeros(len(sizes)))
        return *self.measured(start, step), length

    def chosen(
        self, anchors: Array | None, directions: Array, sizes: Array, shifts: Array
    ) -> tuple[Array, Array, Array]:
        """For each anchor (zero if there are none) and direction the start and step that measure
        best, and the product of their signed lengths. Log-odds are expected to be `sizes` per
        product plus `shifts` per length of the step."""
        typical = self.region.scale * np.sqrt(self.network.width)
        begin = np.zeros_like(directions) if anchors is None else anchors
        lifted = Lifted.of(self.network, begin), Lifted.of(self.network, directions)
        best, at, by = (np.zeros(len(directions)) for _ in range(3))
        places = [1.0] if anchors is None else [g * z * typical for z in SIZES for g in SIGNS]
        for place in places:
            for length in (sign * size * typical for size in LENGTHS for sign in SIGNS):
                odds = np.abs(length * place) * sizes + np.abs(length) * shifts
                figure = np.abs(length * place) / (1 + (odds / EASY) ** HARDENING)
                figure *= steepness(self.network, lifted[0], place, lifted[1], length)
                if not self.region.unbounded:
                    figure *= self.region.holds(place * begin)
                    figure *= self.region.holds(place * begin + length * directions)
                better = figure > best
                best = np.where(better, figure, best)
                at, by = np.where(better, place, at), np.where(better, length, by)
        if not best.all():
            raise NotIdentifiable(FLAT_NETWORK)
        return at[:, None] * begin, by[:, None] * directions, at * by

    def measured(self, start: Array, step: Array) -> tuple[Array, Array, Array]:
        """Log-odds of the first token in [start + step ; start], their errors, and which of them
        lie where the segment says little."""
        tokens = np.stack([start + step, start], axis=1)
        raw = self.oracle.ask(QueryBatch.of(tokens, "score"))
        answers = raw.astype(np.float64).reshape(len(tokens), -1)
        reading = read_weights(self.network, start, step, answers)
        off = self.exactness / np.maximum(reading.slope, TINY)
        weight = np.clip(reading.weight, EDGE, 1 - EDGE)
        odds = np.log(weight) - np.log1p(-weight)
        whole = self.network(start + step) - self.network(start)
        flat = reading.slope < FLAT * np.linalg.norm(whole.reshape(len(start), -1), axis=1)
        return odds, off / (weight * (1 - weight)), flat | (np.abs(odds) > HARD)
