"""A smooth network seen from far away is a ReLU network: structure from free inputs.

Statement.  GELU, SiLU and their kin approach relu far from zero, faster than any power. With inputs
            that may be a million times longer than the network's own scale, all neurons, their
            number included, follow from about 3 answers per neuron and ≈ m/D + 2 gradients, up to
            one scale each; answers near zero tell the scales.
Queries.    (1) A path P -> Q -> -P in a random plane: a plane that passes near zero crosses it
            once, never at a grazing angle. On it F is piecewise linear; between two pieces the D
            equations of one breakpoint certify that there is only one. What is not certified is
            split in the middle: one answer, and a second for the slope where it lies on neither
            of the neighbouring pieces. (2) Gradients between groups of at most 3/4 D breakpoints.
Algebra.    Slope along the path jumps by J_j = v_j |w_j . τ|, the gradient by J_j ω_jᵀ with
            ω_j = ± w_j / |w_j . τ|: linear in ω for a group, then β_j = -ω_j . x(breakpoint). Near
            zero, F = far network + Σ J_j (φ(α_j h_j) / α_j - relu(h_j)): the scales α (with β once
            more) by damped least squares, the normal matrix being a Hadamard product.
Fails.      Breakpoints closer than the width of a bend look like one; a gradient then does not fit
            its group, and the path is drawn again. tanh and sigmoid are flat far away: no bends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.solver import NormalSystem, Problem, Stopping, descend
from keyhole.models.mlp import ACTIVATIONS
from keyhole.network.weights import Weights

Ask = Callable[[Array, str], Array]

FAR = 1e6  # length of the path's corners, per neuron expected, in units of the network's own scale
EXPLAINED = 1e-5  # share of the bends that may be left over by the right activation


@dataclass(frozen=True)
class FarFieldOptions:
    """window: over which a slope is measured, as a share of a segment; `finer` where breakpoints
    were too close for it, relative, `repairs` times at most. closest: share of a segment below
    which breakpoints are not told apart. bend: length over which a neuron bends along the path, at
    most, in units of the network's own scale. group: breakpoints between two gradients, relative to
    the outputs. reach: displacement for gradients, relative to the distance of the nearest plane.
    safety: roundings that an answer of a far point may be off. parallel: sine of the angle between
    two jumps of one breakpoint that was met twice. fits: residual of a group of gradients, relative
    to them, that is no missing neuron."""

    window: float = 2.0**-13
    finer: float = 1 / 16
    repairs: int = 4
    closest: float = 2.0**-36
    bend: float = 400.0
    group: float = 0.75
    reach: float = 0.1
    safety: float = 64.0
    parallel: float = 1e-6
    fits: float = 1e-6


class Unresolved(Exception):
    """The path cannot be read; another one may."""


@dataclass(frozen=True, eq=False)
class FarField:
    """The ReLU network at infinity, up to the scale of each neuron."""

    direction: Float[Array, "m d"]  # ω
    bias: Float[Array, " m"]  # β
    jump: Float[Array, "m k"]  # J
    linear: Float[Array, "k d"]  # where no neuron is on
    offset: Float[Array, " k"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A line that F follows around `at`, its slope measured up to `at + window`."""

    at: float
    value: Float[Array, " k"]
    slope: Float[Array, " k"]
    window: float
    parents: "tuple[Piece, Piece] | None" = None  # between which it was asked

    def __call__(self, t: float) -> Array:
        return self.value + self.slope * (t - self.at)

    def moved(self, t: float, value: Array) -> "Piece":
        return Piece(t, value, self.slope, self.window, self.parents)

    def rounding(self, distance: float, one: float) -> float:
        """How far off the line may be at some distance, if one answer may be off by `one`."""
        return one * (1.0 + distance / abs(self.window))


@dataclass(frozen=True, eq=False)
class Breakpoint:
    at: float
    jump: Float[Array, " k"]


Pair = tuple[Piece, Piece]


