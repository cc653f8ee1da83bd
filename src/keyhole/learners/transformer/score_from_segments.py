"""Score and key bias of a Transformer layer whose network is known, one query per number.

Statement.  The score matrix is measured entry by entry, the key bias too if there is one.
Queries.    X = [x + u ; x] makes the network see x + a u, where a = sigmoid(u . (score x +
            key_bias)): the x-on-x score cancels. Anchors x = ±size w_j are orthonormal up to their
            sizes; each has probes u = ±length p_i, orthonormal and with equal overlap with the
            network's gradient there, so that none of them runs along a level set.
Algebra.    Along the segment from x to x + u the network is a known polyline, so the answer tells
            a, and logit(a) / (size length) is one entry p_i . score w_j. Sizes, lengths and signs
            are free: for each entry those are chosen where the polyline is steepest, does not turn
            back, and log-odds are about one. Entries with large log-odds, or read where the
            polyline is flat, are measured again with a shorter probe.
Fails.      A network that does not change along any segment hides the score (NotIdentifiable).
Source.     Ours; compare Section 4 of Bhattamishra, Shah, Hahn, Kanade (2026), two queries each.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import NotIdentifiable
from keyhole.learners.mlp import InputRegion
from keyhole.linalg.bases import equal_overlap, random_rotation
from keyhole.linalg.softmax import logit_with_error
from keyhole.measurement.asker import Asker
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle

SIGNS = (-1.0, 1.0)
FLAT_NETWORK = (
    "the network does not change along any segment that was tried, so the answers say nothing "
    "about the attention in front of it"
)


@dataclass(frozen=True)
class SegmentOptions:
    """How segments are chosen and when an entry is measured again."""

    sizes: tuple[float, ...] = (0.05, 0.2, 0.5, 1.0, 2.0, 4.0)
    """Lengths of an anchor that are tried, in typical lengths of an input."""
    lengths: tuple[float, ...] = (0.004, 0.02, 0.1, 0.3, 0.7, 1.5, 3.0, 6.0)
    """Lengths of a probe that are tried, likewise."""
    wanted_log_odds: float = 1.2
    """Log-odds from which on a segment is worth less and less."""
    largest_log_odds: float = 7.0
    """Log-odds beyond which an entry is measured again with a shorter probe."""
    flat: float = 0.03
    """Speed at the answer, relative to the mean along the segment, that tells nothing."""
    growth: float = 10.0
    """Factor by which the supposed size of the score changes where an answer is saturated."""
    first_entries: int = 6
    """Entries measured before the size of the score is settled."""
    rounds: int = 12
    """Rounds of looking for the size of the score; half as many of measuring entries again."""
    zero_bias: float = 30.0
    """Standard errors within which the log-odds of a key bias count as zero."""


class ScoreEstimate(NamedTuple):
    """Score and key bias with their standard errors."""

    score: Float[Array, "d d"]
    score_error: Float[Array, "d d"]
    key_bias: Float[Array, " d"]
    key_bias_error: Float[Array, " d"]


class Segments(NamedTuple):
    """Segments from `start` to `start + step`; `product` is the signed length of the step times
    that of the start (of the step alone where segments start at zero)."""

    start: Float[Array, "n d"]
    step: Float[Array, "n d"]
    product: Float[Array, " n"]


class SegmentOdds(NamedTuple):
    """Log-odds of the first token, their standard errors, and which must be measured again."""

    value: Float[Array, " n"]
    error: Float[Array, " n"]
    doubtful: Array


def learn_score(
    oracle: Oracle,
    network: ReluNetwork,
    region: InputRegion,
    exactness: float,
    rng: np.random.Generator,
    options: SegmentOptions | None = None,
) -> ScoreEstimate:
    """Score and key bias. `exactness` is the error of the known network and of an answer."""
    anchors, probes = design_probes(network, region, rng)
    work = SegmentProbe(Asker(oracle), network, region, exactness, options or SegmentOptions())
    key_bias, bias_error = measure_key_bias(work, probes[-1], rng)
    score, error = measure_score(work, anchors, probes[:-1], key_bias)
    return ScoreEstimate(score, error, key_bias, bias_error)


def design_probes(
    network: ReluNetwork, region: InputRegion, rng: np.random.Generator
) -> tuple[Float[Array, "d d"], Float[Array, "bases d d"]]:
    """Random anchors, and a basis of probes for each of them and for zero."""
    anchors = random_rotation(rng, network.width)
    probes = []
    for anchor in [*anchors, np.zeros(network.width)]:
        around = np.outer(np.array(SIGNS) * region.size, anchor) + region.centre
        slopes = gradients_at(network, around)
        steepest = slopes[int(np.argmax(np.linalg.norm(slopes, axis=(1, 2))))]
        direction = np.linalg.svd(steepest, full_matrices=False)[0][:, :1]
        probes.append(equal_overlap(rng, direction).rows(np.arange(network.width)))
    return anchors, np.stack(probes)


def measure_key_bias(
    work: "SegmentProbe", basis: Float[Array, "d d"], rng: np.random.Generator
) -> tuple[Array, Array]:
    """One query whether there is a key bias, and one per entry if so."""
    width, options = len(basis), work.options
    (odds, error, doubtful), length = work.probe_anywhere(rng)
    if abs(odds[0]) <= options.zero_bias * error[0] and not doubtful[0]:
        return np.zeros(width), np.zeros(width)
    values, spread = np.zeros(width), np.zeros(width)
    left, sizes = np.arange(width), np.full(width, 2 * abs(odds[0] / length[0]))
    for _ in range(options.rounds // 2):
        (odds, error, doubtful), length = work.probe_from_zero(basis[left], sizes[left])
        values[left], spread[left] = odds / length, error / np.abs(length)
        sizes[left[doubtful]] *= options.growth
        left = left[doubtful]
        if len(left) == 0:
            break
    return basis.T @ values, np.sqrt(basis.T**2 @ spread**2)


def measure_score(
    work: "SegmentProbe",
    anchors: Float[Array, "d d"],
    probes: Float[Array, "d d d"],
    key_bias: Float[Array, " d"],
) -> tuple[Array, Array]:
    """The score and its standard errors, from all entries p_i . score w_j."""
    width = len(anchors)
    rows, columns = (part.ravel() for part in np.indices((width, width)))
    table, error, size = measure_first_entries(work, anchors, probes, key_bias)
    left = np.flatnonzero(~np.isfinite(table.ravel()))
    sizes = np.full(width * width, size)
    for _ in range(work.options.rounds // 2):
        if len(left) == 0:
            break
        i, j = rows[left], columns[left]
        value, spread, doubtful = work.probe_entries(
            anchors[j], probes[j, i], sizes[left], key_bias
        )
        table[i, j], error[i, j] = value, spread
        sizes[left[doubtful]] = np.maximum(
            2 * np.abs(value[doubtful]), work.options.growth * sizes[left[doubtful]]
        )
        left = left[doubtful]
    keys = np.einsum("jid,ij->dj", probes, table)
    spread = np.einsum("jid,ij->dj", probes**2, error**2)
    return keys @ anchors, np.sqrt(spread @ anchors**2)


def measure_first_entries(
    work: "SegmentProbe", anchors: Array, probes: Array, key_bias: Array
) -> tuple[Array, Array, float]:
    """A few entries, until the size of the score is known."""
    width, options = len(anchors), work.options
    table, error = np.full((width, width), np.nan), np.zeros((width, width))
    i: Int[Array, " n"] = np.arange(min(width, options.first_entries))
    j = (i + 1) % width
    size = 1 / np.sqrt(width)
    for _ in range(options.rounds):
        value, spread, doubtful = work.probe_entries(
            anchors[j], probes[j, i], np.full(len(i), size), key_bias
        )
        table[i, j] = np.where(doubtful, np.nan, value)
        error[i, j] = spread
        found = float(np.sqrt(np.mean(value**2)))
        if not doubtful.any() and found > 0.02 * size:
            # a few entries may all be small: the rest is expected to be a little larger
            return table, error, 1.2 * max(found, 0.3 * size)
        if doubtful.any():
            i, j = i[doubtful], j[doubtful]
            size *= options.growth
        else:  # log-odds this faint say that the score is smaller than supposed
            i, j = i[:1], j[:1]
            size /= options.growth
    return table, error, size


@dataclass(frozen=True, eq=False)
class SegmentProbe:
    """Queries [x + u ; x] to a layer with a known network. `exactness` is the error of the
    network and of an answer, in units of the answers."""

    ask: Asker
    network: ReluNetwork
    region: InputRegion
    exactness: float
    options: SegmentOptions = field(default_factory=SegmentOptions)

    def probe_entries(
        self,
        anchors: Float[Array, "n d"],
        directions: Float[Array, "n d"],
        sizes: Array,
        bias: Array,
    ) -> SegmentOdds:
        """Entries direction . score anchor, supposed to be of the given sizes."""
        segments = self.choose_segments(anchors, directions, sizes, np.abs(directions @ bias))
        odds, error, doubtful = self.read_log_odds(segments)
        value = (odds - segments.step @ bias) / segments.product
        return SegmentOdds(value, error / np.abs(segments.product), doubtful)

    def probe_anywhere(self, rng: np.random.Generator) -> tuple[SegmentOdds, Float[Array, " n"]]:
        """Log-odds of one random probe against zero, along which the network changes."""
        for _ in range(40):  # a random direction is a level set, or turns back, once in a while
            direction = rng.standard_normal(self.network.width)
            direction /= np.linalg.norm(direction)
            try:
                return self.probe_from_zero(direction[None], np.zeros(1))
            except NotIdentifiable:
                continue  # nothing was asked yet
        raise NotIdentifiable(FLAT_NETWORK)

    def probe_from_zero(
        self, directions: Float[Array, "n d"], sizes: Array
    ) -> tuple[SegmentOdds, Float[Array, " n"]]:
        """Log-odds along the best segments from zero in the given directions, and their lengths."""
        segments = self.choose_segments(None, directions, sizes, np.zeros(len(sizes)))
        return self.read_log_odds(segments), segments.product

    def choose_segments(
        self, anchors: Array | None, directions: Array, sizes: Array, shifts: Array
    ) -> Segments:
        """For each anchor (zero if there are none) and direction the segment that measures best.
        Log-odds are expected to be `sizes` per product plus `shifts` per length of the step."""
        options, typical = self.options, self.region.size
        begin = np.zeros_like(directions) if anchors is None else anchors
        lifted = Lifted.of(self.network, begin), Lifted.of(self.network, directions)
        best, at, by = (np.zeros(len(directions)) for _ in range(3))
        places = [1.0]
        if anchors is not None:
            places = [sign * size * typical for size in options.sizes for sign in SIGNS]
        for place in places:
            for length in (sign * each * typical for each in options.lengths for sign in SIGNS):
                odds = np.abs(length * place) * sizes + np.abs(length) * shifts
                figure = np.abs(length * place) / (1 + (odds / options.wanted_log_odds) ** 5)
                figure *= steepness(self.network, lifted[0], place, lifted[1], length)
                if not self.region.unbounded:
                    figure *= self.region.holds(place * begin)
                    figure *= self.region.holds(place * begin + length * directions)
                better = figure > best
                best = np.where(better, figure, best)
                at, by = np.where(better, place, at), np.where(better, length, by)
        if not best.all():
            raise NotIdentifiable(FLAT_NETWORK)
        return Segments(at[:, None] * begin, by[:, None] * directions, at * by)

    def read_log_odds(self, segments: Segments) -> SegmentOdds:
        """Asks the pairs; doubtful is what lies where the segment says little."""
        start, step, _ = segments
        tokens = np.stack([start + step, start], axis=1)
        reading = read_weights(self.network, start, step, self.ask(tokens, "score"))
        off = self.exactness / np.maximum(reading.slope, TINY)
        edge = 1e-16  # weights of exactly zero or one have no logarithm
        weight = np.clip(reading.weight, edge, 1 - edge)
        odds, errors = logit_with_error(weight, off)
        whole = self.network(start + step) - self.network(start)
        mean_speed = np.linalg.norm(whole.reshape(len(start), -1), axis=1)
        doubtful = reading.slope < self.options.flat * mean_speed
        doubtful |= np.abs(odds) > self.options.largest_log_odds
        return SegmentOdds(odds, errors, doubtful)


# -- a known network along segments --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Lifted:
    """Points as the network's first layer sees them: `hidden` before the bias, `linear` by the
    skip. Scaling and adding points scales and adds these."""

    hidden: Float[Array, "n m"]
    linear: Float[Array, "n k"]

    @classmethod
    def of(cls, network: ReluNetwork, points: Float[Array, "n d"]) -> "Lifted":
        return cls(points @ network.weight.T, points @ skip_table(network))


def steepness(
    network: ReluNetwork, start: Lifted, at: float, step: Lifted, by: float
) -> Float[Array, " n"]:
    """Least speed of the answer along the middle part of the segments from at * start to
    at * start + by * step, in the direction it goes on the whole; zero where it turns back or
    is slower than 15% of its mean."""
    beginning = 1e-6  # part of a segment in which turns are rounding: hyperplanes through its start
    height, gain = at * start.hidden + network.bias, by * step.hidden
    path = (np.maximum(height + gain, 0) - np.maximum(height, 0)) @ network.output_table
    path += by * step.linear
    length = np.linalg.norm(path, axis=1)
    path /= np.maximum(length, TINY)[:, None]
    pull = path @ network.output_table.T  # what each neuron adds along the path, per its gain
    on = height + beginning * gain > 0
    speed = (gain * pull * on).sum(axis=1) + np.einsum("nk,nk->n", by * step.linear, path)
    with np.errstate(divide="ignore", invalid="ignore"):
        turns = -height / gain
    met = (turns > beginning) & (turns < 1)
    turns = np.where(met, turns, np.inf)
    order = np.argsort(turns, axis=1)
    changes = np.take_along_axis(np.where(met, np.abs(gain) * pull, 0.0), order, axis=1)
    knots = np.take_along_axis(turns, order, axis=1)
    knots = np.concatenate([np.zeros((len(knots), 1)), knots, np.full((len(knots), 1), 2.0)], 1)
    speeds = np.concatenate([speed[:, None], speed[:, None] + np.cumsum(changes, axis=1)], axis=1)
    real = knots[:, :-1] < 1
    # log-odds of about one lead to weights between 0.2 and 0.8
    central = (knots[:, :-1] < 0.8) & (knots[:, 1:] > 0.2)
    backward = np.where(real, speeds, np.inf).min(axis=1) < -1e-9 * length
    least = np.where(central, speeds, np.inf).min(axis=1)
    return np.where((least > 0.15 * length) & ~backward, least, 0.0)


def gradients_at(network: ReluNetwork, points: Float[Array, "n d"]) -> Float[Array, "n d k"]:
    on = points @ network.weight.T + network.bias > 0
    parts = np.einsum("nm,md,mk->ndk", on, network.weight, network.output_table, optimize=True)
    return np.asarray(parts + skip_table(network))


def skip_table(network: ReluNetwork) -> Float[Array, "d k"]:
    return network.skip if network.skip.ndim == 2 else network.skip[:, None]


class SegmentReading(NamedTuple):
    """Weights of the first token, how well each is known, how far answers are off the segment."""

    weight: Float[Array, " n"]
    slope: Float[Array, " n"]  # change of the answer per change of the weight
    off: Float[Array, " n"]  # distance of the answer from the polyline


def read_weights(
    network: ReluNetwork,
    start: Float[Array, "n d"],
    step: Float[Array, "n d"],
    answers: Float[Array, "n k"],
) -> SegmentReading:
    """The weight at which each segment's polyline comes closest to the answer."""
    rows = [find_nearest(network, *each) for each in zip(start, step, answers, strict=True)]
    weight, slope, off = np.array(rows).reshape(-1, 3).T
    return SegmentReading(weight, slope, off)


def find_nearest(
    network: ReluNetwork, start: Array, step: Array, answer: Array
) -> tuple[float, float, float]:
    height = network.weight @ start + network.bias
    gain = network.weight @ step
    with np.errstate(divide="ignore", invalid="ignore"):
        turns = -height / gain
    inside = np.sort(turns[(turns > 0) & (turns < 1)])
    knots = np.concatenate([[0.0], inside, [1.0]])
    corners = network(start + knots[:, None] * step).reshape(len(knots), -1)
    sides = np.diff(corners, axis=0)
    squares = np.maximum(np.einsum("sk,sk->s", sides, sides), TINY)
    part = np.clip(np.einsum("sk,sk->s", answer - corners[:-1], sides) / squares, 0.0, 1.0)
    gaps = np.linalg.norm(answer - corners[:-1] - part[:, None] * sides, axis=1)
    best = int(np.argmin(gaps))
    length = knots[best + 1] - knots[best]
    weight = knots[best] + part[best] * length
    slope = np.sqrt(squares[best]) / max(length, TINY)
    return float(weight), float(slope), float(gaps[best])
