"""A smooth network on a sphere: its neurons are the rank-one matrices in the span of its Hessians.

Statement.  Answers on a sphere |x| = R (behind a norm, inside a ball, or anywhere) determine all
            neurons, their number included, if s(s - 1)/2 > m + 1 for some s <= n - 2: m = 4n from
            n = 15 on. About 3.5 times as many numbers as there are parameters.
            Inside a ball nothing keeps U from being all of R^n: s <= n there.
Queries.    Unit sphere, orthonormal split into U (s), X (p >= 2) and Z. (1) At ≈ m/D + 1 places in
            X, Hessians on U: steps ±θ along each axis, +θ along pairs of them (both ways where
            digits are few). (2) At ≈ m/D + 3 places in U, first and second differences along
            1.4 (m/D + 1) directions of U, and one step along every axis of X and Z.
Algebra.    Along great circles the Hessian of output d is Σ_j v_dj φ''(a_j) (Uw_j)(Uw_j)ᵀ plus a
            multiple of the identity. Their span has dimension m + 1: m is its numerical rank.
            Rank-one elements: power steps x -> normalise(P(xxᵀ) x), P the projection on the span,
            then Gauss-Newton on "xxᵀ is orthogonal to the complement". Starts: eigenvectors of
            random elements orthogonal to what was found. With all directions known everything is
            linear: coefficients of the Hessians are v̂_j γ_jk, differences of gradients
            v̂_j Δη_jk, steps along z give w_j.z / |Uw_j|. What is left is one scalar fit in two
            unknowns per neuron, s_j = |Uw_j| and b_j, from γ = κ s² φ''(a), Δη = κ s Δφ'(a):
            whichever activation fits best is the one.
Fails.      Where the span is not smaller than the space (n < 15 for m = 4n); where neurons are so
            weak that their part of the Hessians drowns in the differences' error.
Source.     Rank-one decomposition of a subspace (Kileel, Klock, Pereira 2021) on sketched Hessians.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, Array, Float, Int
from keyhole.fitting.solver import ManyProblems, Stopping, descend_many
from keyhole.linalg.symmetric import flat, unflat
from keyhole.models.mlp import ACTIVATIONS
from keyhole.network.weights import Weights

Ask = Callable[[Array, str], Array]  # points of the unit sphere, purpose -> answers

GROWTH = (1.0, 2.0, 3.0, 4.15, 5.5, 7.0, 9.0)  # neurons prepared for, per entry of the input


class NotEnough(Exception):
    """The Hessians do not determine the network."""


# Relative error of a second difference both ways, truncation and rounding balanced, from which on
# the weakest of some dozens of neurons may be hidden by it.
BLURRED = 1e-6
BALANCED = 1.3  # angle of that difference, in fourth roots of four roundings


def error_of_differences(unit: float) -> float:
    """Relative error of a second difference both ways, truncation and rounding balanced."""
    return float(BALANCED**2 * (4.0 * unit) ** 0.5)


@dataclass(frozen=True)
class Steps:
    """How a box of some precision is looked at. second, places, first: angles of second differences
    for Hessians, of those along few directions (both ways), and of first differences: they balance
    truncation against the rounding of the answers. blur: 0 where errors of the Hessians hide no
    neuron, 1 where they hide as much as in single precision: more places and dimensions make up
    for them. room: dimensions of the symmetric matrices on U, relative to the span's. spare:
    Hessians beyond those that the span needs, relative. gap: between the singular values that count
    and those that do not."""

    second: float
    places: float
    first: float
    two_sided: bool
    blur: float = 0.0
    room: float = 1.25
    spare: float = 0.15
    gap: float = 6.0

    @property
    def blurred(self) -> bool:
        return self.blur > 0.0

    @property
    def ways(self) -> tuple[float, ...]:
        """In which pairs of axes are looked along."""
        return (1.0, -1.0) if self.two_sided else (1.0,)

    @classmethod
    def of(cls, unit: float, width: int) -> "Steps":
        """Error of a second difference: θ or θ² against 4 unit / θ². The more neurons, the weaker
        the weakest among them: networks of more than 200 inputs need the better differences."""
        error, worst = error_of_differences(unit), error_of_differences(SINGLE_ROUNDOFF)
        blur = float(np.clip(np.log(error / BLURRED) / np.log(worst / BLURRED), 0.0, 1.0))
        both, two_sided = error**0.5, blur > 0.0 or width >= 200
        return cls(
            second=both if two_sided else 1.6 * (4.0 * unit) ** (1 / 3),
            places=both,
            first=0.6 * unit ** (1 / 3) if blur > 0.0 else 4.0 * unit**0.5,
            two_sided=two_sided,
            blur=blur,
            room=(1.2 if two_sided else 1.25) + 0.55 * blur,
            spare=0.15 + 0.75 * blur,
            gap=6.0 * (2.5 / 6.0) ** blur,
        )

    def balanced(
        self, ask: Ask, frame: Float[Array, "n n"], unit: float, inside: bool = False
    ) -> "Steps":
        """Angles for the network at hand. Where second differences are blurred, their truncation
        matters: it is θ² times what twice the step adds, which is measured. Rounding is
        some 6 unit / θ² of the answers, sums of many terms."""
        base, ways = frame[0] * (0.7 if inside else 1.0), frame[1:9]
        steps = [k * self.second * ways for k in (1, -1, 2, -2)]
        values = ask(along(base, np.concatenate([*steps, 0.0 * ways[:1]]), inside), "scale")
        beside, centre = values[:-1].reshape(2, 2, len(ways), -1), values[-1]
        bends = (beside.sum(axis=1) - 2 * centre) / self.second**2
        bends[1] /= 4.0
        truncation = np.sqrt(np.mean((bends[1] - bends[0]) ** 2)) / (3.0 * self.second**2)
        rounding = 6.0 * unit * np.sqrt(np.mean(values**2))
        share = float((rounding / max(truncation, TINY)) ** 0.25) / self.second
        share = min(share, 2.0)  # a network may be next to quadratic around one place
        return replace(
            self,
            second=share * self.second,
            places=share * self.places,
            first=share * self.first,
        )


def along(
    base: Float[Array, " n"], steps: Float[Array, "k n"], straight: bool = False
) -> Float[Array, "k n"]:
    """Points of the unit sphere reached from `base` along great circles; or straight on."""
    if straight:
        return np.asarray(base + steps)
    length = np.linalg.norm(steps, axis=1, keepdims=True)
    return np.asarray(base * np.cos(length) + steps * (np.sin(length) / np.maximum(length, TINY)))


class HessianTable:
    """Values around the places in X, asked as the table grows: more places, more axes. `inside` a
    ball X and U are both the whole space."""

    def __init__(
        self, ask: Ask, frame: Float[Array, "n n"], p: int, steps: Steps, inside: bool = False
    ) -> None:
        self.ask, self.p, self.steps, self.inside = ask, p, steps, inside
        self.x_axes, self.u_axes = (frame, frame) if inside else (frame[:p], frame[p:])
        self.places = np.zeros((0, len(frame)))
        self.known: list[int] = []  # axes asked at each place
        self.centre: list[Array] = []
        self.axis: list[Array] = []  # (2, s, D): one step forth and back
        self.pairs: list[Array] = []  # (ways, s, s, D)

    def grow(self, size: int, places: Float[Array, "k p"]) -> None:
        """Asks what is missing for `size` axes at these places (the first ones being known)."""
        self.places = places @ self.x_axes
        for k in range(len(self.places)):
            have = self.known[k] if k < len(self.known) else 0
            if have < size:
                self._grow_place(k, have, size)

    def _grow_place(self, k: int, have: int, size: int) -> None:
        """Asks one place for the axes from `have` to `size`."""
        base, theta, ways = self.places[k], self.steps.second, self.steps.ways
        new = [(way, i) for way in (1.0, -1.0) for i in range(have, size)]
        both = [(way, i, j) for way in ways for j in range(max(have, 1), size) for i in range(j)]
        tangents = [theta * way * self.u_axes[i] for way, i in new]
        tangents += [theta * way * (self.u_axes[i] + self.u_axes[j]) for way, i, j in both]
        if not have:
            tangents.append(np.zeros(len(base)))
        values = self.ask(along(base, np.array(tangents), self.inside), "Hessians")
        outputs = values.shape[1]
        axis = np.zeros((2, size, outputs))
        pairs = np.zeros((len(ways), size, size, outputs))
        for (way, i), value in zip(new, values, strict=False):
            axis[int(way < 0), i] = value
        for (way, i, j), value in zip(both, values[len(new) :], strict=False):
            pairs[int(way < 0), i, j] = pairs[int(way < 0), j, i] = value
        if have:
            axis[:, :have], pairs[:, :have, :have] = self.axis[k], self.pairs[k]
            self.axis[k], self.pairs[k], self.known[k] = axis, pairs, size
        else:
            self.centre.append(values[-1])
            self.axis.append(axis)
            self.pairs.append(pairs)
            self.known.append(size)

    def hessians(self, size: int) -> Float[Array, "k D s s"]:
        theta, found = self.steps.second, []
        for centre, axis, pairs in zip(self.centre, self.axis, self.pairs, strict=True):
            table = np.zeros((size, size, len(centre)))
            for way, part in enumerate(pairs[:, :size, :size]):
                single = axis[way, :size]
                table += part - single[:, None] - single[None] + centre
            table /= len(pairs) * theta**2
            own = (axis[0, :size] + axis[1, :size] - 2 * centre) / theta**2
            table[np.arange(size), np.arange(size)] = own
            found.append(table.transpose(2, 0, 1))
        return np.array(found)

    def gradients(self, size: int) -> Float[Array, "k s D"]:
        """On U, by central differences."""
        return np.array(
            [(axis[0, :size] - axis[1, :size]) / (2 * self.steps.second) for axis in self.axis]
        )


@dataclass(frozen=True, eq=False)
class Span:
    """The span of Hessians and the identity: orthonormal bases of it and of its complement."""

    inside: Float[Array, "r P"]
    outside: Float[Array, "q s s"]
    gap: float

    @property
    def rank(self) -> int:
        """Without the identity."""
        return len(self.inside) - 1

    @property
    def tight(self) -> float:
        """How far outside a rank-one element may be: the less clear the span, the further."""
        return min(8.0 / self.gap, 0.02 if self.gap > 12.0 else 0.12)


def find_span(hessians: Float[Array, "k D s s"], most: int, clear: float) -> Span | None:
    """The span if its dimension, at most `most`, shows as a gap in the singular values."""
    s = hessians.shape[-1]
    stack = flat(hessians.reshape(-1, s, s))
    unit = flat(np.eye(s)[None])[0] / np.sqrt(s)
    stack = stack - np.outer(stack @ unit, unit)
    last = min(most, *(size - 2 for size in stack.shape))
    low = max(1, int(0.02 * most))
    if last <= low:
        return None
    gram = stack.T @ stack
    largest = float(np.trace(gram))
    squares, vectors = np.linalg.eigh(gram + 2.0 * largest * np.outer(unit, unit))
    squares, vectors = squares[::-1][1:], vectors[:, ::-1]  # the identity comes first
    values = np.sqrt(np.maximum(squares, 1e-16 * squares[0]))
    ratios = values[low - 1 : last] / values[low : last + 1]
    best = int(np.argmax(ratios))
    rank, gap = low + best, float(ratios[best])
    if gap < clear:
        return None
    return Span(vectors[:, : rank + 1].T, unflat(vectors[:, rank + 1 :].T, s), gap)


def rank_ones(
    span: Span, count: int, rng: np.random.Generator, allowed: float | None = None
) -> Float[Array, "m s"]:
    """Unit vectors whose squares lie in the span: `count` of them, or as many as are found.
    `allowed`: what of a square may lie outside."""
    s = span.outside.shape[-1]
    outside = span.outside.reshape(len(span.outside), s * s)
    allowed = span.tight if allowed is None else allowed
    found = np.zeros((0, s))
    plain = False  # every other time after a round that found nothing new
    for _ in range(60):  # each finds about a third of what is missing
        missing = count - len(found)
        if missing <= 0:
            break
        batch = max(16, min(count // 2, 4 * missing))
        starts = _starts(span, found, batch, plain, rng)
        x = _near(outside, _power(outside, starts, 16))
        x, off = _polished(span.outside, x)
        for one in x[np.argsort(off)][: int((off < allowed).sum())]:
            if len(found) < count and (not len(found) or np.abs(found @ one).max() < 0.995):
                found = np.vstack([found, one])
        plain = not plain and len(found) == count - missing
    if len(found):
        found, _ = _polished(span.outside, found)
    return found


def _starts(
    span: Span, found: Array, count: int, plain: bool, rng: np.random.Generator
) -> Float[Array, "k s"]:
    """Extreme eigenvectors of random elements of the span, orthogonal to what was found."""
    s = span.outside.shape[-1]
    mixed = rng.standard_normal((count, len(span.inside)))
    if len(found) and not plain:
        seen = flat(found[:, :, None] * found[:, None, :]) @ span.inside.T
        mixed = mixed - _solved(seen @ seen.T, seen @ mixed.T).T @ seen
    _, vectors = np.linalg.eigh(unflat(mixed @ span.inside, s))
    ends = np.where(rng.random(count) < 0.5, 0, s - 1)
    return np.asarray(vectors[np.arange(count), :, ends])


def _power(outside: Float[Array, "q t"], x: Float[Array, "k s"], steps: int) -> Array:
    s = x.shape[1]
    outside = outside.astype(np.float32)
    x = x.astype(np.float32)
    for _ in range(steps):
        square = (x[:, :, None] * x[:, None, :]).reshape(len(x), s * s)
        taken = (square @ outside.T) @ outside
        x = x - (taken.reshape(-1, s, s) @ x[:, :, None])[:, :, 0]
        x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.float32(1e-30))
    return x.astype(np.float64)


def _near(outside: Float[Array, "q t"], x: Float[Array, "k s"]) -> Float[Array, "j s"]:
    """Those of which so little lies outside the span that Gauss-Newton may take over."""
    square = (x[:, :, None] * x[:, None, :]).reshape(len(x), -1)
    return x[((square @ outside.T) ** 2).sum(axis=1) < 0.2]


def _polished(
    outside: Float[Array, "q s s"], x: Float[Array, "k s"], steps: int = 8
) -> tuple[Array, Array]:
    """Gauss-Newton on N(x, x) = 0, |x| = 1, and what is left of N(x, x)."""
    s = x.shape[1]
    table = outside.reshape(-1, s)
    part = max(1, 2**24 // max(1, len(table)))
    done, off = [np.zeros((0, s))], [np.zeros(0)]
    for start in range(0, len(x), part):
        y = x[start : start + part].copy()
        for step in range(steps + 1):
            jacobian = (y @ table.T).reshape(len(y), len(outside), s)
            value = (jacobian @ y[:, :, None])[:, :, 0]
            if step == steps:
                break
            normal = 4.0 * jacobian.transpose(0, 2, 1) @ jacobian + y[:, :, None] * y[:, None, :]
            normal += 1e-12 * np.eye(s)
            right = 2.0 * (jacobian.transpose(0, 2, 1) @ value[:, :, None])
            y = y - np.linalg.solve(normal, right)[:, :, 0]
            y /= np.maximum(np.linalg.norm(y, axis=1, keepdims=True), TINY)
        done.append(y)
        off.append(np.linalg.norm(value, axis=1))
    return np.concatenate(done), np.concatenate(off)


def gated_pairs(span: Span, count: int, rng: np.random.Generator) -> Float[Array, "2 m s"]:
    """Pairs g, u of orthogonal unit vectors with gg and gu + ug in the span: `count` of them, or
    as many as are found. Rank-one elements alone are degenerate here: gg + ε(gu + ug) is one too,
    to second order. Both together are regular."""
    s = span.outside.shape[-1]
    outside = span.outside.reshape(len(span.outside), s * s)
    allowed = span.tight
    found = np.zeros((2, 0, s))
    plain = False
    for _ in range(60):
        missing = count - found.shape[1]
        if missing <= 0:
            break
        batch = max(16, min(count // 2, 4 * missing))
        starts = _starts(span, found[0], batch, plain, rng)
        x = _near(outside, _power(outside, starts, 120))
        pairs, off = _polished_pairs(span.outside, x, 20)
        for k in np.argsort(off)[: int((off < allowed).sum())]:
            if not found.shape[1] or np.abs(found[0] @ pairs[0, k]).max() < 0.995:
                found = np.concatenate([found, pairs[:, k : k + 1]], axis=1)
        plain = not plain and found.shape[1] == count - missing
    return found


def _polished_pairs(
    outside: Float[Array, "q s s"], g: Float[Array, "k s"], steps: int
) -> tuple[Float[Array, "2 k s"], Float[Array, " k"]]:
    """Gauss-Newton on N(g, g) = 0, N(g, u) = 0, g and u orthonormal."""
    s = g.shape[1]
    table = outside.reshape(-1, s)

    def applied(y: Array) -> Array:
        return (y @ table.T).reshape(len(y), len(outside), s)

    across = np.eye(s) - g[:, :, None] * g[:, None, :]
    image = applied(g) @ across
    # of all directions orthogonal to g, the one that N(g, .) sees least
    _, vectors = np.linalg.eigh(
        image.transpose(0, 2, 1) @ image + 1e3 * g[:, :, None] * g[:, None, :]
    )
    u = vectors[:, :, 0]
    eye = 1e-12 * np.eye(2 * s)
    off = np.zeros(len(g))
    for step in range(steps + 1):
        by_g, by_u = applied(g), applied(u)
        first = (by_g @ g[:, :, None])[:, :, 0]
        second = (by_g @ u[:, :, None])[:, :, 0]
        off = np.sqrt((first**2).sum(axis=1) + (second**2).sum(axis=1))
        if step == steps:
            break
        count, rows = len(g), len(outside)
        jacobian = np.zeros((count, 2 * rows + 3, 2 * s))
        jacobian[:, :rows, :s] = 2 * by_g
        jacobian[:, rows : 2 * rows, :s] = by_u
        jacobian[:, rows : 2 * rows, s:] = by_g
        jacobian[:, 2 * rows, :s] = 2 * g
        jacobian[:, 2 * rows + 1, s:] = 2 * u
        jacobian[:, 2 * rows + 2, :s], jacobian[:, 2 * rows + 2, s:] = u, g
        rest = [(g**2).sum(axis=1) - 1, (u**2).sum(axis=1) - 1, (g * u).sum(axis=1)]
        value = np.concatenate([first, second, np.array(rest).T], axis=1)
        transposed = jacobian.transpose(0, 2, 1)
        move = np.linalg.solve(transposed @ jacobian + eye, transposed @ value[:, :, None])
        length = np.linalg.norm(move, axis=1, keepdims=True)
        move = (move / np.maximum(1.0, 2.0 * length))[:, :, 0]
        g, u = g - move[:, :s], u - move[:, s:]
        g = g / np.maximum(np.linalg.norm(g, axis=1, keepdims=True), TINY)
        u = u - (u * g).sum(axis=1, keepdims=True) * g
        u = u / np.maximum(np.linalg.norm(u, axis=1, keepdims=True), TINY)
    return np.array([g, u]), off


def square_atoms(found: Float[Array, "b m s"]) -> Float[Array, "bm s s"]:
    """Matrices that a neuron adds to Hessians: gg, and for a gated one gu + ug."""
    atoms = [found[0][:, :, None] * found[0][:, None, :]]
    if len(found) == 2:
        mixed = found[0][:, :, None] * found[1][:, None, :]
        atoms.append(mixed + mixed.transpose(0, 2, 1))
    return np.concatenate(atoms)


def outer_directions(
    hessians: Float[Array, "k D s s"], found: Float[Array, "b m s"]
) -> tuple[Float[Array, "D m"], Float[Array, "b m k"]]:
    """Unit directions v̂ of the outer weights, and the Hessians' coefficients along them."""
    places, outputs, s, _ = hessians.shape
    blocks, neurons, _ = found.shape
    basis = flat(np.concatenate([square_atoms(found), np.eye(s)[None]]))
    stack = flat(hessians.reshape(-1, s, s))
    head, triangle = np.linalg.qr(basis.T)
    coefficients = solve_triangular(triangle, head.T @ stack.T)
    cube = coefficients[:-1].reshape(blocks, neurons, places, outputs)
    cube = cube.transpose(1, 0, 2, 3).reshape(neurons, blocks * places, outputs)
    _, _, right = np.linalg.svd(cube, full_matrices=False)
    outer = right[:, 0].T
    repeated = np.tile(outer, (1, blocks))
    traces = basis[:-1] @ basis[-1]
    gram = (basis[:-1] @ basis[:-1].T) * (repeated.T @ repeated)
    normal = np.block([[gram, (repeated * traces).T], [repeated * traces, s * np.eye(outputs)]])
    cubes = stack.reshape(places, outputs, -1)
    image = np.einsum("da,kda->ak", repeated, cubes @ basis[:-1].T, optimize=True)
    trace = (cubes @ basis[-1]).T  # (D, k)
    solved = np.linalg.solve(normal, np.vstack([image, trace]))
    return outer, solved[:-outputs].reshape(blocks, neurons, places)