class Segment:
    """Breakpoints of F on the segment from `start` to `stop`, found level by level."""

    def __init__(
        self,
        ask: Ask,
        start: Array,
        stop: Array,
        unit: float,
        bend: float,
        options: FarFieldOptions,
    ) -> None:
        self.ask, self.start, self.step, self.unit = ask, start, stop - start, unit
        self.options = options
        self.bend = bend  # width of a neuron's bend, as a share of the segment
        self.scale = 0.0

    def points(self, times: Array) -> Array:
        return self.start + np.asarray(times)[:, None] * self.step

    def values(self, times: list[float]) -> Array:
        answers = self.ask(self.points(np.array(times)), "breakpoints")
        self.scale = max(self.scale, float(np.linalg.norm(answers, axis=1).max()))
        return answers

    @property
    def rounding(self) -> float:
        return self.options.safety * self.unit * self.scale

    def search(self) -> list[Breakpoint]:
        """All breakpoints; where two may lie in one window, once more with a smaller one."""
        window = self.options.window
        ends = self.values([0.0, window, 1.0 - window, 1.0])
        first = Piece(0.0, ends[0], (ends[1] - ends[0]) / window, window)
        last = Piece(1.0, ends[3], (ends[3] - ends[2]) / window, -window)
        pieces, found, waiting = [first, last], [], [(first, last)]
        for _ in range(self.options.repairs):
            while waiting:
                results = [self.between(left, right) for left, right in waiting]
                certain = self.certain(waiting, results)
                found += [r for r, sure in zip(results, certain, strict=True) if _is_point(r, sure)]
                open_pairs = [
                    pair
                    for pair, result, sure in zip(waiting, results, certain, strict=True)
                    if result is not None and not _is_point(result, sure)
                ]
                waiting = self.split(open_pairs, pieces, window)
            found = sorted(found, key=lambda b: b.at)
            found = merged(found, pieces, self.bend, self.rounding, self.options.parallel)
            window *= self.options.finer
            for left, right in self.doubtful(found, pieces, window):
                waiting.append((left, right))
                found = [b for b in found if not left.at <= b.at <= right.at]
                pieces = [p for p in pieces if not left.at <= p.at <= right.at] + [left, right]
            if not waiting:
                return found
        raise Unresolved("breakpoints too close to be told apart")

    def between(self, left: Piece, right: Piece) -> Breakpoint | bool | None:
        """The breakpoint between two pieces, None where they are one, False where there are
        more."""
        length = right.at - left.at
        gap, jump = right(left.at) - left.value, right.slope - left.slope
        there = right.value - left(right.at)
        backwards, onwards = (p.rounding(length, self.rounding) for p in (right, left))
        if np.linalg.norm(gap) <= backwards and np.linalg.norm(there) <= onwards:
            return None
        t = -float(gap @ jump) / max(float(jump @ jump), TINY)
        allowed = max(backwards, onwards)
        edge = allowed / max(float(np.linalg.norm(jump)), TINY)
        if np.linalg.norm(gap + t * jump) > allowed or not -edge <= t <= length + edge:
            return False
        return Breakpoint(left.at + float(np.clip(t, 0.0, length)), jump)

    def certain(self, pairs: list[Pair], results: Sequence[object]) -> list[bool]:
        """Whether the breakpoints are proved: with few outputs, F is asked beside them."""
        points = [k for k, r in enumerate(results) if isinstance(r, Breakpoint)]
        good = [True] * len(pairs)
        if (
            not points or len(pairs[0][0].value) >= 3
        ):  # an intersection in three dimensions is proof
            return good
        asked: list[float] = []
        owners: list[tuple[int, Piece]] = []
        for k in points:
            result = results[k]
            for piece in pairs[k]:
                if isinstance(result, Breakpoint):
                    asked.append(result.at + 0.02 * (piece.at - result.at))
                    owners.append((k, piece))
        for t, value, (k, piece) in zip(asked, self.values(asked), owners, strict=True):
            allowed = piece.rounding(abs(t - piece.at), self.rounding)
            good[k] = good[k] and bool(np.linalg.norm(value - piece(t)) <= allowed)
        return good

    def split(self, pairs: list[Pair], pieces: list[Piece], window: float) -> list[Pair]:
        """Every pair split in the middle; new lines join the pieces."""
        if not pairs:
            return []
        if min(right.at - left.at for left, right in pairs) < self.options.closest:
            raise Unresolved("breakpoints too close to be told apart")
        middles = [(left.at + right.at) / 2 for left, right in pairs]
        halves: list[Pair] = []
        fresh = []
        for (left, right), t, value in zip(pairs, middles, self.values(middles), strict=True):
            half = (right.at - left.at) / 2
            if np.linalg.norm(value - left(t)) <= left.rounding(half, self.rounding):
                halves.append((left.moved(t, value), right))
            elif np.linalg.norm(value - right(t)) <= right.rounding(half, self.rounding):
                halves.append((left, right.moved(t, value)))
            else:
                fresh.append((left, right, t, value, min(window, half / 4)))
        if fresh:
            beside = self.values([t + w for _, _, t, _, w in fresh])
            for (left, right, t, value, w), near in zip(fresh, beside, strict=True):
                piece = Piece(t, value, (near - value) / w, w, (left, right))
                pieces.append(piece)
                halves += [(left, piece), (piece, right)]
        return halves

    def beside_ends(self, ends: list[Piece], pieces: list[Piece], window: float) -> list[Pair]:
        """The first and the last piece over a new window, each with its neighbour."""
        if not ends:
            return []
        pairs: list[Pair] = []
        ways = [np.sign(p.window) * window for p in ends]
        values = self.values([p.at + w for p, w in zip(ends, ways, strict=True)])
        for piece, w, value in zip(ends, ways, values, strict=True):
            fresh = Piece(piece.at, piece.value, (value - piece.value) / w, w)
            others = [p for p in pieces if p is not piece]
            nearest = others[int(np.argmin([abs(p.at - piece.at) for p in others]))]
            pairs.append((fresh, nearest) if w > 0 else (nearest, fresh))
        return pairs

    def doubtful(self, found: list[Breakpoint], pieces: list[Piece], window: float) -> list[Pair]:
        """Pairs to be searched again: breakpoints at both ends of a window that are not one, or at
        the end of the first and last."""
        times = np.array([b.at for b in found])
        if not len(times):
            return []
        pairs: list[Pair] = []
        ends: list[Piece] = []
        for piece in pieces:
            reach = 1e-3 * abs(piece.window)
            if np.abs(times - piece.at - piece.window).min() >= reach:
                continue
            if piece.parents is None:
                ends.append(piece)
            elif np.abs(times - piece.at).min() < reach:
                pairs.append(piece.parents)
        pairs += self.beside_ends(ends, pieces, window)
        pairs.sort(key=lambda pair: pair[0].at - pair[1].at)
        kept: list[Pair] = []
        for left, right in pairs:
            if not any(a.at <= left.at and right.at <= b.at for a, b in kept):
                kept.append((left, right))
        return kept


