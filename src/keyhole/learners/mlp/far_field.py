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

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.refinement import Weights
from keyhole.models.mlp import ACTIVATIONS

Ask = Callable[[Array, str], Array]

FAR = 1e6  # length of the path's corners, per neuron expected, in units of the network's own scale
WINDOW = 2.0**-13  # of a segment, over which a slope is measured
CLOSEST = 2.0**-36  # of a segment: breakpoints closer than this are not told apart
GROUP = 0.75  # breakpoints between two gradients, relative to the outputs
CERTAIN_OUTPUTS = 3  # outputs from which an intersection certifies a single breakpoint
REACH = 0.1  # displacement for gradients, relative to the distance of the nearest plane
SAFETY = 64.0  # roundings that an answer of a far point may be off
PARALLEL = 1e-6  # sine of the angle between two jumps of one breakpoint that was met twice
FITS = 1e-6  # residual of a group of gradients, relative to them, that is no missing neuron


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
    """A line that F follows around `at`."""

    at: float
    value: Float[Array, " k"]
    slope: Float[Array, " k"]

    def __call__(self, t: float) -> Array:
        return self.value + self.slope * (t - self.at)


@dataclass(frozen=True, eq=False)
class Breakpoint:
    at: float
    jump: Float[Array, " k"]


class Segment:
    """Breakpoints of F on the segment from `start` to `stop`, found level by level."""

    def __init__(self, ask: Ask, start: Array, stop: Array, unit: float, window: float) -> None:
        self.ask, self.start, self.step = ask, start, stop - start
        self.unit, self.window = unit, window
        self.scale = 0.0

    def points(self, times: Array) -> Array:
        return self.start + np.asarray(times)[:, None] * self.step

    def values(self, times: list[float]) -> Array:
        answers = self.ask(self.points(np.array(times)), "breakpoints")
        self.scale = max(self.scale, float(np.linalg.norm(answers, axis=1).max()))
        return answers

    def rounding(self, distance: float) -> float:
        """How far off a line may be at some distance from where its slope was measured."""
        return SAFETY * self.unit * self.scale * (1.0 + distance / self.window)

    def search(self) -> tuple[list[Breakpoint], list[Piece]]:
        w = self.window
        ends = self.values([0.0, w, 1.0 - w, 1.0])
        first = Piece(0.0, ends[0], (ends[1] - ends[0]) / w)
        last = Piece(1.0, ends[3], (ends[3] - ends[2]) / w)
        pieces, found = [first, last], []
        waiting = [(first, last)]
        while waiting:
            open_pairs = []
            results = [self.between(left, right) for left, right in waiting]
            checks = self.checked([r for r in results if isinstance(r, Breakpoint)], waiting, results)
            for (left, right), result in zip(waiting, results, strict=True):
                if isinstance(result, Breakpoint) and checks.get(id(result), True):
                    found.append(result)
                elif result is not None:
                    open_pairs.append((left, right))
            waiting = self.split(open_pairs, pieces)
        return self.merged(sorted(found, key=lambda b: b.at)), pieces

    def between(self, left: Piece, right: Piece) -> Breakpoint | bool | None:
        """The breakpoint between two pieces, None where they are one, False where there are more."""
        length = right.at - left.at
        gap, jump = right(left.at) - left.value, right.slope - left.slope
        allowed = self.rounding(length)
        if np.linalg.norm(gap) <= allowed and np.linalg.norm(right.value - left(right.at)) <= allowed:
            return None
        t = -float(gap @ jump) / max(float(jump @ jump), TINY)
        off = float(np.linalg.norm(gap + t * jump))
        edge = allowed / max(float(np.linalg.norm(jump)), TINY)
        if off > allowed or not -edge <= t <= length + edge:
            return False
        return Breakpoint(left.at + float(np.clip(t, 0.0, length)), jump)

    def checked(
        self, candidates: list[Breakpoint], pairs: list[tuple[Piece, Piece]], results: list[object]
    ) -> dict[int, bool]:
        """With few outputs, whether F follows the two pieces up to the breakpoint."""
        if not candidates or len(candidates[0].jump) >= CERTAIN_OUTPUTS:
            return {}
        asked, expected, owner, slack = [], [], [], []
        for (left, right), result in zip(pairs, results, strict=True):
            if not isinstance(result, Breakpoint):
                continue
            for piece, other in ((left, right), (right, left)):
                t = result.at + 0.02 * (piece.at - result.at)
                asked.append(t)
                expected.append(piece(t))
                owner.append(id(result))
                slack.append(self.rounding(abs(other.at - piece.at)))
        off = np.linalg.norm(self.values(asked) - np.array(expected), axis=1)
        good = dict.fromkeys(owner, True)
        for key, gap, allowed in zip(owner, off, slack, strict=True):
            good[key] = good[key] and bool(gap <= allowed)
        return good

    def split(
        self, pairs: list[tuple[Piece, Piece]], pieces: list[Piece]
    ) -> list[tuple[Piece, Piece]]:
        """Every pair split in the middle."""
        if not pairs:
            return []
        if min(right.at - left.at for left, right in pairs) < CLOSEST:
            raise Unresolved("breakpoints too close to be told apart")
        middles = [(left.at + right.at) / 2 for left, right in pairs]
        values = self.values(middles)
        halves: list[tuple[Piece, Piece]] = []
        fresh = []
        for (left, right), t, value in zip(pairs, middles, values, strict=True):
            allowed = self.rounding(right.at - left.at)
            if np.linalg.norm(value - left(t)) <= allowed:
                halves.append((Piece(t, value, left.slope), right))
            elif np.linalg.norm(value - right(t)) <= allowed:
                halves.append((left, Piece(t, value, right.slope)))
            else:
                fresh.append((left, right, t, value))
        if fresh:
            widths = [min(self.window, (right.at - left.at) / 8) for left, right, _, _ in fresh]
            beside = self.values([t + w for (_, _, t, _), w in zip(fresh, widths, strict=True)])
            for (left, right, t, value), w, near in zip(fresh, widths, beside, strict=True):
                piece = Piece(t, value, (near - value) / w)
                pieces.append(piece)
                halves += [(left, piece), (piece, right)]
        return halves

    def merged(self, found: list[Breakpoint]) -> list[Breakpoint]:
        """A breakpoint inside the window of a slope was met twice, with parallel jumps."""
        kept: list[Breakpoint] = []
        for one in found:
            if kept and one.at - kept[-1].at <= 1.01 * self.window:
                last = kept[-1]
                sizes = float(np.linalg.norm(last.jump)), float(np.linalg.norm(one.jump))
                cosine = float(last.jump @ one.jump) / max(sizes[0] * sizes[1], TINY)
                if cosine > 1.0 - PARALLEL and len(one.jump) > 1:
                    at = (sizes[0] * last.at + sizes[1] * one.at) / (sizes[0] + sizes[1])
                    kept[-1] = Breakpoint(at, last.jump + one.jump)
                    continue
            kept.append(one)
        return kept


