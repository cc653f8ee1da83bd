"""A network with a residual behind a norm, norm(x + mlp(x)), from directions of answers alone.

Statement.  y = gain * n + bias, n along z = x + mlp(x). With ReLUs z is affine in x between kinks;
            a smooth activation that bends looks like ReLUs from afar. Gain and bias known, an
            answer tells the direction of z, whatever epsilon is. Invisible is the mean of mlp(x).
Queries.    1  huge tokens                                          -> gain and bias
            2  a line x = o + tan φ v, three answers to a piece     -> kinks, z up to one factor
            3  a few points of the line, moved along a basis        -> the neurons' rows
            4  beside each kink of a smooth activation              -> the lengths of the rows
            5  random tokens                                        -> epsilon; refinement.py
Algebra.    2: z cos φ = Z (cos φ, sin φ): on one piece all directions lie in one plane, and three
            of them tell Z up to a factor. Two pieces with one kink between them share the direction
            of z at the kink, and this is a proof that it is one (four dimensions or more); more
            kinks: another piece in the middle. Continuity tells the ratio of factors, and the
            jump of Z is outer_j times (-t_j, 1).
            3: at a displacement e the unknowns (J e, inner_j . e) are linear, in the plane beside
            the direction that is seen: p + m unknowns, p - 1 equations for each point.
            The residual has coefficient one: J = λ - Σ s_j outer_j inner_jᵀ, s_j zero or one,
            linear in (λ, s), tells the factor and which way the neurons are turned.
            4: far from every kink a smooth neuron is a ReLU. ReLUs are fitted to all answers there
            first: kinks are then placed as exactly as a bend's width asks for, or nearly so.
Fails.      Planes nearly parallel to the line; kinks closer than the answers resolve.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import logit, ndtri

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.block.box import NotThisBlock, Paid, Unclear
from keyhole.learners.block.post_norm_attention import fit_layer_norm, fit_rms_norm
from keyhole.learners.block.refinement import Pairs, refine_block
from keyhole.linalg.decisions import margin_of, note_decision
from keyhole.measurement.asker import Asker
from keyhole.measurement.evidence import Evidence
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp, outer_table
from keyhole.models.norm import Norm
from keyhole.oracles.noise import ACCURACY, DETECTION, NoiseModel
from keyhole.stages.epsilon import epsilons_behind

LEAST_EPSILON = 1e-14  # of float64 answers: a smaller one is zero to them


@dataclass(frozen=True)
class LineOptions:
    """What a person might tune.

    start: pieces with which the search begins. doubt: roundings that a test of planes allows.
    margin: distance from the ends of the half circle of angles. spare: base points beyond those
    that would just do. distance: of the line from zero, at most, where the activation is smooth.
    steep: components of a neuron's row, beside that along the line, for which steps are made before
    it is known. place: error of a kink's place, beside the width of a bend, from which on that is
    not read. unseen: share of the neurons whose bend need not be seen.
    """

    start: int = 8
    doubt: float = 60.0
    margin: float = 1e-4
    spare: int = 2
    distance: float = 1e6
    steep: float = 500.0
    place: float = 0.002
    unseen: float = 0.5

    def find_distance(self, unit: float) -> float:
        """Of the line from zero, for a relative rounding: as far as kinks are still placed."""
        return min(self.distance, self.place / unit)


Directions = Callable[[Array], Array]  # of z at angles (n,), as rows


# --- 1: the norm ----------------------------------------------------------------------------------


def find_norm(box: Asker, rng: np.random.Generator) -> Norm:
    """From tokens beside which epsilon vanishes; raises NotThisBlock."""
    if box.width < 3:
        raise NotThisBlock("directions of fewer than three numbers all lie in one plane")
    size = box.error ** (-3.0 / 7.0)
    tokens = box.representable(size * rng.standard_normal((box.width + 5, box.width)))
    answers = box(tokens[:, None], "norm")
    norm, off = fit_layer_norm(answers)
    if off > 3e5 * box.error:
        norm, off = fit_rms_norm(answers)
    if off > 3e5 * box.error:
        raise NotThisBlock("the answers to huge tokens lie on no sphere of a norm")
    return norm


def is_smooth(
    ask: Callable[[Array], Array], width: int, unit: float, rng: np.random.Generator
) -> bool:
    """Whether z curves between kinks. Three near points of a line have directions in one plane
    where it does not; where it does, they are off it by the square of their distance, wherever one
    looks: twice as near, a quarter. Kinks among them follow no such rule."""
    chance = 0.2  # that kinks between three points look like a curve, to within `alike`
    alike = 0.2  # relative difference of a quarter; a curve is off by the square of the step
    count, step = Evidence(NoiseModel(unit)).enough(chance), unit ** (1.0 / 4.0)
    points = rng.standard_normal((count, 1, width))
    heading = step * rng.standard_normal((count, 1, width))
    near = points + np.array([-1.0, -0.5, 0.0, 0.5, 1.0])[:, None] * heading
    seen = ask(near.reshape(-1, width)).reshape(count, 5, -1)
    wide, narrow = (
        np.linalg.svd(seen[:, which], compute_uv=False)[:, 2] for which in ([0, 2, 4], [1, 2, 3])
    )
    curved = wide > DETECTION**2 * unit  # what is off by less has no quarter that is seen
    ratio = 4.0 * narrow / np.maximum(wide, TINY)
    allowed = alike + 4.0 * DETECTION * unit / np.maximum(wide, TINY)
    smooth = bool(curved.all() and (np.abs(ratio - 1.0) < allowed).all())
    note_decision("the network is smooth", smooth, margin_of(np.abs(ratio - 1.0), allowed))
    return smooth


# --- 2: kinks on a line ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Piece:
    """Angles on one piece and the directions of z there, in the order of the angles."""

    angles: Float[Array, " n"]
    seen: Float[Array, "n p"]

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
    def plane(self) -> Float[Array, "p 2"]:
        return np.asarray(np.linalg.svd(self.seen.T, full_matrices=False)[0][:, :2])

    def off(self, seen: Float[Array, "n p"]) -> Float[Array, " n"]:
        """How far directions lie outside of the plane."""
        plane = self.plane
        return np.asarray(np.linalg.norm(seen - seen @ plane @ plane.T, axis=1))

    def joined(self, angles: Array, seen: Array) -> "Piece":
        both = np.concatenate([self.angles, angles])
        order = np.argsort(both)
        return Piece(both[order], np.concatenate([self.seen, seen])[order])

    def solve(self) -> Float[Array, "p 2"]:
        """Z up to a positive factor: in the plane, Z f(φ) is along what was seen."""
        centre, width = (self.low + self.high) / 2.0, max(self.width, 1e-300)
        turn = np.array([[np.cos(centre), np.sin(centre)], [-np.sin(centre), np.cos(centre)]])
        local = np.diag([1.0, 1.0 / width]) @ turn  # coordinates in which the piece is of size one
        plane = self.plane
        inside = self.seen @ plane
        f = features(self.angles) @ local.T
        across = np.column_stack([-inside[:, 1], inside[:, 0]])
        # coordinates of order one in the plane, too
        stretch = np.linalg.svd(inside, full_matrices=False)[2]
        sizes = np.maximum(np.abs(inside @ stretch.T).max(axis=0), 1e-300)
        across = (across @ stretch.T) * sizes[::-1]
        rows = np.einsum("na,nb->nab", across, f).reshape(len(f), 4)
        table = np.linalg.svd(rows / np.linalg.norm(rows, axis=1, keepdims=True))[2][-1]
        # undo: across = rot(inside) stretch^T * sizes, so C = rot^T ... in the plane's basis
        turned = (stretch.T * sizes[::-1]) @ table.reshape(2, 2)
        found = plane @ turned @ local
        sign = np.sign(np.sum((features(self.angles) @ found.T) * self.seen, axis=1).sum())
        return np.asarray(found * (sign if sign else 1.0))


def features(angles: Float[Array, " n"]) -> Float[Array, "n 2"]:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def angle_of(found: Float[Array, "p 2"], direction: Float[Array, " p"]) -> float:
    """The angle at which z has a direction of the piece's plane."""
    f, *_ = np.linalg.lstsq(found, direction, rcond=None)
    return float(np.arctan(f[1] / f[0])) if f[0] else np.pi / 2