@dataclass(frozen=True, eq=False)
class Sketch:
    """All that is linear. `rows`: of each neuron w / |Uw| for a plain network; for a gated one
    ĝ = g / |Ug| and û, the part of u that is orthogonal to g in U. `outer`: direction of the outer
    weights. `curvature` and `slope`: what the neuron adds to second and first derivatives at every
    place, the slope less that at the first place."""

    rows: Float[Array, "b m n"]
    outer: Float[Array, "D m"]
    places: Float[Array, "k n"]
    curvature: Float[Array, "b m k"]
    slope: Float[Array, "b m k"]


def read_sphere(
    ask: Ask,
    width: int,
    unit: float,
    rng: np.random.Generator,
    gated: bool | None = None,
    inside: bool = False,
) -> Sketch:
    """Neurons of a network from answers on the unit sphere of R^width, or inside it; whether they
    are gated is found out unless it is given."""
    steps = Steps.of(unit, width)
    frame = np.linalg.qr(rng.standard_normal((width, width)))[0].T
    if steps.blurred:
        steps = steps.balanced(ask, frame, unit, inside)
    table, span, size = grown_span(ask, frame, steps, rng, inside)
    found = np.zeros((1, 0, size))
    reasons = []
    if not gated:
        found = rank_ones(span, span.rank, rng)[None]
        if not found.shape[1]:
            reasons.append("no neuron")
        # few digits may show some dimensions too many: the fit will tell
        elif found.shape[1] < span.rank - (max(1, span.rank // 32) if steps.blurred else 0):
            reasons.append(f"{found.shape[1]} of {span.rank} neurons")
    if gated or (gated is None and reasons and span.rank % 2 == 0):
        found = gated_pairs(span, span.rank // 2, rng)
        reasons = reasons if found.shape[1] < span.rank // 2 else []
        if reasons or found.shape[1] < span.rank // 2:
            reasons.append(f"{found.shape[1]} of {span.rank // 2} gated neurons")
    if reasons:
        raise NotEnough("in the span of the Hessians were found " + " and ".join(reasons))
    outer, curvature = outer_directions(table.hessians(size), found)
    return around(ask, table, size, found, outer, curvature, steps, rng)


def grown_span(
    ask: Ask,
    frame: Float[Array, "n n"],
    steps: Steps,
    rng: np.random.Generator,
    inside: bool = False,
) -> tuple[HessianTable, Span, int]:
    """Hessians until their span is clearly smaller than what they could span."""
    width = len(frame)
    usual = 3  # number in GROWTH that the split into U and X makes room for
    growths = GROWTH[usual:] if steps.blurred else GROWTH  # a small gap is believed with room
    sizes = [axes_for(growth * (width + 1) + 1, steps.room) for growth in growths]
    p = int(np.clip(width - axes_for(GROWTH[usual] * (width + 1) + 1, steps.room), 2, 5))
    table = HessianTable(ask, frame, p, steps, inside)
    everywhere = spread_places(len(table.x_axes), 512, rng)
    if inside:  # with room for the steps
        everywhere *= rng.uniform(0.5, 0.9, (len(everywhere), 1))
    outputs = 0
    for growth, wanted in zip(growths, sizes, strict=True):
        size = min(wanted, len(table.u_axes))
        if size < 3:
            break
        if not outputs:
            table.grow(size, everywhere[:1])
            outputs = len(table.centre[0])
        dimension = growth * (width + 1) + 1
        count = int(np.ceil((1 + steps.spare) * dimension / outputs))
        table.grow(size, everywhere[: max(count, 3)])
        rows = len(table.places) * outputs
        most = int(min(size * (size + 1) / 2 / 1.1, size * (size - 1) / 2 - 2, rows / 1.05))
        span = find_span(table.hessians(size), most, steps.gap)
        if span is not None:
            return table, span, size
        if size < wanted:
            break
    raise NotEnough("the Hessians span all that they could: too many neurons for so few inputs")


def axes_for(dimension: float, room: float) -> int:
    """Dimensions s of U with room for a span of this dimension among its symmetric matrices."""
    s = 2
    while s * (s + 1) / 2 < room * dimension or s * (s - 1) / 2 < dimension + 1:
        s += 1
    return s


def room_for_neurons(width: int) -> int:
    """Neurons that Hessians on the axes of U could tell apart, X having two."""
    s = width - 2
    return s * (s - 1) // 2 - 2


def spread_places(p: int, count: int, rng: np.random.Generator) -> Float[Array, "k p"]:
    """Points of a sphere, every next one far from those before and their opposites."""
    places = np.zeros((0, p))
    for _ in range(count):
        trials = rng.standard_normal((24, p))
        trials /= np.linalg.norm(trials, axis=1, keepdims=True)
        closest = np.abs(trials @ places.T).max(axis=1, initial=0.0)
        places = np.vstack([places, trials[np.argmin(closest)]])
    return places


def around(
    ask: Ask,
    table: HessianTable,
    size: int,
    found: Float[Array, "b m s"],
    outer: Float[Array, "D m"],
    curvature: Float[Array, "b m k"],
    steps: Steps,
    rng: np.random.Generator,
) -> Sketch:
    """Places in U: bends there, and the parts of the rows outside U."""
    blocks, neurons, _ = found.shape
    outputs = len(outer)
    vectors = found.reshape(blocks * neurons, -1)
    repeated = np.tile(outer, (1, blocks))
    u_axes = table.u_axes[:size]
    rest = table.u_axes[size:]
    if not table.inside:
        rest = np.vstack([table.x_axes, rest])
    count = int(np.ceil(blocks * neurons / outputs)) + 3  # three more than the unknowns need
    ways = min(size - 1, int(np.ceil(1.4 * (blocks * neurons / outputs + 1))) + 1)
    places = rng.standard_normal((count, size))
    places /= np.linalg.norm(places, axis=1, keepdims=True)
    if table.inside:
        places *= rng.uniform(0.5, 0.9, (count, 1))
    theta, short = steps.places, steps.first
    base_gradient = table.gradients(size)  # (k, s, D)
    gram = (repeated.T @ repeated) * (vectors @ vectors.T)
    change = base_gradient[1:] - base_gradient[0]
    image = np.einsum("da,ksd,as->ak", repeated, change, vectors, optimize=True)
    slopes = [np.zeros(len(vectors)), *_solved(gram, image).T]
    bends = list(curvature.reshape(len(vectors), -1).T)
    beside = []
    for place in places:
        base = place @ u_axes
        tangents = rng.standard_normal((ways, size))
        if not table.inside:
            tangents -= np.outer(tangents @ place, place)
        tangents = np.linalg.qr(tangents.T)[0].T
        moved = tangents @ u_axes
        offsets = [theta * moved, -theta * moved, 0.0 * moved[:1], short * rest]
        if steps.blurred:
            offsets.append(-short * rest)
        queries = [along(base, part, table.inside) for part in offsets]
        values = ask(np.concatenate(queries), "places")
        forth, back, centre = values[:ways], values[ways : 2 * ways], values[2 * ways]
        after = values[2 * ways + 1 :]
        first = (forth - back) / (2 * theta) - tangents @ base_gradient[0]  # (ways, D)
        second = (forth + back - 2 * centre) / theta**2
        seen = tangents @ vectors.T  # (ways, b m)
        squares = seen[:, :neurons] ** 2
        if blocks == 2:
            mixed = 2 * seen[:, :neurons] * seen[:, neurons:]
            squares = np.hstack([squares, mixed])
        slopes.append(_coefficients(seen, repeated, first[:, None], identity=False)[:, 0])
        bends.append(_coefficients(squares, repeated, second[:, None], identity=True)[:, 0])
        there, kept = (short, 1.0) if table.inside else (np.sin(short), np.cos(short))
        if steps.blurred:
            beside.append((after[: len(rest)] - after[len(rest) :]) / (2 * there))
        else:
            beside.append((after - centre * kept) / there)
    slope, bend = np.array(slopes).T, np.array(bends).T
    rows = vectors @ u_axes
    if len(rest):
        seen = slope[:, len(base_gradient) :].T
        rows = rows + _coefficients(seen, repeated, np.array(beside), identity=True) @ rest
    return Sketch(
        rows.reshape(blocks, neurons, -1),
        outer,
        np.vstack([table.places, places @ u_axes]),
        bend.reshape(blocks, neurons, -1),
        slope.reshape(blocks, neurons, -1),
    )


def _coefficients(
    seen: Float[Array, "w a"],
    outer: Float[Array, "D a"],
    data: Float[Array, "w z D"],
    identity: bool,
) -> Float[Array, "a z"]:
    """c of data_w = Σ_a outer_a c_a seen_wa (+ a vector that is the same for all w), by normal
    equations: the matrix is a Hadamard product."""
    ways, _, outputs = data.shape
    gram = (seen.T @ seen) * (outer.T @ outer)
    image = np.einsum("wa,da,wzd->az", seen, outer, data, optimize=True)
    if not identity:
        return _solved(gram, image)
    beside = outer * seen.sum(axis=0)
    normal = np.block([[gram, beside.T], [beside, ways * np.eye(outputs)]])
    return _solved(normal, np.vstack([image, data.sum(axis=0).T]))[: outer.shape[1]]


def _solved(normal: Float[Array, "a a"], right: Float[Array, "a z"]) -> Float[Array, "a z"]:
    """Solution of normal equations, equilibrated."""
    scale = np.sqrt(np.maximum(np.diag(normal), TINY))
    matrix = normal / (scale[:, None] * scale)
    matrix[np.diag_indices(len(matrix))] += 1e-14
    factor = cho_factor(matrix, lower=True, check_finite=False)
    return np.asarray(cho_solve(factor, right / scale[:, None]) / scale[:, None])


@dataclass(frozen=True, eq=False)
class Bends:
    """Scale s, bias b and size κ of every neuron's bend, and what they leave of the data, relative;
    the best few fits of each, best first."""

    scale: Float[Array, "f m"]
    bias: Float[Array, "f m"]
    size: Float[Array, "f m"]
    left: Float[Array, "f m"]


def likely_activations(sketch: Sketch, names: Sequence[str]) -> list[str]:
    """Activations that explain the bends of most neurons, best first: with few digits several do
    (GELU and its tanh approximation), and only the refinement tells which."""
    if len(names) == 1:
        return list(names)
    neurons, telling = sketch.rows.shape[1], 48  # neurons whose bends tell the activation
    some = np.arange(neurons)
    if neurons > telling:
        strength = np.linalg.norm(sketch.curvature[-1], axis=1)
        some = np.argsort(strength)[::-1][np.linspace(0, neurons * 3 // 4, telling).astype(int)]
    scores = [float(np.median(fit_bends(sketch, name, some).left[0])) for name in names]
    order = np.argsort(scores)
    # what is left of the bends is mostly their own error: rivals leave about the same
    return [names[i] for i in order if scores[i] <= 1.5 * scores[order[0]]]


def fit_bends(sketch: Sketch, name: str, some: Array) -> Bends:
    """Least squares in s and b: curvature = κ s f'(a), slope = κ (f(a) - f(a at the first place)),
    a = s t + b; f is s φ' for a plain network, with the factor s in κ, and φ for a gate."""
    phi = ACTIVATIONS[name]
    gated = len(sketch.rows) == 2
    value, first = (phi.value, phi.first) if gated else (phi.first, phi.second)
    times = sketch.rows[0, some] @ sketch.places.T  # (m, k)
    data = np.concatenate([sketch.curvature[-1, some], sketch.slope[-1, some][:, 1:]], axis=1)
    total = np.maximum((data**2).sum(axis=1), TINY)

    def model(s: Array, b: Array, t: Array) -> Array:
        a = s[..., None] * t + b[..., None]
        levels = value(a)
        return np.concatenate([s[..., None] * first(a), levels[..., 1:] - levels[..., :1]], axis=-1)

    def judged(prediction: Array, wanted: Array, square: Array | float) -> tuple[Array, Array]:
        """Share that is left of the data, and κ."""
        own = np.maximum((prediction**2).sum(axis=-1), TINY)
        size = (prediction * wanted).sum(axis=-1) / own
        return 1.0 - size**2 * own / square, size

    neurons = len(times)
    spread = 1.0 / np.maximum(times.std(axis=1), TINY)
    signs = (1.0, -1.0) if gated and phi.slope else (1.0,)
    grid = np.concatenate([sign * np.logspace(-1.5, 1.5, 46) for sign in signs])
    starts = 4
    scale, bias = np.zeros((starts, neurons)), np.zeros((starts, neurons))
    for j in range(neurons):
        s, b = np.meshgrid(grid * spread[j], np.linspace(-6.0, 6.0, 61), indexing="ij")
        off, _ = judged(model(s, b, times[j]), data[j], total[j])
        for start in range(starts):
            i, k = np.unravel_index(np.argmin(off), off.shape)
            scale[start, j], bias[start, j] = s[i, k], b[i, k]
            off[max(0, i - 2) : i + 3, max(0, k - 3) : k + 4] = np.inf
    sign, log = np.sign(scale), np.log(np.abs(scale))
    t = np.broadcast_to(times, (starts, *times.shape))
    off, size = judged(model(scale, bias, t), data, total)
    h = 1e-6

    def predict(at: Array) -> Array:
        return at[..., :1] * model(sign * np.exp(at[..., 1]), at[..., 2], t)

    def linearize(at: Array) -> tuple[Array, Array]:
        base = predict(at)
        shifts = [predict(at + h * unit) - base for unit in np.eye(3)[1:]]
        by_size = model(sign * np.exp(at[..., 1]), at[..., 2], t)
        return base - data, np.stack([by_size, *(shift / h for shift in shifts)], axis=-1)

    problems = ManyProblems(linearize, lambda at: predict(at) - data, np.array([np.inf, 1.0, 2.0]))
    fitted, _ = descend_many(problems, np.stack([size, log, bias], axis=-1), Stopping(steps=40))
    log, bias = fitted[..., 1], fitted[..., 2]
    off, size = judged(model(sign * np.exp(log), bias, t), data, total)
    order = np.argsort(off, axis=0)
    scale = sign * np.exp(log)
    left = np.sqrt(np.maximum(off, 0.0))
    return Bends(*(np.take_along_axis(part, order, axis=0) for part in (scale, bias, size, left)))


def weights_of(sketch: Sketch, name: str) -> tuple[Weights, Int[Array, " c"]]:
    """The network on the unit sphere (its affine part zero: it is linear and fitted later). A
    neuron that several fits explain is there several times, least squares with all of them tells
    which; the numbers say which rows belong to one neuron."""
    bends = fit_bends(sketch, name, np.arange(sketch.rows.shape[1]))
    usual = float(np.median(bends.left[0]))
    limit = 3.0 * np.maximum(bends.left[0], usual)  # a fit that leaves more is no rival
    chosen = [(0, j) for j in range(bends.left.shape[1])]
    for start in range(1, len(bends.left)):
        for j in np.flatnonzero(bends.left[start] < limit):
            same = [
                abs(np.log(abs(bends.scale[start, j] / bends.scale[i, j]))) < 0.1
                and abs(bends.bias[start, j] - bends.bias[i, j]) < 0.2
                for i, k in chosen
                if k == j
            ]
            if not any(same):
                chosen.append((start, int(j)))
    starts, which = np.array(chosen).T
    scale, bias, size = (part[starts, which] for part in (bends.scale, bends.bias, bends.size))
    arguments = np.column_stack([sketch.rows[0, which] * scale[:, None], bias])
    affine = np.zeros((len(sketch.outer), arguments.shape[1]))
    if len(sketch.rows) == 1:
        outer = sketch.outer[:, which] * (size / scale)
        return Weights(arguments, outer, affine, name), which
    inner = _ungated(sketch, name, which, scale, bias, size)
    return Weights(inner, sketch.outer[:, which] * size, affine, name, arguments), which


def _ungated(
    sketch: Sketch, name: str, which: Array, scale: Array, bias: Array, size: Array
) -> Float[Array, "m e"]:
    """The other factor u = û + ρ ĝ and its bias: linear least squares in ρ and the bias from
    curvature = κ (s² φ'' u + 2 ρ s φ'), slope = κ (s φ' u + ρ φ)."""
    phi = ACTIVATIONS[name]
    gate, other = sketch.rows[0, which], sketch.rows[1, which]
    times, offsets = gate @ sketch.places.T, other @ sketch.places.T
    s, k = scale[:, None], size[:, None]
    a = s * times + bias[:, None]
    value, first, second = phi.value(a), phi.first(a), phi.second(a)
    bent, steep = k * s * s * second, k * s * first
    by_share = np.concatenate(
        [bent * times + 2 * steep, _differences(steep * times + k * value)], axis=1
    )
    by_bias = np.concatenate([bent, _differences(steep)], axis=1)
    known = np.concatenate([bent * offsets, _differences(steep * offsets)], axis=1)
    data = np.concatenate([sketch.curvature[0, which], sketch.slope[0, which][:, 1:]], axis=1)
    tall = np.stack([by_share, by_bias], axis=-1)
    normal = np.swapaxes(tall, -1, -2) @ tall
    normal += 1e-14 * np.trace(normal, axis1=1, axis2=2)[:, None, None] * np.eye(2) + TINY
    right = np.swapaxes(tall, -1, -2) @ (data - known)[..., None]
    share, own = np.linalg.solve(normal, right)[..., 0].T
    return np.column_stack([other + share[:, None] * gate, own])


def _differences(values: Float[Array, "m k"]) -> Float[Array, "m j"]:
    """Values at the other places less those at the first."""
    return values[:, 1:] - values[:, :1]