def read_far_field(
    ask: Ask, width: int, radius: float, unit: float, rng: np.random.Generator
) -> FarField:
    """The ReLU network at infinity along one random path of the given size."""
    plane, _ = np.linalg.qr(rng.standard_normal((width, 2)))
    corner, other = radius * plane.T
    segments = [
        Segment(ask, corner, other, unit, WINDOW),
        Segment(ask, other, -corner, unit, WINDOW),
    ]
    found = [segment.search()[0] for segment in segments]
    jumps = [b.jump for part in found for b in part]
    if not jumps:
        raise Unresolved("no breakpoint on the path")
    bases, groups = stations(found, len(jumps[0]))
    gradients = measured_gradients(ask, segments, found, bases)
    directions, biases = [], []
    for k, group in enumerate(groups):
        if not group:
            continue
        table = np.array([found[s][i].jump for s, i in group]).T  # (k, g)
        change = gradients[k + 1][1] - gradients[k][1]
        solved, *_ = np.linalg.lstsq(table, change, rcond=None)
        off = np.linalg.norm(table @ solved - change)
        if table.shape[0] > table.shape[1] and off > FITS * np.linalg.norm(change):
            raise Unresolved(f"gradients do not fit {len(group)} breakpoints ({off:.1e})")
        for (s, i), row in zip(group, solved, strict=True):
            directions.append(row)
            biases.append(-float(row @ segments[s].points(np.array([found[s][i].at]))[0]))
    linear = gradients[0][1]
    offset = gradients[0][0] - linear @ segments[0].points(np.array([bases[0][1]]))[0]
    return FarField(np.array(directions), np.array(biases), np.array(jumps), linear, offset)