@dataclass(eq=False)
class LineSearch:
    """Finds the pieces of a line and the kinks between them."""

    ask: Directions
    unit: float
    options: LineOptions
    resolution: float = 1e-9  # angle below which kinks are not told apart

    def run(self) -> tuple[list[Piece], Float[Array, " m"]]:
        """The pieces and the angles between them."""
        end = np.pi / 2 - self.options.margin
        places = np.linspace(-end, end, self.options.start)
        width = 0.05 * (places[1] - places[0])
        sides = [1.0, *[0.0] * (len(places) - 2), -1.0]
        pieces = [self.piece(*one, width) for one in zip(places, sides, strict=True)]
        found, kinks = [pieces[0]], list[float]()
        for right in pieces[1:]:
            self.resolve(found, kinks, right, 0)
        return found, np.array(kinks)

    def piece(self, centre: float, side: float, width: float) -> Piece:
        """Three answers that lie on one piece: around an angle, or on one side of it."""
        for _ in range(14):
            angles = np.sort(centre + width * np.array([-0.5, 0.07, 0.5]) + side * width / 2.0)
            one = Piece(angles, self.ask(angles))
            sizes = np.linalg.svd(one.seen, compute_uv=False)
            if sizes[2] < self.options.doubt * self.unit:
                return one
            centre += 0.0 if side else 0.31 * width
            width *= 0.2
        raise Unclear("z is not affine on any short piece of a line")

    def allowed(self, one: Piece, distance: float) -> float:
        """How far a direction may seem to lie outside of the plane of a piece, so far from it."""
        return self.options.doubt * self.unit * (1.0 + distance / one.width)

    def alike(self, left: Piece, right: Piece) -> bool:
        """Whether two pieces are one."""
        reach = right.high - left.low
        return bool(
            left.off(right.seen).max() < self.allowed(left, reach)
            and right.off(left.seen).max() < self.allowed(right, reach)
        )

    def resolve(self, found: list[Piece], kinks: list[float], right: Piece, depth: int) -> None:
        """Appends what lies between the last piece found and this one, and this one."""
        left = found[-1]
        gap = right.low - left.high
        if depth > 60 or gap < self.resolution:
            raise Unclear("kinks lie closer than the answers resolve")
        # a piece is trusted to some times its width: it is grown towards the gap first
        while gap > 8.0 * left.width:
            angle = np.array([left.high + min(6.0 * left.width, 0.4 * gap)])
            seen = self.ask(angle)
            if left.off(seen)[0] > self.allowed(left, 8.0 * left.width):
                break
            left = found[-1] = left.joined(angle, seen)
            gap = right.low - left.high
        while gap > 8.0 * right.width:
            angle = np.array([right.low - min(6.0 * right.width, 0.4 * gap)])
            seen = self.ask(angle)
            if right.off(seen)[0] > self.allowed(right, 8.0 * right.width):
                break
            right = right.joined(angle, seen)
            gap = right.low - left.high
        if self.alike(left, right):
            found[-1] = left.joined(right.angles, right.seen)
            return
        a, b = left.plane, right.plane
        _, sines, axes = np.linalg.svd(b - a @ (a.T @ b), full_matrices=False)
        # narrow pieces have planes that tilt
        tilt = self.options.doubt * self.unit / min(left.width, right.width)
        if sines[1] < self.allowed(left, gap) + self.allowed(right, gap) and sines[0] > tilt:
            shared = b @ axes[1]
            first, second = (angle_of(one.solve(), shared) for one in (left, right))
            slack = 1e-3 * gap + 1e-12
            inside = left.high - slack < min(first, second)
            inside = inside and max(first, second) < right.low + slack
            if inside and abs(first - second) < 0.05 * gap + slack:
                # the wider piece tells it better
                kinks.append(first if left.width > right.width else second)
                found.append(right)
                return
        middle = self.piece(left.high + 0.5 * gap, 0.0, 0.1 * gap)
        if middle.low <= left.high or middle.high >= right.low:
            raise Unclear("kinks lie closer than the answers resolve")
        self.resolve(found, kinks, middle, depth + 1)
        self.resolve(found, kinks, right, depth + 1)