def _is_point(result: object, sure: bool) -> TypeGuard[Breakpoint]:
    return isinstance(result, Breakpoint) and sure


def merged(
    found: list[Breakpoint], pieces: list[Piece], bend: float, rounding: float, sine: float
) -> list[Breakpoint]:
    """A breakpoint inside the window of a slope, or closer to an answer than its bend is wide, was
    met twice, with parallel jumps."""
    windows = np.array([(p.at, p.at + p.window) for p in pieces])
    kept: list[Breakpoint] = []
    for one in found:
        if kept and len(one.jump) > 1:
            last = kept[-1]
            reach = np.maximum(1e-3 * np.abs(windows[:, 1] - windows[:, 0]), bend)
            met = (np.abs(windows - [last.at, one.at]) < reach[:, None]).all(axis=1).any()
            sizes = float(np.linalg.norm(last.jump)), float(np.linalg.norm(one.jump))
            large, small = (last, one) if sizes[0] > sizes[1] else (one, last)
            along = float(large.jump @ small.jump) / max(max(sizes) ** 2, TINY)
            across = float(np.linalg.norm(small.jump - along * large.jump))
            gap = max(one.at - last.at, TINY)
            parallel = across <= sine * min(sizes) + rounding / gap
            if parallel and (met or gap <= bend):
                at = (large.at + along * small.at) / (1.0 + along)
                kept[-1] = Breakpoint(at, last.jump + one.jump)
                continue
        kept.append(one)
    return kept