def stations(
    found: list[list[Breakpoint]], outputs: int
) -> tuple[list[tuple[int, float]], list[list[tuple[int, int]]]]:
    """Where gradients are measured (segment, time), before the first breakpoint, after the last
    and between groups; and the breakpoints (segment, number) of each group."""
    most = max(1, int(GROUP * outputs))
    order = [(s, i) for s, part in enumerate(found) for i in range(len(part))]

    def gap(k: int) -> tuple[float, int, float]:
        """The widest stretch between breakpoints k - 1 and k of the whole path."""
        ends = []
        for s, part in enumerate(found):
            low = [found[t][i].at for t, i in order[:k] if t == s]
            high = [found[t][i].at for t, i in order[k:] if t == s]
            left, right = max(low, default=0.0), min(high, default=1.0)
            if (not part or k == 0 or k == len(order) or low or high) and right > left:
                before = sum(len(p) for p in found[:s])
                if before <= k <= before + len(part):
                    ends.append((right - left, s, (left + right) / 2))
        return max(ends)

    bases, groups, start = [gap(0)[1:]], [], 0
    parts = -(-len(order) // most)
    for number in range(parts):
        even = start + -(-(len(order) - start) // (parts - number))
        slack = max(1, most // 6)
        choices = range(max(start + 1, even - slack), min(len(order), start + most, even + slack) + 1)
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
) -> list[tuple[Array, Array]]:
    """Value and gradient (k, d) at every base, by displacements that cross no plane."""
    width = len(segments[0].start)
    points, lengths = [], []
    for s, t in bases:
        base = segments[s].points(np.array([t]))[0]
        near = min((abs(b.at - t) for b in found[s]), default=1.0)
        near = min(near, t if s == 1 else np.inf, 1 - t if s == 0 else np.inf)
        length = REACH * near * float(np.linalg.norm(segments[s].step)) / np.sqrt(width)
        lengths.append(length)
        points.append(np.vstack([base, base + length * np.eye(width)]))
    answers = ask(np.concatenate(points), "gradients").reshape(len(bases), width + 1, -1)
    return [
        (block[0], ((block[1:] - block[0]) / length).T)
        for block, length in zip(answers, lengths, strict=True)
    ]


SCALE_TRIALS = np.logspace(-1.5, 1.5, 13)  # row norms tried for all neurons at once
SCALE_STEPS = 60  # of damped least squares


def fit_scales(
    far: FarField, points: Float[Array, "n d"], answers: Float[Array, "n k"], activation: str,
    size: float,
) -> tuple[Weights, float]:
    """The scales of all neurons from answers near zero, and the residual relative to what they
    explain. `size` is the typical length of these points per entry."""
    phi = ACTIVATIONS[activation]
    length = np.linalg.norm(far.direction, axis=1)
    shared = far.jump @ far.jump.T
    bias = far.bias.copy()
    arguments = points @ far.direction.T
    straight = answers - points @ far.linear.T

    def residual(log: Array, bias: Array) -> tuple[Array, Array]:
        alpha = np.exp(log)
        inside = alpha * (arguments + bias)
        rest = straight - (phi.value(inside) / alpha) @ far.jump
        offset = rest.mean(axis=0)
        return rest - offset, inside

    trials = [np.log(t / size / length) for t in SCALE_TRIALS]
    sizes = [float(np.linalg.norm(residual(log, bias)[0])) for log in trials]
    log = trials[int(np.argmin(sizes))]
    rest, inside = residual(log, bias)
    norm, damping = float(np.linalg.norm(rest)), 1e-2
    start = max(norm, TINY)
    for _ in range(SCALE_STEPS):
        alpha = np.exp(log)
        slope = phi.first(inside)
        by_log = (slope * inside - phi.value(inside)) / alpha
        by_bias = slope * length  # bias in units of the length: distances from zero
        tall = np.column_stack([by_log, by_bias])
        tall = tall - tall.mean(axis=0)
        normal = (tall.T @ tall) * np.tile(shared, (2, 2))
        image = rest @ far.jump.T
        right = (tall * np.tile(image, (1, 2))).sum(axis=0)
        weight = np.diag(normal).copy()
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(weight + 1e-12 * weight.max()), right)
            change = np.clip(step[: len(log)], -1.0, 1.0)
            moved = log + change, bias + step[len(log) :] * length
            trial, within = residual(*moved)
            if np.linalg.norm(trial) < norm:
                break
            damping *= 4.0
        else:
            break
        last, norm = norm, float(np.linalg.norm(trial))
        (log, bias), rest, inside = moved, trial, within
        damping = max(damping / 5.0, 1e-12)
        if norm > 0.999 * last and damping < 1e-3:
            break
    alpha = np.exp(log)
    inner = np.column_stack([far.direction * alpha[:, None], alpha * bias])
    offset = (straight - (phi.value(inside) / alpha) @ far.jump).mean(axis=0)
    weights = Weights(
        inner, far.jump.T / alpha, np.column_stack([far.linear, offset]), activation
    )
    return weights, norm / start