@dataclass(frozen=True, eq=False)
class Path:
    """z along a line, up to one factor: Z on each piece, the kinks' angles, jumps (outer weights)
    of neurons whose argument grows by one per unit of tan φ."""

    tables: Float[Array, "n p 2"]
    kinks: Float[Array, " m"]
    jumps: Float[Array, "m p"]


def chain_pieces(pieces: list[Piece], kinks: Float[Array, " m"], ask: Directions) -> Path:
    """Every piece asked again over its whole length, and the factors from continuity."""
    ends = np.concatenate([[pieces[0].low], kinks, [pieces[-1].high]])
    tables: list[Array] = []
    for i, one in enumerate(pieces):
        low, high = ends[i], ends[i + 1]
        angles = low + (high - low) * np.array([0.03, 0.5, 0.97])
        one = one.joined(angles, ask(angles))
        table = one.solve()
        table = table / np.linalg.norm(table)
        if i:
            f = features(kinks[i - 1 : i])[0]
            before, after = tables[-1] @ f, table @ f
            table = table * float(before @ after / (after @ after))
        tables.append(table)
    steps = np.diff(np.array(tables), axis=0)
    normals = np.column_stack([-np.tan(kinks), np.ones(len(kinks))])
    jumps = np.einsum("mpa,ma->mp", steps, normals) / np.sum(normals**2, axis=1)[:, None]
    return Path(np.array(tables), kinks, jumps)


