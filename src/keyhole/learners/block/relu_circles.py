"""A network of ReLUs on a sphere, from the kinks of one great circle and points beside it.

Statement.  z(ν) = A ν + a + Σ_j outer_j relu(inner_j . ν + bias_j) for |ν| = R in k dimensions; an
            answer tells z, or only its direction (p numbers, six or more). All is found up to one
            factor of z, and up to which way neurons are turned.
Queries.    1  a great circle ν = R (u cos φ + w sin φ)            -> the neurons' planes there
            2  points of it, moved along the other directions      -> the rest of the neurons' rows
            3  random points; arcs to those that are not explained -> neurons that miss the circle
Algebra.    1: between kinks z = Z (1, cos φ, sin φ). Five directions tell Z up to a factor (four
            values tell Z); where the two pieces beside a gap are parallel at one angle of it, that
            is the only kink there, else another piece is asked in the middle. The factors follow
            from continuity. Both kinks of a neuron have one jump of the slope, by which they are
            paired; their angles tell its plane. Then z(φ_i) = C [f, relu(α_j . f)]_i, and the
            lengths s of all answers minimise sᵀ((1 - H) ∘ (n nᵀ)) s, H the projector on the
            columns of that table: one eigenvector.
            2: at a move h e the unknowns (A e, inner_j . e) are linear, p + m of them, in the plane
            beside the direction that is seen: p - 1 equations for each point of the circle.
            As long as hardly any point is explained, another circle is asked: neurons that both
            circles meet tell the ratio of their factors, the others are new.
            3: where one unknown neuron is on, outer lies in the plane of what is seen and what is
            explained; its arguments there are linear in its row.
            Errors of what a piece predicts are those of its copies with perturbed answers.
Fails.      Kinks closer than the answers resolve; neurons with one outer direction; neurons that no
            random point sees.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.block.box import Unclear
from keyhole.learners.block.direction_fit import (
    Directed,
    lengths,
    points_wanted,
    with_one,
    without,
)


@dataclass(frozen=True)
class CircleOptions:
    """What a person might tune.

    start: pieces with which the search begins, for each of the numbers of an answer. doubt: errors
    of a prediction within which an answer agrees with it. trust: widths of a piece up to which it
    is carried on without an answer there. share: of a gap that a new piece covers. copies:
    perturbed ones that tell errors. alike: relative difference of the jumps of two kinks that may
    be one neuron's. steps: of the moves beside the circle, relative to the distance of the nearest
    kink, the next one where a move meets another neuron. condition: of the table of these moves.
    spare: points of the circle beyond those that would just do. close: relative error within which
    a network explains an answer, before it is refined. draws: of circles, and of arcs to one point
    that is not explained, at most. same: distance of the rows of one neuron, as two circles tell
    them. explained: share of the sphere from which on single neurons are looked for. together:
    unknowns of such neurons that are refined together, those of the newest ones.
    """

    start: float = 0.5
    doubt: float = 30.0
    trust: float = 15.0
    share: float = 0.05
    copies: int = 3
    alike: float = 0.2
    steps: tuple[float, ...] = (0.1, 0.02, 0.004)
    condition: float = 150.0
    spare: int = 2
    close: float = 3e-4
    draws: int = 4
    same: float = 1e-3
    explained: float = 0.1
    together: int = 1500


@dataclass(frozen=True, eq=False)
class SphereBox:
    """The network as it is asked: points of the sphere in, rows of z or of its direction out."""

    ask: Callable[[Array], Array]
    width: int
    radius: float
    unit: float  # relative error of an answer
    lengths: bool  # whether answers are z, not only its direction
    bend: float = 0.0  # smooth error of z on top: within an angle it bends by the angle's cube


# --- 1: pieces of a circle ------------------------------------------------------------------------


def waves(
    angles: Float[Array, " n"], centre: float = 0.0, size: float = 1.0
) -> Float[Array, "n 3"]:
    """(1, sin, 1 - cos) of angles around a centre, of order one within this distance of it."""
    turn = np.asarray(angles) - centre
    return np.stack(
        [np.ones_like(turn), np.sin(turn) / size, 2.0 * np.sin(turn / 2.0) ** 2 / size**2], axis=-1
    )


def slopes(angles: Float[Array, " n"], centre: float, size: float) -> Float[Array, "n 3"]:
    """Derivatives of the waves."""
    turn = np.asarray(angles) - centre
    return np.stack([np.zeros_like(turn), np.cos(turn) / size, np.sin(turn) / size**2], axis=-1)


@dataclass(frozen=True, eq=False)
class Piece:
    """Angles without a kink between them, in their order, and what was seen there."""

    angles: Float[Array, " n"]
    seen: Float[Array, "n p"]
    unit: float
    lengths: bool
    noise: Float[Array, "c n p"]  # of the copies

    @property
    def low(self) -> float:
        return float(self.angles[0])

    @property
    def high(self) -> float:
        return float(self.angles[-1])

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def centre(self) -> float:
        return (self.low + self.high) / 2.0

    @cached_property
    def solved(self) -> tuple[Float[Array, "c p 3"], float]:
        """Z in local waves, for the answers and for their copies, and what is left of the answers,
        relative to them."""
        table = waves(self.angles, self.centre, self.width / 2.0)
        inverse = np.linalg.pinv(table)
        samples = np.concatenate([self.seen[None], self.seen + self.noise])
        if self.lengths:
            found = np.einsum("wn,cnp->cpw", inverse, samples)
            rest = table @ found[0].T - self.seen
            return found, float(np.abs(rest).max() / np.abs(self.seen).max())
        rest_of = np.linalg.svd(table)[0][:, 3:]  # combinations that vanish
        system = np.einsum("nr,cnp->crpn", rest_of, samples)
        system = system.reshape(len(samples), -1, len(self.angles))
        _, sizes, axes = np.linalg.svd(system, full_matrices=False)
        scale = axes[:, -1] * np.sign(axes[:, -1].sum(axis=1, keepdims=True))
        found = np.einsum("wn,cn,cnp->cpw", inverse, scale, samples)
        found = found / np.linalg.norm(found[:, :, :1], axis=1, keepdims=True)
        bad = bool((scale[0] <= 0).any())
        return found, np.inf if bad else float(sizes[0, -1])

    def predict(self, angles: Float[Array, " n"]) -> Float[Array, "c n p"]:
        """z up to a factor, of the answers and the copies."""
        table = waves(angles, self.centre, self.width / 2.0)
        return np.asarray(np.einsum("cpw,nw->cnp", self.solved[0], table))

    def slope(self, angles: Float[Array, " n"]) -> Float[Array, "c n p"]:
        table = slopes(angles, self.centre, self.width / 2.0)
        return np.asarray(np.einsum("cpw,nw->cnp", self.solved[0], table))

    def joined(self, angles: Array, seen: Array, rng: np.random.Generator) -> "Piece":
        both = np.concatenate([self.angles, angles])
        order = np.argsort(both)
        fresh = make_noise(seen, self.unit, len(self.noise), rng)
        noise = np.concatenate([self.noise, fresh], axis=1)[:, order]
        return replace(
            self, angles=both[order], seen=np.concatenate([self.seen, seen])[order], noise=noise
        )

    def turned(self, angle: float) -> "Piece":
        return replace(self, angles=self.angles + angle)


def make_noise(
    seen: Float[Array, "n p"], unit: float, copies: int, rng: np.random.Generator
) -> Float[Array, "c n p"]:
    size = lengths(seen)
    return np.asarray(unit * size * rng.standard_normal((copies, *seen.shape)))


def unit_vectors(rows: Float[Array, "*any p"]) -> Float[Array, "*any p"]:
    return np.asarray(rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), TINY))


def gap_of(one: Float[Array, "*many p"], other: Float[Array, "*few p"], exact: bool) -> Array:
    """The difference of two z, relative to them; without lengths, of their directions."""
    if exact:
        size = np.maximum(np.linalg.norm(other, axis=-1, keepdims=True), TINY)
        return np.asarray((one - other) / size)
    a, b = unit_vectors(one), unit_vectors(other)
    return np.asarray(a - b * np.sum(a * b, axis=-1, keepdims=True))


@dataclass(eq=False)
class CircleSearch:
    """Finds the pieces of a path of angles, and the kinks between them."""

    ask: Callable[[Array], Array]
    box: SphereBox
    options: CircleOptions
    rng: np.random.Generator
    resolution: float = 1e-8  # angle below which kinks are not told apart

    def run(self, pieces: int) -> tuple[list[Piece], Float[Array, " m"]]:
        """All pieces of the whole circle and the angles between them; the last piece is the first,
        one turn later."""
        places = np.linspace(0.0, 2.0 * np.pi, pieces + 1)[:-1]
        found_at = [
            self.piece(place, self.options.share * 2.0 * np.pi / pieces) for place in places
        ]
        found, kinks = [found_at[0]], list[float]()
        for right in found_at[1:]:
            self.resolve(found, kinks, right, 0)
        first = found[0]
        self.resolve(found, kinks, first.turned(2.0 * np.pi), 0)
        last = found.pop()
        if len(found) and last.low < first.low + 2.0 * np.pi:  # grown, or merged with others
            grown = last.turned(-2.0 * np.pi)
            if not kinks:
                raise Unclear("no neuron bends on a circle")
            found[0] = found[0].joined(grown.angles, grown.seen, self.rng)
        return found, np.array(kinks)

    def piece(self, centre: float, width: float) -> Piece:
        """A few answers that lie on one piece, near an angle."""
        places = np.array(
            [-0.5, -0.17, 0.2, 0.5] if self.box.lengths else [-0.5, -0.3, 0.04, 0.28, 0.5]
        )
        for _ in range(12):
            angles = centre + width * places
            seen = self.ask(angles)
            noise = make_noise(seen, self.box.unit, self.options.copies, self.rng)
            one = Piece(angles, seen, self.box.unit, self.box.lengths, noise)
            if one.solved[1] < self.options.doubt * self.box.unit + self.box.bend * width**3:
                return one
            centre += 0.2 * width * self.rng.uniform(-1.0, 1.0)
            width *= 0.3
        raise Unclear("z has kinks on every short piece of a circle")

    def agrees(self, one: Piece, angles: Array, seen: Array) -> bool:
        """Whether answers are what a piece predicts."""
        predicted = one.predict(angles)
        exact = self.box.lengths
        off = np.linalg.norm(gap_of(seen, predicted[0], exact), axis=-1)
        doubt = np.linalg.norm(gap_of(predicted[1:], predicted[0], exact), axis=-1).max(axis=0)
        reach = max(one.high, float(np.max(angles))) - min(one.low, float(np.min(angles)))
        allowed = self.options.doubt * (doubt + self.box.unit) + self.box.bend * reach**3
        return bool((off < allowed).all())

    def grown(self, one: Piece, gap: float, side: float) -> Piece:
        """The piece carried on towards a gap, until it is wide beside what is left of it."""
        while gap > self.options.trust * one.width:
            step = min(0.8 * self.options.trust * one.width, 0.5 * gap)
            angle = np.array([one.high + step if side > 0 else one.low - step])
            seen = self.ask(angle)
            if not self.agrees(one, angle, seen):
                break
            one = one.joined(angle, seen, self.rng)
            gap -= step
        return one

    def resolve(self, found: list[Piece], kinks: list[float], right: Piece, depth: int) -> None:
        """Appends what lies between the last piece found and this one, and this one."""
        left = found[-1]
        if depth > 50 or right.low - left.high < self.resolution:
            raise Unclear("kinks lie closer than the answers resolve")
        left = found[-1] = self.grown(left, right.low - left.high, 1.0)
        right = self.grown(right, right.low - left.high, -1.0)
        gap = right.low - left.high
        near = gap < 2.0 * self.options.trust * max(left.width, right.width)
        if (
            near
            and self.agrees(left, right.angles, right.seen)
            and self.agrees(right, left.angles, left.seen)
        ):
            found[-1] = left.joined(right.angles, right.seen, self.rng)
            return
        kink = self.one_kink(left, right)
        if kink is not None:
            kinks.append(kink)
            found.append(right)
            return
        middle = self.piece(left.high + 0.5 * gap, self.options.share * gap)
        if middle.low <= left.high or middle.high >= right.low:
            raise Unclear("kinks lie closer than the answers resolve")
        self.resolve(found, kinks, middle, depth + 1)
        self.resolve(found, kinks, right, depth + 1)

    def one_kink(self, left: Piece, right: Piece) -> float | None:
        """The angle at which both pieces agree, if there is one in the gap between them."""
        low, high, exact = left.high, right.low, self.box.lengths

        def mismatch(angles: Array) -> Float[Array, "c n p"]:
            return gap_of(right.predict(angles), left.predict(angles), exact)

        grid = low + (high - low) * np.linspace(0.0, 1.0, 17)
        at = mismatch(grid)[0]
        angle = float(grid[np.argmin(np.linalg.norm(at, axis=1))])
        step = 1e-3 * (high - low)
        slope = np.zeros(at.shape[1])
        for _ in range(12):
            before, here, after = mismatch(np.array([angle - step, angle, angle + step]))[0]
            slope = (after - before) / (2.0 * step)
            move = float(slope @ here / max(float(slope @ slope), TINY))
            angle -= move
            if abs(move) < 1e-12 or not low - (high - low) < angle < high + (high - low):
                break
        off = mismatch(np.array([angle]))[:, 0]
        place = np.array([angle])
        doubt = self.box.unit + self.box.bend * (right.high - left.low) ** 3 / self.options.doubt
        for one in (left, right):
            sides = one.predict(place)[:, 0]
            doubt += float(np.linalg.norm(gap_of(sides[1:], sides[0], exact), axis=-1).max())
        slack = min(doubt / max(float(np.linalg.norm(slope)), TINY), 0.01 * (high - low))
        if np.linalg.norm(off[0]) > self.options.doubt * doubt:
            return None
        if np.linalg.norm(slope) * (high - low) < 10.0 * self.options.doubt * doubt:
            return None  # too weak to be sure
        if not low - slack <= angle <= high + slack:
            return None
        return float(np.clip(angle, low, high))


# --- the circle as a whole ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Circle:
    """z on a great circle: C (1, cos, sin, relu(planes . (1, cos, sin))), up to one factor."""

    first: Float[Array, " k"]  # u
    second: Float[Array, " k"]  # w
    planes: Float[Array, "m 3"]  # of the neurons; the last two of a unit vector
    table: Float[Array, "q p"]  # C: three rows and one for each neuron

    def features(self, angles: Float[Array, " n"]) -> Float[Array, "n q"]:
        return circle_features(self.planes, angles)

    def constant(self, angle: float) -> Float[Array, " p"]:
        """The part of z there that does not turn with the point."""
        f = plain_waves(np.array([angle]))[0]
        on = self.planes @ f > 0
        return np.asarray(self.table[0] + (on * self.planes[:, 0]) @ self.table[3:])


def plain_waves(angles: Float[Array, " n"]) -> Float[Array, "n 3"]:
    return np.stack([np.ones_like(angles), np.cos(angles), np.sin(angles)], axis=-1)


def circle_features(planes: Float[Array, "m 3"], angles: Float[Array, " n"]) -> Float[Array, "n q"]:
    f = plain_waves(angles)
    return np.hstack([f, np.maximum(f @ planes.T, 0.0)])


def chain_pieces(
    pieces: list[Piece], kinks: Float[Array, " m"], ask: Callable[[Array], Array], exact: bool,
    rng: np.random.Generator,
) -> tuple[list[Piece], Float[Array, "m p"], Float[Array, "m p"]]:  # fmt: skip
    """Every piece asked again over its whole length; z and the jump of its slope at every kink, the
    lengths from continuity."""
    count = len(kinks)
    wide = []
    for i, one in enumerate(pieces):
        low, high = (kinks[i - 1] if i else kinks[-1] - 2.0 * np.pi), kinks[i]
        angles = low + (high - low) * np.array([0.04, 0.5, 0.96])
        taken = np.abs(one.angles[:, None] - angles).min(axis=0) < 0.1 * (high - low)
        angles = angles[~taken]
        wide.append(one.joined(angles, ask(angles), rng) if len(angles) else one)
    points, jumps, factor = [], [], 1.0
    for i in range(count):
        left, right = wide[i], wide[(i + 1) % count]
        place = kinks[i : i + 1]
        other = place if i + 1 < count else place - 2.0 * np.pi
        before, after = left.predict(place)[0, 0], right.predict(other)[0, 0]
        ratio = 1.0 if exact else float(np.linalg.norm(before) / np.linalg.norm(after))
        points.append(factor * before)
        jumps.append(factor * (ratio * right.slope(other)[0, 0] - left.slope(place)[0, 0]))
        factor *= ratio
    return wide, np.array(points), np.array(jumps)


def pair_kinks(
    points: Float[Array, "m p"], jumps: Float[Array, "m p"], exact: bool, alike: float
) -> list[tuple[int, int]]:
    """The kinks two by two, by their jumps; raises Unclear where some have no partner."""
    count = len(jumps)
    if count % 2:
        raise Unclear("a circle has an odd number of kinks")
    between = jumps[:, None] - jumps[None]
    whole = np.stack(np.broadcast_arrays(jumps[:, None], jumps[None]))
    if not exact:  # lengths are known badly: what is along z does not count
        n = unit_vectors(points)
        second = n[None] - (n @ n.T)[:, :, None] * n[:, None]
        for axis in (np.broadcast_to(n[:, None], second.shape), unit_vectors(second)):
            between = between - np.sum(between * axis, axis=-1, keepdims=True) * axis
            whole = whole - np.sum(whole * axis, axis=-1, keepdims=True) * axis
    cost = np.linalg.norm(between, axis=-1)
    cost = cost / np.maximum(np.linalg.norm(whole, axis=-1).sum(axis=0), TINY)
    np.fill_diagonal(cost, np.inf)
    left, pairs = set(range(count)), []
    for flat in np.argsort(cost, axis=None):
        a, b = divmod(int(flat), count)
        if a in left and b in left and a != b:
            if cost[a, b] > alike:
                raise Unclear("some kinks of a circle have no partner")
            pairs.append((a, b))
            left -= {a, b}
        if not left:
            break
    return pairs


def solve_circle(
    angles: Float[Array, " n"], seen: Float[Array, "n p"], planes: Float[Array, "m 3"], exact: bool
) -> tuple[Float[Array, "q p"], float]:
    """C, and what is left of the answers relative to them."""
    table = circle_features(planes, angles)
    basis, _ = np.linalg.qr(table)
    if exact:
        found, *_ = np.linalg.lstsq(table, seen, rcond=None)
        return found, float(np.abs(table @ found - seen).max() / np.abs(seen).max())
    count = len(angles)
    matrix = (np.eye(count) - basis @ basis.T) * (seen @ seen.T)
    shift = 1e-15 * count
    factor = cho_factor(matrix + shift * np.eye(count), check_finite=False)
    scale = np.ones(count) / np.sqrt(count)
    for _ in range(8):
        scale = cho_solve(factor, scale)
        scale /= np.linalg.norm(scale)
    scale = scale * np.sign(scale.sum())
    if (scale <= 0).any():
        raise Unclear("the kinks of a circle do not explain its answers")
    scale = scale * np.sqrt(count)
    values = scale[:, None] * seen
    found, *_ = np.linalg.lstsq(table, values, rcond=None)
    rest = np.linalg.norm(gap_of(seen, table @ found, False), axis=1)
    return found, float(rest.max())


def find_circle(
    box: SphereBox, options: CircleOptions, rng: np.random.Generator
) -> tuple[Circle, Float[Array, " m"]]:
    """A great circle with all of its kinks, and their angles; raises Unclear."""
    first, second = np.linalg.qr(rng.standard_normal((box.width, 2)))[0].T

    def ask(angles: Array) -> Array:
        path = np.cos(angles)[:, None] * first + np.sin(angles)[:, None] * second
        return box.ask(box.radius * path)

    search = CircleSearch(ask, box, options, rng)
    pieces, kinks = search.run(max(8, int(options.start * box.width)))
    pieces, points, jumps = chain_pieces(pieces, kinks, ask, box.lengths, rng)
    pairs = pair_kinks(points, jumps, box.lengths, options.alike)
    planes = []
    for a, b in pairs:
        half, middle = (kinks[b] - kinks[a]) / 2.0, (kinks[a] + kinks[b]) / 2.0
        planes.append([-np.cos(half), np.cos(middle), np.sin(middle)])
    angles = np.concatenate([one.angles for one in pieces])
    seen = np.concatenate([one.seen for one in pieces])
    table, rest = solve_circle(angles, seen, np.array(planes), box.lengths)
    if rest > max(1e-5, 1e4 * box.unit):
        raise Unclear(f"the kinks of a circle leave {rest:.1e} of its answers")
    return Circle(first, second, np.array(planes), table), np.sort(np.mod(kinks, 2.0 * np.pi))


# --- 2: beside the circle -------------------------------------------------------------------------


def choose_bases(
    circle: Circle, kinks: Float[Array, " m"], numbers: int, options: CircleOptions
) -> Float[Array, " b"]:
    """Angles, few of them and in the middle of pieces, whose tables together tell all neurons."""
    ends = np.append(kinks, kinks[0] + 2.0 * np.pi)
    middles, widths = (ends[1:] + ends[:-1]) / 2.0, np.diff(ends)
    on = (circle.planes @ plain_waves(middles).T > 0).T.astype(float)  # (pieces, m)
    # at a piece z moves by A e + Σ_on outer_j (inner_j . e): as many numbers as an answer has
    strength = np.linalg.norm(circle.table[3:], axis=1)
    outer = circle.table[3:] / np.maximum(strength, TINY)[:, None]
    eye = np.eye(outer.shape[1])

    def table_of(i: int) -> Array:
        ahead = circle.features(middles[i : i + 1])[0] @ circle.table
        ahead = ahead / np.linalg.norm(ahead)
        whole = np.hstack([eye, (on[i][:, None] * outer).T])
        return np.asarray(whole - np.outer(ahead, ahead @ whole))

    least = -(-(outer.shape[1] + len(outer)) // max(1, numbers - 1)) + options.spare
    stretches = np.array_split(np.arange(len(middles)), least)
    chosen = [int(part[np.argmax(widths[part])]) for part in stretches if len(part)]
    while len(chosen) < min(len(middles), 6 * least):
        stacked = np.concatenate([table_of(i) for i in chosen])
        _, sizes, axes = np.linalg.svd(stacked, full_matrices=len(stacked) < stacked.shape[1])
        if len(sizes) == stacked.shape[1] and sizes[-1] > sizes[0] / options.condition:
            break
        weak = axes[-1]
        gains = [float(np.linalg.norm(table_of(i) @ weak) * widths[i]) for i in range(len(middles))]
        for i in chosen:
            gains[i] = -1.0
        chosen.append(int(np.argmax(gains)))
    return np.asarray(middles[sorted(chosen)])


def find_rows(
    box: SphereBox, circle: Circle, kinks: Float[Array, " m"], options: CircleOptions
) -> Directed:
    """The network without the neurons that miss the circle; raises Unclear."""
    angles = choose_bases(circle, kinks, circle.table.shape[1], options)
    for step in options.steps:
        net, off, size = solve_rows(box, circle, angles, step)
        # a move across a neuron's plane shows beside the errors of the circle
        if off < max(1e-7, 1e2 * box.unit, box.bend) * size:
            return net
    raise Unclear("moves beside a circle meet other neurons")


def solve_rows(
    box: SphereBox, circle: Circle, angles: Float[Array, " b"], share: float
) -> tuple[Directed, float, float]:
    """The network by moves of this share of the nearest kink's distance; what is left of the
    equations, and the size of z in them."""
    p = circle.table.shape[1]
    beside = np.linalg.svd(np.array([circle.first, circle.second]))[2][2:]  # directions e
    rows, right, sizes = [], [], []
    for angle in angles:
        f = plain_waves(np.array([angle]))[0]
        place = box.radius * (f[1] * circle.first + f[2] * circle.second)
        step = share * float(np.abs(circle.planes @ f).min())
        moved = np.cos(step) * place + box.radius * np.sin(step) * beside
        seen = box.ask(np.concatenate([place[None], moved]))
        z = circle.features(np.array([angle]))[0] @ circle.table
        base = seen[0] if box.lengths else np.linalg.norm(z) * unit_vectors(seen[0])
        sizes.append(np.linalg.norm(base))
        on = (circle.planes @ f > 0).astype(float)
        table = np.sin(step) * np.hstack([np.eye(p), (on[:, None] * circle.table[3:]).T])
        known = np.cos(step) * base + (1.0 - np.cos(step)) * circle.constant(float(angle))
        if box.lengths:
            rows.append(np.repeat(table[None], len(beside), axis=0))
            right.append(seen[1:] - known)
        else:
            n = unit_vectors(seen[1:])
            across = np.eye(p) - np.einsum("ip,iq->ipq", n, n)
            rows.append(across @ table)
            right.append(-across @ known)
    tables, rights = np.concatenate(rows, axis=1), np.concatenate(right, axis=1)
    scale = np.maximum(np.linalg.norm(tables[0], axis=0), TINY)
    found, off = [], 0.0
    for table, one in zip(tables, rights, strict=True):
        solution, *_ = np.linalg.lstsq(table / scale, one, rcond=None)
        off = max(off, float(np.abs(table / scale @ solution - one).max()))
        found.append(solution / scale)
    solved = np.array(found) / box.radius  # (k - 2, p + m)
    plane = np.array([circle.first, circle.second]) / box.radius
    inner = circle.planes[:, 1:] @ plane + solved[:, p:].T @ beside
    affine = circle.table[1:3].T @ plane + solved[:, :p].T @ beside
    net = Directed(
        np.column_stack([affine, circle.table[0]]),
        circle.table[3:].T,
        np.column_stack([inner, circle.planes[:, 0]]),
        "relu",
    )
    return net, off, float(np.max(sizes))


def find_circles(
    box: SphereBox, rng: np.random.Generator, options: CircleOptions | None = None
) -> tuple[Directed, Float[Array, " k"]]:
    """The network but for neurons that miss a circle, and a point of the circle, where these are
    off; raises Unclear."""
    options = CircleOptions() if options is None else options
    reason = ""
    for _ in range(options.draws):
        try:
            circle, kinks = find_circle(box, options, rng)
            return find_rows(box, circle, kinks, options), box.radius * circle.first
        except (Unclear, np.linalg.LinAlgError) as failed:
            reason = str(failed)
    raise Unclear(reason)


def find_neurons(
    box: SphereBox, draw: Callable[[int], "Pool"], rng: np.random.Generator,
    options: CircleOptions | None = None,
) -> Directed:  # fmt: skip
    """The whole network: circles, as long as most of the sphere is not explained or the neurons
    that miss all of them are not found; raises Unclear. `draw`: so many random points, at least."""
    options = CircleOptions() if options is None else options
    net, home = find_circles(box, rng, options)
    numbers = len(net.affine)
    pool = draw(points_wanted(box.width, numbers, net.neurons))
    explained, reason = explained_share(net, pool, box, options), ""
    idle = tried = 0  # circles without a new neuron; neurons beside which others were looked for
    while True:
        last = idle >= options.draws
        if net.neurons > tried and (last or explained >= options.explained):
            tried = net.neurons
            more = draw(points_wanted(box.width, numbers, net.neurons))
            try:
                return find_hidden(box, net, more, rng, options)
            except Unclear as failed:  # another circle may show some of those that are left
                reason = str(failed)
        if last:
            raise Unclear(reason)
        other, _ = find_circles(box, rng, options)
        joined = join_networks(net, other, home, options)
        share = explained_share(joined, pool, box, options)
        idle = 0 if joined.neurons > net.neurons and share >= explained else idle + 1
        if not idle:
            net, explained = joined, share


def explained_share(net: Directed, pool: "Pool", box: SphereBox, options: CircleOptions) -> float:
    """Of random points, at which a network has what was seen."""
    return float(np.mean(off_by(net, pool, box.lengths) < max(options.close, 1e3 * box.unit)))


def join_networks(
    net: Directed, other: Directed, home: Float[Array, " k"], options: CircleOptions
) -> Directed:
    """A network with the neurons that another circle shows besides. Neurons that both have tell
    the ratio of their factors; a new one is turned so that it is off at home, a point of the first
    circle, which it misses. Raises Unclear."""
    own, rows = (one.rows / lengths(one.rows[:, :-1]) for one in (net, other))
    mine, outer = (one.outer * lengths(one.rows[:, :-1]).T for one in (net, other))
    ways = np.stack([np.linalg.norm(rows[:, None] - way * own, axis=2) for way in (1.0, -1.0)])
    gaps = ways.min(axis=0)
    nearest = np.argmin(gaps, axis=1)
    known = gaps.min(axis=1) < options.same
    both = mine[:, nearest[known]]
    ratios = np.sum(both * outer[:, known], axis=0) / np.sum(both**2, axis=0)
    if not len(ratios) or not np.median(ratios) > 0:
        raise Unclear("two circles have no neuron in common")
    side = np.where(rows @ np.append(home, 1.0) > 0, -1.0, 1.0)
    return replace(
        net,
        outer=np.column_stack([net.outer, outer[:, ~known] / np.median(ratios)]),
        rows=np.concatenate([net.rows, (side[:, None] * rows)[~known]]),
    )


# --- 3: neurons that miss the circle --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pool:
    """Random points of the sphere and what was seen there."""

    points: Float[Array, "n k"]
    seen: Float[Array, "n p"]

    def joined(self, points: Float[Array, "more k"], seen: Float[Array, "more p"]) -> "Pool":
        return Pool(np.concatenate([self.points, points]), np.concatenate([self.seen, seen]))


def off_by(net: Directed, pool: Pool, exact: bool) -> Float[Array, " n"]:
    """How far answers are from what a network has there, relative to them."""
    return np.asarray(np.linalg.norm(gap_of(pool.seen, net(pool.points), exact), axis=1))


def find_hidden(
    box: SphereBox, net: Directed, pool: Pool, rng: np.random.Generator,
    options: CircleOptions | None = None,
) -> Directed:  # fmt: skip
    """The network with neurons that the points of the pool see besides; raises Unclear."""
    options = CircleOptions() if options is None else options
    failed: set[int] = set()
    known = net.neurons
    close = max(options.close, 1e3 * box.unit)
    while True:
        off = off_by(net, pool, box.lengths)
        # what is explained is off by the errors of the network only
        errors = np.median(off[off < close]) if (off < close).any() else close
        level = min(close, 1e3 * max(float(errors), box.unit))
        (wrong,) = np.nonzero(off > level)
        if not len(wrong):
            return prune_hidden(net, known, pool, box.lengths, close)
        right = np.flatnonzero(off <= level)
        if len(failed) >= 4 * options.draws or len(right) < 2:
            raise Unclear(f"{len(wrong)} of {len(off)} points are not explained")
        near = pool.points[wrong] @ pool.points[right].T
        near[np.isin(wrong, list(failed))] = -np.inf
        i, j = np.unravel_index(int(np.argmax(near)), near.shape)
        if not np.isfinite(near[i, j]):
            raise Unclear(f"{len(wrong)} of {len(off)} points are not explained")
        ends = pool.points[right[j]], pool.points[wrong[i]]
        found = find_neuron(box, net, *ends, level, rng)
        if found is None:
            failed.add(int(wrong[i]))
            continue
        outer, row = found
        net = replace(
            net,
            outer=np.column_stack([net.outer, outer]),
            rows=np.concatenate([net.rows, row[None]]),
        )
        newest = max(1, options.together // (len(outer) + len(row)))
        net = refine_hidden(net, max(known, net.neurons - newest), pool, box.lengths, close)


def prune_hidden(net: Directed, known: int, pool: Pool, exact: bool, level: float) -> Directed:
    """Without neurons that others can do without, once they are refined: neurons on one plane may
    cancel each other, so that they are also taken out together."""
    for j in range(net.neurons - 1, known - 1, -1):
        if j >= net.neurons:
            continue
        directions = unit_vectors(net.rows[known:])
        alike = known + np.flatnonzero(np.abs(directions @ directions[j - known]) > 0.999)
        for out in (alike, alike[alike != alike[0]], np.array([j])):
            if not len(out):
                continue
            fewer = without(net, out)
            if fewer.neurons > known and len(alike) > 1:
                fewer = refine_hidden(fewer, known, pool, exact, 30.0 * level)
            if off_by(fewer, pool, exact).max() <= level:
                net = fewer
                break
    return net


def refine_hidden(net: Directed, known: int, pool: Pool, exact: bool, close: float) -> Directed:
    """Neurons from this one on, refined on the points that are nearly explained: they were read
    from small parts of the sphere."""
    count = net.neurons - known
    p, e = net.affine.shape
    for _ in range(3):
        off = off_by(net, pool, exact)
        # only where one of them is on do they show
        near = (off < close) & (with_one(pool.points) @ net.rows[known:].T > 0).any(axis=1)
        if not near.any():
            break
        x, seen = with_one(pool.points[near]), pool.seen[near]
        z = net(pool.points[near])
        arguments = x @ net.rows[known:].T
        on = arguments > 0
        by_outer = np.einsum("nj,pq->npqj", np.maximum(arguments, 0.0), np.eye(p))
        by_row = np.einsum("pj,nj,ne->npje", net.outer[:, known:], on, x)
        table = np.concatenate(
            [by_outer.reshape(len(x), p, -1), by_row.reshape(len(x), p, -1)], axis=2
        )
        if exact:
            rest = seen - z
        else:
            n = unit_vectors(seen)
            rest = n * np.sum(n * z, axis=1, keepdims=True) - z
            table = table - n[:, :, None] * np.einsum("np,npu->nu", n, table)[:, None]
        step = np.linalg.lstsq(table.reshape(len(x) * p, -1), rest.ravel(), rcond=1e-9)[0]
        outer, rows = net.outer.copy(), net.rows.copy()
        outer[:, known:] += step[: p * count].reshape(p, count)
        rows[known:] += step[p * count :].reshape(count, e)
        moved = replace(net, outer=outer, rows=rows)
        better = np.mean(np.minimum(off_by(moved, pool, exact), close) ** 2)
        if not better < np.mean(np.minimum(off, close) ** 2):
            break
        net = moved
    return net


def find_neuron(
    box: SphereBox, net: Directed, start: Float[Array, " k"], end: Float[Array, " k"],
    level: float, rng: np.random.Generator,
) -> tuple[Float[Array, " p"], Float[Array, " e"]] | None:  # fmt: skip
    """Outer weights and row of the neuron that is met first on the arc from a point that is
    explained to one that is not; None where it is not seen alone."""
    u = start / box.radius
    w = end - (end @ u) * u
    w = w / np.linalg.norm(w)
    far = float(np.arctan2(end @ w, end @ u))

    def place(angle: float) -> Array:
        return np.asarray(box.radius * (np.cos(angle) * u + np.sin(angle) * w))

    def look(points: Float[Array, "n k"]) -> Pool:
        return Pool(points, box.ask(points))

    low, high = 0.0, far
    for _ in range(7):
        middle = (low + high) / 2.0
        explained = off_by(net, look(place(middle)[None]), box.lengths)[0] <= level
        low, high = (middle, high) if explained else (low, middle)
    for share in (0.6, 0.3, 0.1, 0.03):  # of the rest of the arc, as long as no other one is met
        angle = low + share * (far - low)
        if angle < high:
            angle = high
        for reach in (1.0, 0.3):
            size = reach * (angle - low)

            def around(count: int, angle: float = angle, size: float = size) -> Array:
                aside = rng.standard_normal((count, box.width))
                centre = place(angle)
                aside -= np.outer(aside @ centre, centre) / box.radius**2
                moved = centre + box.radius * size * rng.uniform(
                    0.5, 1.0, (count, 1)
                ) * unit_vectors(aside)
                return np.asarray(box.radius * unit_vectors(moved))

            pool = look(around(5))
            if share_one(net, pool, box.lengths, level) is None:
                continue
            more = look(around(box.width + 3))
            pool = pool.joined(more.points, more.seen)
            outer = share_one(net, pool, box.lengths, level)
            if outer is None:
                continue
            table = with_one(pool.points)
            arguments = read_arguments(net, pool, outer, box.lengths)
            row, *_ = np.linalg.lstsq(table, arguments, rcond=None)
            rest = np.abs(table @ row - arguments).max()
            if (arguments > 0).all() and rest < 3e-3 * np.abs(arguments).max():
                return outer, row
    return None


def share_one(net: Directed, pool: Pool, exact: bool, level: float) -> Float[Array, " p"] | None:
    """The one vector, times positive numbers, that is missing at all points, or None."""
    z = net(pool.points)
    if exact:
        _, sizes, axes = np.linalg.svd(pool.seen - z, full_matrices=False)
        if sizes[1] > 1e-3 * sizes[0] + level * np.linalg.norm(z) / np.sqrt(len(z)):
            return None
        outer = axes[0]
        return np.asarray(outer * np.sign(np.sum((pool.seen - z) @ outer)))
    planes = np.linalg.qr(np.stack([z, pool.seen], axis=2))[0]  # (n, p, 2)
    matrix = len(z) * np.eye(z.shape[1]) - np.einsum("npa,nqa->pq", planes, planes)
    values, axes = np.linalg.eigh(matrix)
    if values[0] > 1e-6 * values[1]:
        return None
    outer = axes[:, 0]
    return np.asarray(outer * np.sign(np.sum(read_arguments(net, pool, outer, exact))))


def read_arguments(
    net: Directed, pool: Pool, outer: Float[Array, " p"], exact: bool
) -> Float[Array, " n"]:
    """How much of a vector is missing at every point."""
    z = net(pool.points)
    if exact:
        return np.asarray((pool.seen - z) @ outer / (outer @ outer))
    n = unit_vectors(pool.seen)
    beside, across = z - n * np.sum(n * z, axis=1, keepdims=True), outer - (n @ outer)[:, None] * n
    return np.asarray(-np.sum(beside * across, axis=1) / np.sum(across**2, axis=1))