def read_far_field(
    ask: Ask,
    width: int,
    radius: float,
    size: float,
    unit: float,
    rng: np.random.Generator,
    options: FarFieldOptions | None = None,
) -> FarField:
    """The ReLU network at infinity along one random path of the given radius; `size` is that of
    the entries near which the network bends."""
    options = FarFieldOptions() if options is None else options
    if width < 2:
        raise Unresolved("a path far away takes two directions, and inputs are single numbers")
    bend = options.bend * np.sqrt(width) * size / radius
    plane, _ = np.linalg.qr(rng.standard_normal((width, 2)))
    corner, other = radius * plane.T
    segments = [
        Segment(ask, corner, other, unit, bend, options),
        Segment(ask, other, -corner, unit, bend, options),
    ]
    found = [segment.search() for segment in segments]
    jumps = [b.jump for part in found for b in part]
    if not jumps:
        raise Unresolved("no breakpoint on the path")
    bases, groups = stations(found, max(1, int(options.group * len(jumps[0]))))
    tables = [
        np.reshape([found[s][i].jump for s, i in group], (len(group), len(jumps[0]))).T
        for group in groups
    ]
    gradients = measured_gradients(ask, segments, found, bases, tables, options)
    directions, biases = [], []
    for k, (group, table) in enumerate(zip(groups, tables, strict=True)):
        solved, off = solved_group(gradients, k, table, options.fits)
        if off.any():
            raise Unresolved(f"gradients do not fit {len(group)} breakpoints")
        for (s, i), row in zip(group, solved, strict=True):
            directions.append(row)
            biases.append(-float(row @ segments[s].points(np.array([found[s][i].at]))[0]))
    value, linear = gradients[0]
    offset = value - linear @ segments[0].points(np.array([bases[0][1]]))[0]
    return FarField(np.array(directions), np.array(biases), np.array(jumps), linear, offset)