# --- 3: rows of the neurons -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Line:
    """x = origin + t heading."""

    origin: Float[Array, " d"]
    heading: Float[Array, " d"]

    def points(self, t: Float[Array, " n"]) -> Float[Array, "n d"]:
        return self.origin + np.asarray(t)[:, None] * self.heading


def choose_bases(path: Path, numbers: int, spare: int) -> list[int]:
    """Pieces: the first, the last and the longest of every stretch of kinks that one answer can
    tell apart."""
    ends = np.concatenate([[-np.pi / 2], path.kinks, [np.pi / 2]])
    lengths, count = np.diff(ends), len(path.kinks)
    stretches = -(-count // max(1, int(0.75 * numbers))) + spare
    found = {0, count}
    for part in np.array_split(np.arange(count + 1), stretches):
        if len(part):
            found.add(int(part[np.argmax(lengths[part])]))
    return sorted(found)


def find_rows(
    path: Path, line: Line, ask: Callable[[Array], Array], unit: float, options: LineOptions
) -> tuple[Array, Array, Array]:
    """J and the constant left of all kinks, and the rows (inner, bias) of the neurons. `ask` gives
    directions of z at points (n, d), with roundings of `unit`. Steps are short at first. Where
    that loses too many digits, the rows that these show tell how far one may go in each direction
    until the next kink."""
    # a neuron whose kink is far along the line lies nearly along it: its row may be long
    long = np.hypot(1.0, np.tan(path.kinks)) * options.steep / np.linalg.norm(line.heading)
    short = np.repeat(long[:, None], len(line.heading), axis=1)
    found = solve_rows(path, line, ask, options, short)
    if options.steep**2 * unit <= ACCURACY:  # short steps lose so much, near kinks twice
        return found
    return solve_rows(path, line, ask, options, found[2][:, :-1])


def solve_rows(
    path: Path,
    line: Line,
    ask: Callable[[Array], Array],
    options: LineOptions,
    inner: Float[Array, "m d"],
) -> tuple[Array, Array, Array]:
    """The same with steps that cross no kink of neurons with these rows."""
    p, count = path.jumps.shape[1], len(path.kinks)
    end = np.pi / 2 - options.margin
    ends = np.concatenate([[-end], path.kinks, [end]])
    kinks = np.tan(path.kinks)
    rows, right, places, values = [], [], [], []
    for k in choose_bases(path, p - 1, options.spare):
        angle = (ends[k] + ends[k + 1]) / 2.0
        t = float(np.tan(angle))
        place = line.points(np.array([t]))[0]
        steps = np.min(0.5 * np.abs(t - kinks)[:, None] / np.maximum(np.abs(inner), TINY), axis=0)
        steps = np.minimum(steps, np.linalg.norm(place))
        seen = ask(np.concatenate([place[None], place + np.diag(steps)]))
        z = (
            np.linalg.norm(path.tables[k] @ features(np.array([angle]))[0])
            / np.cos(angle)
            * seen[0]
        )
        on = (np.arange(count) < k).astype(float)
        table = np.hstack([np.eye(p), (on[:, None] * path.jumps).T])
        # z + step table u is along what is seen: all beside that vanishes
        beside = np.eye(p) - np.einsum("ip,iq->ipq", seen[1:], seen[1:])
        rows.append(beside @ table)
        right.append(-(beside @ z) / steps[:, None])
        places.append((place, on))
        values.append(z)
    tables, rights = np.concatenate(rows, axis=1), np.concatenate(right, axis=1)
    scale = np.linalg.norm(tables[0], axis=0)
    if not (scale > 0).all():
        raise Unclear("a neuron is on at no base point")
    found = np.array(
        [
            np.linalg.lstsq(table / scale, one, rcond=None)[0] / scale
            for table, one in zip(tables, rights, strict=True)
        ]
    )  # (d, p + m)
    slope, inner = found[:, :p].T, found[:, p:].T
    bias = -np.sum(inner * line.points(kinks), axis=1)
    place, on = places[0]
    constant = values[0] - slope @ place - (on * (inner @ place + bias)) @ path.jumps
    return slope, constant, np.column_stack([inner, bias])


# --- the network ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Oriented:
    """Neurons turned as the residual wants them, the factor of z taken out."""

    inner: Float[Array, "m d"]
    bias: Float[Array, " m"]
    outer: Float[Array, "m p"]
    offset: Float[Array, " p"]
    sign: float  # of the gains, relative to those that were assumed


def orient(
    slope: Array, constant: Array, rows: Array, jumps: Array, plane: Float[Array, "d p"]
) -> Oriented:
    """λ and s from slope = λ planeᵀ - Σ s_j outer_j inner_jᵀ; raises Unclear where no s_j are near
    zero or one."""
    inner, bias = rows[:, :-1], rows[:, -1]
    count = len(inner)
    products = np.einsum("mp,md->pdm", jumps, inner).reshape(-1, count)
    sizes = np.linalg.norm(products, axis=0)
    table = np.column_stack([plane.T.ravel(), -products / sizes])
    solution, *_ = np.linalg.lstsq(table, slope.ravel(), rcond=None)
    factor, share = float(solution[0]), solution[1:] / sizes
    back = np.round(share)
    if not np.isin(back, (0.0, 1.0)).all() or np.abs(share - back).max() > 0.1 or factor == 0:
        raise Unclear("which way the neurons are turned was not seen")
    way = 1.0 - 2.0 * back
    offset = constant + (back * bias) @ jumps
    return Oriented(way[:, None] * inner, way * bias, jumps / factor, offset / factor,
                    float(np.sign(factor)))  # fmt: skip


# --- 4: lengths of the rows -----------------------------------------------------------------------


def settle_far_away(
    known: Oriented, norm: Norm, least: float, paid: Paid, unit: float, rng: np.random.Generator
) -> Oriented:
    """Neurons that explain all answers far from every kink, where a smooth activation is a ReLU:
    kinks are then placed as exactly as these answers can place them. `least`: length of a token
    from which it is far."""
    (tokens, answers), plane = paid.pairs()[0], norm.plane
    points, lengths = tokens[:, 0], np.linalg.norm(known.inner, axis=1)
    apart = np.abs(points @ known.inner.T + known.bias) / lengths
    beside = 0.01  # of a token's length: closer to a kink, it is not far from it
    sizes = np.linalg.norm(points, axis=1)
    far = (sizes > least) & (apart.min(axis=1) > beside * sizes)
    network = Mlp(
        known.inner, known.bias, plane @ known.outer.T, activation="relu",
        offset=plane @ known.offset,
    )  # fmt: skip
    start = Block(
        None, network, norm="post", kind=norm.kind, gain=known.sign * norm.gain, bias=norm.bias
    )
    refined = refine_block(start, [(tokens[far], answers[far])], unit, rng).block
    assert refined.mlp is not None
    found = refined.mlp
    outer, offset = outer_table(found).T @ plane, found.offset @ plane
    return Oriented(found.inner, found.inner_bias, outer, offset, known.sign)


def put_on_kinks(points: Float[Array, "m d"], known: Oriented) -> Float[Array, "m d"]:
    """The nearest points at which the neurons' arguments are zero."""
    squares = np.sum(known.inner**2, axis=1)
    heights = np.sum(points * known.inner, axis=1) + known.bias
    return np.asarray(points - (heights / squares)[:, None] * known.inner)


# φ(u) - max(u, 0) = -|u| tail(-|u|): the inverse of the tail
TAILS: dict[str, Callable[[Array], Array]] = {"gelu": ndtri, "silu": logit}


def find_lengths(
    known: Oriented,
    plane: Float[Array, "d p"],
    points: Float[Array, "m d"],
    ask: Callable[[Array], Array],
) -> tuple[Float[Array, " m"], Float[Array, " m"]]:
    """Beside its kink, at an argument -s, a smooth neuron of length α adds outer s tail(-α s) less
    than a ReLU does; α s as well as the tail's value is of order one. `points` lie on the kinks.
    Found: the tail's values, NaN where they were not seen, and s."""
    slope, constant, jumps = plane.T, known.offset, known.outer
    rows = np.column_stack([known.inner, known.bias])
    inner = rows[:, :-1]
    lengths = np.linalg.norm(inner, axis=1)
    normals = inner / lengths[:, None]
    steps, tails = np.ones(len(rows)), np.full(len(rows), np.nan)
    for _ in range(7):
        (wanted,) = np.nonzero(~((tails > 0.03) & (tails < 0.35)))
        if not len(wanted):
            break
        near = points[wanted] - steps[wanted, None] * normals[wanted]
        far = points[wanted] - 40.0 * steps[wanted, None] * normals[wanted]
        seen, before = ask(near), ask(far)
        for i, j in enumerate(wanted):
            on = rows[:, :-1] @ far[i] + rows[:, -1] > 0
            on[j] = False
            local = slope + np.einsum("mp,md->pd", jumps[on], inner[on])
            z = local @ far[i] + constant + rows[on, -1] @ jumps[on]
            z = np.linalg.norm(z) * before[i] + local @ (near[i] - far[i])
            beside = jumps[j] - (jumps[j] @ seen[i]) * seen[i]
            less = float(z @ beside / (beside @ beside))
            tails[j] = less / (steps[j] * lengths[j])
            steps[j] *= 1.0 if 0.03 < tails[j] < 0.35 else 2.5 if tails[j] >= 0.35 else 0.4
    return np.where((tails > 0) & (tails < 0.5), tails, np.nan), steps * lengths


# --- 5: epsilon -----------------------------------------------------------------------------------


def measure_last_epsilon(
    block: Block, tokens: Float[Array, "n 1 d"], answers: Float[Array, "n d"]
) -> float:
    """The median of what answers say of epsilon, beside their rounding."""
    assert block.mlp is not None
    z = (tokens[:, 0] + block.mlp(tokens[:, 0])) @ block.norms[0].plane
    found, _ = epsilons_behind(block.norms[0], z, answers)
    return float(max(np.median(found), LEAST_EPSILON))


def random_tokens(known: Oriented, count: int, rng: np.random.Generator) -> Float[Array, "n d"]:
    """Random tokens, and for neurons that these hardly see on one side others on that side, near
    the kink: a neuron has one unknown more than a token has numbers."""
    width = known.inner.shape[1]
    need = int(1.4 * (width + 1)) + 2
    tokens = rng.standard_normal((count, width))
    lengths = np.linalg.norm(known.inner, axis=1)
    for row, bias, length in zip(known.inner, known.bias, lengths, strict=True):
        reach = (tokens @ row + bias) / length
        for side in (-1.0, 1.0):
            more = need - int(np.sum(side * reach > 0))
            if more > 0:
                fresh = rng.standard_normal((more, width))
                wanted = side * np.abs(rng.standard_normal(more))
                steps = wanted - (fresh @ row + bias) / length
                tokens = np.concatenate([tokens, fresh + (steps / length)[:, None] * row])
    return np.asarray(tokens)


# --- all of it ------------------------------------------------------------------------------------


def find_post_norm_mlp(
    box: Asker, rng: np.random.Generator, options: LineOptions | None = None
) -> tuple[list[Block], Pairs]:
    """The sublayer to a few digits, once for each activation that it may have, and the queries and
    answers that refine it; raises NotThisBlock or Unclear."""
    options = LineOptions() if options is None else options
    paid = Paid(box.oracle, longest=1)
    box = replace(box, oracle=paid)
    norm = find_norm(box, rng)
    plane, width = norm.plane, box.width

    def ask(points: Float[Array, "n d"], purpose: str = "beside the line") -> Array:
        answers = box(points[:, None], purpose)
        seen = ((answers - norm.bias) / norm.gain) @ plane
        return np.asarray(seen / np.linalg.norm(seen, axis=1, keepdims=True))

    smooth = is_smooth(ask, width, box.error, rng)
    size = options.find_distance(box.error) if smooth else 1.0
    origin, heading = size * rng.standard_normal((2, width))
    line = Line(origin, heading / np.linalg.norm(heading) * np.linalg.norm(origin))

    def along(angles: Float[Array, " n"]) -> Array:
        """Directions on the line."""
        return ask(line.points(np.tan(angles)), "line")

    pieces, kinks = LineSearch(along, box.error, options).run()
    if not len(kinks):
        raise NotThisBlock("no neuron bends on a line")
    path = chain_pieces(pieces, kinks, along)
    slope, constant, rows = find_rows(path, line, ask, box.error, options)
    known = orient(slope, constant, rows, path.jumps, plane)
    candidates = {"relu": np.ones(len(rows))}
    if smooth:
        least = 0.3 * float(np.linalg.norm(line.origin))
        known = settle_far_away(known, norm, least, paid, box.error, rng)
        points = put_on_kinks(line.points(np.tan(path.kinks)), known)
        tails, steps = find_lengths(known, plane, points, ask)
        if np.isnan(tails).mean() > options.unseen:
            raise Unclear("how sharply the neurons bend was not seen")
        lengths = {name: -tail(tails) / steps for name, tail in TAILS.items()}
        # those that were not seen are taken for usual ones: the refinement knows better
        candidates = {
            name: np.where(np.isnan(length), np.nanmedian(length), length)
            for name, length in lengths.items()
        }
    unknowns = len(rows) * (width + 1 + plane.shape[1]) + 3 * width
    beside = paid.singles_apart(1e5)
    tokens = random_tokens(known, int(1.3 * unknowns / plane.shape[1]) + 8, rng)
    tokens = box.representable(tokens[:, None])
    answers = box(tokens, "refinement")
    found = []
    for name, length in candidates.items():
        network = Mlp(
            length[:, None] * known.inner,
            length * known.bias,
            plane @ (known.outer / length[:, None]).T,
            activation=name,
            offset=plane @ known.offset,
        )
        gain = known.sign * norm.gain
        block = Block(None, network, norm="post", kind=norm.kind, gain=gain, bias=norm.bias)
        epsilon = measure_last_epsilon(block, tokens, answers)
        found.append(Block(None, network, norm="post", kind=norm.kind, epsilons=[epsilon],
                           gain=gain, bias=norm.bias))  # fmt: skip
    return found, [(tokens, answers), beside]
