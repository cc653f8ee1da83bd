"""The score matrix of a Transformer layer with a known network, entry by entry.

Probe p_i and anchor w_j are orthonormal; entry (i, j) is p_i . score w_j. The question
[x + u ; x] with u = ±length p_i, x = ±size w_j measures it, and lengths, sizes and signs are free:
for each entry those are chosen where the known network is steepest and the log-odds about one.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import NotIdentifiable
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle
from keyhole.oracles.questions import Questions
from keyhole.probes.input_region import InputRegion
from keyhole.probes.segments import read_weights, steepness

SIZES = (0.3, 1.0, 3.0)  # of an anchor, in typical lengths of an input
LENGTHS = (0.2, 0.7, 2.0, 6.0)  # of a probe
SIGNS = (-1.0, 1.0)
HARD = 5.0  # log-odds beyond this are measured again with a shorter probe
GROWTH = 10.0  # of the supposed size of the score, where a first answer is saturated
FAINT = 0.02  # log-odds below this say that the score is smaller than supposed
FIRST = 4  # entries measured before the size of the score is settled
CALIBRATIONS = 12  # rounds of looking for the size of the score
REPEATS = 6  # rounds of measuring entries again
ZERO_BIAS = 30.0  # a key bias is zero if its log-odds are this many errors from zero at most


@dataclass(frozen=True, eq=False)
class ScoreSegments:
    """`exactness` is the error of the known network, in units of its answers."""

    oracle: Oracle
    network: ReluNetwork
    region: InputRegion
    probes: Float[Array, "d d"]
    anchors: Float[Array, "d d"]
    exactness: float

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
        spread = np.sqrt((self.probes.T**2) @ error**2 @ self.anchors**2)
        return self.probes.T @ table @ self.anchors, spread

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
                return table, error, max(found, 0.3 * size)
            if hard.any():
                i, j = i[hard], j[hard]
                size *= GROWTH
            else:
                i, j = i[:1], j[:1]
                size /= GROWTH
        return table, error, size

    def key_bias(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """One question whether there is a key bias, and one per entry if so."""
        width = self.network.width
        direction = rng.standard_normal(width)
        direction /= np.linalg.norm(direction)
        zero = np.zeros((1, width))
        odds, error, length = self.odds(zero, direction[None], np.full(1, 1e-9))
        if abs(odds[0]) <= ZERO_BIAS * error[0]:
            return np.zeros(width), np.zeros(width)
        size = abs(odds[0]) / length[0]
        values, spread = np.zeros(width), np.zeros(width)
        left, sizes = np.arange(width), np.full(width, size)
        for _ in range(REPEATS):
            odds, error, length = self.odds(
                np.zeros((len(left), width)), self.probes[left], sizes[left]
            )
            values[left], spread[left] = odds / length, error / np.abs(length)
            hard = np.abs(odds) > HARD
            sizes[left[hard]] *= GROWTH
            left = left[hard]
            if len(left) == 0:
                break
        return self.probes.T @ values, np.sqrt(self.probes.T**2 @ spread**2)

    def entries(
        self, rows: Int[Array, " n"], columns: Int[Array, " n"], sizes: Array, key_bias: Array
    ) -> tuple[Array, Array, Array]:
        """Entries of the table, their errors, and which have log-odds too large to trust."""
        typical = self.region.scale * np.sqrt(self.network.width)
        value, spread = np.zeros(len(rows)), np.zeros(len(rows))
        start, step, product = self.chosen(
            [sign * size * typical * self.anchors[columns] for size in SIZES for sign in SIGNS],
            [sign * size * typical for size in SIZES for sign in SIGNS],
            self.probes[rows],
            sizes,
        )
        odds, error = self.measured(start, step)
        odds = odds - step @ key_bias
        value, spread = odds / product, error / np.abs(product)
        return value, spread, np.abs(odds) > HARD

    def odds(
        self, start: Array, directions: Array, sizes: Array
    ) -> tuple[Array, Array, Float[Array, " n"]]:
        """Log-odds along the best segment in the given directions from fixed points."""
        begin, step, length = self.chosen([start], [1.0], directions, sizes)
        odds, error = self.measured(begin, step)
        return odds, error, length

    def chosen(
        self, starts: list[Array], factors: list[float], directions: Array, sizes: Array
    ) -> tuple[Array, Array, Array]:
        """For each direction the start and step that measure best, and the product of their
        signed lengths."""
        typical = self.region.scale * np.sqrt(self.network.width)
        best = np.zeros(len(directions))
        begin, step = np.zeros_like(directions), np.zeros_like(directions)
        product = np.ones(len(directions))
        for start, factor in zip(starts, factors, strict=True):
            for length in (sign * size * typical for size in LENGTHS for sign in SIGNS):
                move = length * directions
                figure = np.abs(length * factor) * steepness(self.network, start, move)
                figure *= np.exp(-np.maximum(0.0, np.abs(length * factor) * sizes - 1.0))
                figure *= self.region.holds(start) & self.region.holds(start + move)
                better = figure > best
                best = np.where(better, figure, best)
                begin[better], step[better] = start[better], move[better]
                product[better] = length * factor
        if not best.all():
            raise NotIdentifiable(
                "the network does not change along any segment that was tried, so the answers "
                "say nothing about the attention in front of it"
            )
        return begin, step, product

    def measured(self, start: Array, step: Array) -> tuple[Array, Array]:
        """Log-odds of the first token in [start + step ; start], and their errors."""
        tokens = np.stack([start + step, start], axis=1)
        raw = self.oracle.ask(Questions.of(tokens, "score"))
        answers = raw.astype(np.float64).reshape(len(tokens), -1)
        reading = read_weights(self.network, start, step, answers)
        off = self.exactness / np.maximum(reading.slope, 1e-300)
        weight = np.clip(reading.weight, 1e-16, 1 - 1e-16)
        odds = np.log(weight) - np.log1p(-weight)
        return odds, off / (weight * (1 - weight))