def stations(
    found: list[list[Breakpoint]], most: int
) -> tuple[list[tuple[int, float]], list[list[tuple[int, int]]]]:
    """Where gradients are measured (segment, time), before the first breakpoint, after the last
    and between groups of at most so many; and the breakpoints (segment, number) of each."""
    order = [(s, i) for s, part in enumerate(found) for i in range(len(part))]

    def gap(k: int) -> tuple[float, int, float]:
        """The widest stretch between breakpoints k - 1 and k of the whole path."""
        ends = []
        for s, part in enumerate(found):
            low = [found[t][i].at for t, i in order[:k] if t == s]
            high = [found[t][i].at for t, i in order[k:] if t == s]
            left, right = max(low, default=0.0), min(high, default=1.0)
            before = sum(len(p) for p in found[:s])
            if right > left and before <= k <= before + len(part):
                ends.append((right - left, s, (left + right) / 2))
        if not ends:
            raise Unresolved("breakpoints at the corner of the path")
        return max(ends)

    bases, groups, start = [gap(0)[1:]], [], 0
    parts = -(-len(order) // most)
    for number in range(parts):
        even = start + -(-(len(order) - start) // (parts - number))
        slack = max(1, most // 6)
        choices = range(
            max(start + 1, even - slack), min(len(order), start + most, even + slack) + 1
        )
        last = number == parts - 1
        rest = (parts - number - 1) * most
        allowed = [k for k in choices if len(order) - k <= rest]
        stop = len(order) if last else max(allowed or [min(len(order), start + most)], key=gap)
        groups.append(order[start:stop])
        bases.append(gap(stop)[1:])
        start = stop
    return bases, groups


def measured_gradients(
    ask: Ask,
    segments: list[Segment],
    found: list[list[Breakpoint]],
    bases: list[tuple[int, float]],
    tables: list[Array],
    options: FarFieldOptions,
) -> list[tuple[Array, Array]]:
    """Value and gradient (k, d) at every base, by displacements that cross no plane: an entry that
    does not fit the jumps beside it, (k, g) in the tables, is asked again ten times closer."""
    width = len(segments[0].start)
    places, points, lengths = [], [], []
    for s, t in bases:
        base = segments[s].points(np.array([t]))[0]
        near = min((abs(b.at - t) for b in found[s]), default=1.0)
        near = min(near, t if s == 1 else np.inf, 1 - t if s == 0 else np.inf)
        length = options.reach * near * float(np.linalg.norm(segments[s].step)) / np.sqrt(width)
        lengths.append(np.full(width, length))
        places.append(base)
        points.append(np.vstack([base, base + length * np.eye(width)]))
    answers = ask(np.concatenate(points), "gradients").reshape(len(bases), width + 1, -1)
    gradients = [
        (block[0], ((block[1:] - block[0]) / length[:, None]).T)
        for block, length in zip(answers, lengths, strict=True)
    ]
    for _ in range(options.repairs):
        crossed = np.zeros((len(bases), width), dtype=bool)
        for k, table in enumerate(tables):
            crossed[k : k + 2] |= solved_group(gradients, k, table, options.fits)[1]
        which, axes = np.nonzero(crossed)
        if not len(which) or len(which) > len(bases) * width / 2:
            break
        steps = np.zeros((len(which), width))
        for row, (place, axis) in enumerate(zip(which, axes, strict=True)):
            lengths[place][axis] /= 10.0
            steps[row, axis] = lengths[place][axis]
        values = ask(np.array(places)[which] + steps, "gradients")
        for value, place, axis in zip(values, which, axes, strict=True):
            centre, gradient = gradients[place]
            gradient[:, axis] = (value - centre) / lengths[place][axis]
    remeasure_poor(ask, segments, found, np.array(places), np.array(lengths), gradients, tables)
    return gradients


def remeasure_poor(
    ask: Ask,
    segments: list[Segment],
    found: list[list[Breakpoint]],
    places: Float[Array, "b d"],
    lengths: Float[Array, "b d"],
    gradients: list[tuple[Array, Array]],
    tables: list[Array],
    poor: float = 0.05,
) -> None:
    """A gradient whose displacements had to be short, because a plane passes by, has few digits,
    and so have the biases of its group: at once if a corner of the path is near a plane. Now that
    the planes are known roughly, such a gradient is measured again in the same cell, away from the
    nearest one. Shares of the usual displacement below `poor` are short."""
    usual = float(np.median(lengths))
    short = np.flatnonzero(lengths.min(axis=1) < poor * usual)
    if not len(short):
        return
    rows = np.concatenate([solved_group(gradients, k, t, 1.0)[0] for k, t in enumerate(tables)])
    on_planes = [
        s.points(np.array([b.at for b in p])) for s, p in zip(segments, found, strict=True)
    ]
    offsets = -(rows * np.concatenate(on_planes)).sum(axis=1)
    sizes = np.maximum(np.linalg.norm(rows, axis=1), TINY)
    reach = float(np.linalg.norm(segments[0].step))
    for k in short:
        heights = (rows @ places[k] + offsets) / sizes
        nearest = int(np.argmin(np.abs(heights)))
        away = np.sign(heights[nearest]) * rows[nearest] / sizes[nearest]
        ways = reach * np.logspace(-7.0, -1.0, 61)[:, None] * away
        moved = ((places[k] + ways) @ rows.T + offsets) / sizes  # (trials, m)
        free = np.where((moved * heights > 0).all(axis=1), np.abs(moved).min(axis=1), 0.0)
        best = int(np.argmax(free))
        length = 0.3 * free[best]
        if length < 5.0 * lengths[k].min():
            continue
        base = places[k] + ways[best]
        values = ask(np.vstack([base, base + length * np.eye(len(base))]), "gradients")
        gradients[k] = gradients[k][0], ((values[1:] - values[0]) / length).T


def solved_group(
    gradients: list[tuple[Array, Array]], k: int, table: Float[Array, "k g"], fits: float
) -> tuple[Float[Array, "g d"], Array]:
    """Directions of the neurons between two gradients, and which of their entries do not fit."""
    change = gradients[k + 1][1] - gradients[k][1]
    solved, *_ = np.linalg.lstsq(table, change, rcond=None)
    if table.shape[0] <= table.shape[1]:
        return solved, np.zeros(change.shape[1], dtype=bool)
    off = np.linalg.norm(table @ solved - change, axis=0)
    return solved, off > fits * np.linalg.norm(change) / np.sqrt(change.shape[1])


def fit_scales(
    far: FarField,
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    names: Sequence[str],
    size: float,
) -> tuple[Weights, float]:
    """The network with the activation and the scales that explain answers near zero best, and the
    share of the bends that is left over. `size` is the typical size of an entry of the points."""
    best: tuple[Weights, float] | None = None
    for start in (0.5, 0.2, 1.0, 0.08, 0.03):  # times the best common scale: wide bends move in
        for name in names:
            found = _scales_from(far, points, answers, name, size, start)
            if best is None or found[1] < best[1]:
                best = found
        if best is not None and best[1] < EXPLAINED:
            break
    if best is None:
        raise ValueError("no activation to fit")
    return best


def _scales_from(
    far: FarField, points: Array, answers: Array, name: str, size: float, start: float
) -> tuple[Weights, float]:
    """Damped least squares on the logarithms of the scales and the biases."""
    phi = ACTIVATIONS[name]
    length = np.linalg.norm(far.direction, axis=1)
    shared = np.tile(far.jump @ far.jump.T, (2, 2))
    arguments = points @ far.direction.T
    straight = answers - points @ far.linear.T

    def residual(log: Array, bias: Array) -> tuple[Array, Array]:
        alpha = np.exp(log)
        inside = alpha * (arguments + bias)
        rest = straight - (phi.value(inside) / alpha) @ far.jump
        return rest - rest.mean(axis=0), inside

    bias = far.bias.copy()
    trials = [np.log(t / size / length) for t in np.logspace(-1.5, 1.5, 13)]
    sharp = float(np.linalg.norm(residual(np.log(1e3 / size / length), bias)[0]))
    sizes = [float(np.linalg.norm(residual(log, bias)[0])) for log in trials]
    log = trials[int(np.argmin(sizes))] + np.log(start)
    neurons = len(log)

    def move(log: Array, bias: Array) -> tuple[Array, Array, Array, Array]:
        return log, bias, *residual(log, bias)

    def linearize(state: tuple[Array, Array, Array, Array]) -> NormalSystem:
        log, _, rest, inside = state
        slope = phi.first(inside)
        by_log = (slope * inside - phi.value(inside)) / np.exp(log)
        tall = np.column_stack([by_log, slope * length])  # biases in units of the length
        tall = tall - tall.mean(axis=0)
        right = (tall * np.tile(rest @ far.jump.T, (1, 2))).sum(axis=0)
        return NormalSystem((tall.T @ tall) * shared, right)

    problem = Problem(
        lambda state: float((state[2] ** 2).sum()),
        linearize,
        lambda state, step: move(
            state[0] + np.clip(step[:neurons], -1.0, 1.0), state[1] + step[neurons:] * length
        ),
    )
    end = descend(problem, move(log, bias), Stopping(steps=60, window=2, share=0.004))
    log, bias, _, inside = end.state
    alpha = np.exp(log)
    inner = np.column_stack([far.direction * alpha[:, None], alpha * bias])
    offset = (straight - (phi.value(inside) / alpha) @ far.jump).mean(axis=0)
    weights = Weights(inner, far.jump.T / alpha, np.column_stack([far.linear, offset]), name)
    return weights, float(np.sqrt(end.cost)) / max(sharp, TINY)
