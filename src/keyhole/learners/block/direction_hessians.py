"""A smooth network on a sphere of which only the directions of its answers are seen.

Statement.  z(x) = affine(x) + Σ_j outer_j φ(inner_j . x + bias_j) on the unit sphere of R^p, and
            n = z / |z| is seen. All neurons are found, their number included, if s(s - 1)/2 > m + 1
            for some s <= p - 2.
Queries.    As for a network whose answers are seen whole (learners/mlp/hessians.py): Hessians on s
            axes U at a few places of the other axes; then, at places in U, first and second
            differences along a few directions of U and a step along every other axis.
Algebra.    z = ρ n with ρ unknown. For l orthogonal to n, with τ the gradient of log ρ and J that
            of n, l.D²n + τ (Jᵀl)ᵀ + (Jᵀl) τᵀ is in the span of the neurons' w wᵀ and the identity.
            1  τ at all places: these matrices together have a rank that is as low as the number of
               neurons. Levenberg-Marquardt on the part of them outside of their leading singular
               vectors (variable projection); the rank is that behind which singular values fall.
               A rank that is too high by less than s still tells τ.
            2  Rank-one elements of the span are the neurons; a neuron's coefficients at all places
               share one direction outer_j, but for what is along n there.
            3  ρ_b (J_b + n_b τ_bᵀ) - J_0 - n_0 τ_0ᵀ = Σ_j outer_j w_jᵀ (φ'_jb - φ'_j0) is linear in
               ρ_b and what the neurons add: all lengths are known relative to the first.
            4  At places in U, ρ and ρ τ along each direction are unknowns of the same linear
               equations; so is what a neuron has along axes outside of U.
            The rest, one curve for each neuron, is as where answers are seen whole.
Fails.      NotEnough, where the span is not smaller than the space, or neurons are too weak.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve, eigh

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.solver import NormalSystem, Problem, Stopping, descend
from keyhole.learners.block.direction_fit import Directed, with_one
from keyhole.learners.mlp import (
    HESSIAN_GROWTH,
    HessianSketch,
    HessianSteps,
    HessianTable,
    NotEnough,
    axes_for,
    find_span,
    rank_ones,
    sphere_point,
    spread_places,
    weights_of,
)
from keyhole.linalg.symmetric import flat, unflat
from keyhole.models.mlp import ACTIVATIONS

EXPECTED = 4  # neurons per number of a token that most layers have: what is tried first
Ask = Callable[[Array, str], Array]  # points of the unit sphere, purpose -> unit vectors


# --- 1: how the lengths change --------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Bent:
    """Second derivatives across n as flat symmetric matrices without their trace, and what τ adds
    to them, linearly. `frames`: orthonormal vectors across n."""

    frames: Float[Array, "k q p"]
    fixed: Float[Array, "k q P"]
    turning: Float[Array, "k q P s"]

    def at(self, turns: Float[Array, "k s"]) -> Float[Array, "k q P"]:
        return np.asarray(self.fixed + np.einsum("kqPs,ks->kqP", self.turning, turns))

    def matrices(self, turns: Float[Array, "k s"]) -> Float[Array, "kq P"]:
        return self.at(turns).reshape(-1, self.fixed.shape[2])


def frames_across(directions: Float[Array, "k p"]) -> Float[Array, "k q p"]:
    """Orthonormal bases of what is orthogonal to each direction."""
    return np.array([np.linalg.svd(n[None])[2][1:] for n in directions])


def bent_of(
    centre: Float[Array, "k p"], gradient: Float[Array, "k s p"], hessian: Float[Array, "k p s s"]
) -> Bent:
    size = gradient.shape[1]
    frames = frames_across(centre)
    across = np.einsum("kqp,ksp->kqs", frames, gradient)
    rows, columns = np.triu_indices(size)
    weight = np.where(rows == columns, 1.0, np.sqrt(2.0))
    turning = np.zeros((*across.shape[:2], len(rows), size))
    place = np.arange(len(rows))
    turning[:, :, place, rows] += across[:, :, columns] * weight
    turning[:, :, place, columns] += across[:, :, rows] * weight
    seen = np.einsum("kqp,kpst->kqst", frames, hessian)
    fixed = flat(seen.reshape(-1, size, size)).reshape(*across.shape[:2], -1)
    unit = flat(np.eye(size)[None])[0] / np.sqrt(size)
    fixed = fixed - (fixed @ unit)[..., None] * unit
    turning = turning - np.einsum("kqPs,P->kqs", turning, unit)[:, :, None] * unit[:, None]
    return Bent(frames, fixed, turning)


def flattest_turns(bent: Bent) -> Float[Array, "k s"]:
    """The τ that make the matrices smallest: a few hundredths off."""
    size = bent.turning.shape[3]
    return np.array(
        [
            -np.linalg.lstsq(part.reshape(-1, size), fixed.ravel(), rcond=None)[0]
            for part, fixed in zip(bent.turning, bent.fixed, strict=True)
        ]
    )


@dataclass(frozen=True, eq=False)
class Remainder:
    """The matrices at some τ, their singular values, and the singular vectors behind a rank."""

    turns: Float[Array, "k s"]
    matrices: Float[Array, "kq P"]
    left: Float[Array, "kq l"]
    sizes: Float[Array, " n"]
    right: Float[Array, "r P"]
    rank: int

    @classmethod
    def at(cls, bent: Bent, turns: Float[Array, "k s"], rank: int) -> "Remainder":
        matrices = bent.matrices(turns)
        left, sizes, right = np.linalg.svd(matrices)
        return cls(turns, matrices, left[:, rank:], sizes, right[rank:], rank)

    @property
    def cost(self) -> float:
        return float(np.sum(self.sizes[self.rank :] ** 2))


def lower_rank(
    bent: Bent, turns: Float[Array, "k s"], rank: int, steps: int = 60
) -> tuple[Float[Array, "k s"], Float[Array, " n"]]:
    """τ near these so that little is left outside of so many singular vectors; singular values."""
    places, across, _, size = bent.turning.shape

    def linearize(one: Remainder) -> NormalSystem:
        blocks = one.left.reshape(places, across, -1)
        inside = np.einsum("kqPs,vP->kqsv", bent.turning, one.right, optimize=True)
        jacobian = np.einsum("kqu,kqsv->uvks", blocks, inside, optimize=True)
        jacobian = jacobian.reshape(-1, places * size)
        outside = (one.left.T @ one.matrices @ one.right.T).ravel()
        return NormalSystem(jacobian.T @ jacobian, -jacobian.T @ outside)

    def move(one: Remainder, step: Array) -> Remainder:
        return Remainder.at(bent, one.turns + step.reshape(places, size), rank)

    problem = Problem[Remainder](lambda one: one.cost, linearize, move)
    stopping = Stopping(steps=steps, tolerance=0.02, eager=True)
    end = descend(problem, Remainder.at(bent, turns, rank), stopping).state
    return end.turns, end.sizes


def find_turns(
    bent: Bent, most: int, clear: float, expected: int
) -> tuple[Float[Array, "k s"], int] | None:
    """τ and the number of neurons, at most `most`, where a fall of singular values shows it: that
    which is expected first, then from few on."""
    size = bent.turning.shape[3]
    start, half = flattest_turns(bent), max(1, size // 2)
    guess = expected + half
    ascending = range(max(2, size // 2), most + size // 2, half)
    for tried in [*([guess] if guess <= most else []), *ascending]:
        turns, sizes = lower_rank(bent, start, min(tried, most))
        falls = sizes[:most] / np.maximum(sizes[1 : most + 1], TINY)
        rank = int(np.argmax(falls)) + 1
        if falls[rank - 1] < clear or rank > tried:
            continue
        if tried == guess and not tried - size < rank < tried:
            continue  # a rank that is far too high may be met with wrong τ
        turns, sizes = lower_rank(bent, turns, rank)
        if sizes[rank - 1] > clear * sizes[rank]:
            return turns, rank
    return None


# --- 2, 3: the neurons on U -----------------------------------------------------------------------


def outer_directions(
    bent: Bent, turns: Float[Array, "k s"], atoms: Float[Array, "m P"]
) -> tuple[Float[Array, "p m"], Float[Array, "m k"]]:
    """Unit vectors along the outer weights, and the neurons' coefficients along them."""
    seen = bent.at(turns)  # (k, q, P)
    places, across, _ = seen.shape
    coefficients, *_ = np.linalg.lstsq(atoms.T, seen.reshape(places * across, -1).T, rcond=None)
    cubes = coefficients.reshape(len(atoms), places, across)
    vectors = np.einsum("mkq,kqp->mkp", cubes, bent.frames)
    projections = np.einsum("kqp,kqr->kpr", bent.frames, bent.frames)
    weight = np.sum(vectors**2, axis=2)
    off = np.einsum("mk,kpr->mpr", weight, projections)
    off -= np.einsum("mkp,mkr->mpr", vectors, vectors)
    outer = np.linalg.eigh(off)[1][:, :, 0].T
    found = []
    for frame, part in zip(bent.frames, seen, strict=True):
        table = np.einsum("qm,mP->qPm", frame @ outer, atoms).reshape(part.size, -1)
        found.append(np.linalg.lstsq(table, part.ravel(), rcond=None)[0])
    return outer, np.array(found).T


def relative_lengths(
    slopes: Float[Array, "k p s"], outer: Float[Array, "p m"], vectors: Float[Array, "m s"]
) -> tuple[Float[Array, " k"], Float[Array, "m k"]]:
    """ρ at the places relative to the first, and how the neurons' slopes differ from those there.
    `slopes`: J + n τᵀ."""
    table = np.einsum("pm,ms->psm", outer, vectors).reshape(slopes[0].size, -1)
    lengths, changes = [1.0], [np.zeros(len(vectors))]
    for one in slopes[1:]:
        whole = np.column_stack([table, -one.ravel()])
        found, *_ = np.linalg.lstsq(whole, -slopes[0].ravel(), rcond=None)
        lengths.append(float(found[-1]))
        changes.append(found[:-1])
    return np.array(lengths), np.array(changes).T


# --- 4: places in U -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Place:
    """A place in U: n there, its length, what neurons add to slopes (less that at the first place)
    and curvatures, and first differences of n along the axes outside of U."""

    point: Float[Array, " s"]
    centre: Float[Array, " p"]
    length: float
    slope: Float[Array, " m"]
    curvature: Float[Array, " m"]
    beside: Float[Array, "e p"]


def look_around(
    ask: Ask,
    axes: Float[Array, "s n"],
    rest: Float[Array, "e n"],
    base: Float[Array, "p s"],
    outer: Float[Array, "p m"],
    vectors: Float[Array, "m s"],
    steps: HessianSteps,
    rng: np.random.Generator,
) -> Place:
    """One random place in U. `base`: J + n τᵀ at the first place."""
    numbers, neurons = outer.shape
    size = len(axes)
    ways = min(size - 1, int(np.ceil(1.4 * (neurons / (numbers - 1) + 1))) + 1)
    point = rng.standard_normal(size)
    point /= np.linalg.norm(point)
    tangents = rng.standard_normal((ways, size))
    tangents -= np.outer(tangents @ point, point)
    tangents = np.linalg.qr(tangents.T)[0].T
    theta, short, place = steps.places, steps.first, point @ axes
    queries = [sphere_point(place, way * theta * tangents @ axes) for way in (1.0, -1.0)]
    queries += [sphere_point(place, way * short * rest) for way in (1.0, -1.0)[: 1 + steps.blurred]]
    values = ask(np.concatenate([place[None], *queries]), "places")
    centre, forth, back, ahead = np.split(values, [1, 1 + ways, 1 + 2 * ways])
    centre = centre[0]
    first = (forth - back) / (2 * theta)
    second = (forth + back - 2 * centre) / theta**2
    if steps.blurred:
        beside = (ahead[: len(rest)] - ahead[len(rest) :]) / (2 * short)
    else:
        beside = (ahead - centre) / short
    seen = tangents @ vectors.T  # (ways, m)
    # ρ n' + ρτ n - Σ outer_j (w_j . v) slope_j = base v, in the unknowns slope, ρ, ρτ
    table = np.zeros((ways, numbers, neurons + 1 + ways))
    table[:, :, :neurons] = -seen[:, None] * outer
    table[:, :, neurons] = first
    table[np.arange(ways), :, neurons + 1 + np.arange(ways)] = centre
    right = (tangents @ base.T).ravel()
    found, *_ = np.linalg.lstsq(table.reshape(ways * numbers, -1), right, rcond=None)
    length = float(found[neurons])
    turns = found[neurons + 1 :] / length
    # ρ (n'' + 2 τ n') across n = Σ outer_j (w_j . v)² curvature_j + one vector for all v
    frame = frames_across(centre[None])[0]
    bend = length * (second + 2.0 * turns[:, None] * first) @ frame.T
    table = np.zeros((ways, len(frame), neurons + len(frame)))
    table[:, :, :neurons] = (seen**2)[:, None] * (frame @ outer)
    table[:, :, neurons:] = np.eye(len(frame))
    curve, *_ = np.linalg.lstsq(table.reshape(bend.size, -1), bend.ravel(), rcond=None)
    return Place(point, centre, length, found[:neurons], curve[:neurons], beside)


def extend_rows(places: list[Place], outer: Float[Array, "p m"]) -> Float[Array, "m e"]:
    """What the neurons have along the axes outside of U, relative to their length on U."""
    numbers, neurons = outer.shape
    count = len(places)
    table = np.zeros((count, numbers, neurons + numbers + count))
    for k, place in enumerate(places):
        table[k, :, :neurons] = outer * place.slope
        table[k, :, neurons : neurons + numbers] = np.eye(numbers)
        table[k, :, neurons + numbers + k] = -place.centre
    right = np.array([place.length * place.beside.T for place in places])
    found, *_ = np.linalg.lstsq(
        table.reshape(count * numbers, -1), right.reshape(count * numbers, -1), rcond=None
    )
    return found[:neurons]


# --- 5: the affine part ---------------------------------------------------------------------------


def join_network(
    sketch: HessianSketch,
    name: str,
    radius: float,
    points: Float[Array, "n k"],
    seen: Float[Array, "n p"],
) -> Directed:
    """The network with the neurons of a sketch, up to one factor, from directions at random points
    of the sphere of this radius: across each of them z vanishes. Of several curves that explain
    one neuron, that is taken with which least is left."""
    weights, which = weights_of(sketch, name)
    rows = weights.inner / np.append(np.full(points.shape[1], radius), 1.0)
    outer = weights.outer / np.maximum(np.linalg.norm(weights.outer, axis=0), TINY)
    numbers, width = seen.shape[1], points.shape[1] + 1
    unknowns = len(rows) + numbers * width
    count = min(len(points), 8 + int(2.0 * unknowns / (numbers - 1)))
    x, frames = with_one(points[:count]), frames_across(seen[:count])
    hidden = ACTIVATIONS[name].value(x @ rows.T)
    inner = np.einsum("nqp,pm,nm->nqm", frames, outer, hidden, optimize=True)
    affine = np.einsum("nqp,ne->nqpe", frames, x).reshape(*frames.shape[:2], -1)
    table = np.concatenate([inner, affine], axis=2).reshape(-1, unknowns)
    sizes = np.maximum(np.linalg.norm(table, axis=0), TINY)
    table /= sizes
    gram, held = table.T @ table, len(rows)
    # the affine part is eliminated once, whichever curves are taken
    factor = cho_factor(gram[held:, held:] + UNIT_ROUNDOFF * unknowns * np.eye(unknowns - held))
    taken_over = -cho_solve(factor, gram[held:, :held])
    left = gram[:held, :held] + gram[:held, held:] @ taken_over

    def solve(taken: list[int]) -> tuple[float, Array]:
        value, vector = eigh(left[np.ix_(taken, taken)], subset_by_index=[0, 0])
        return float(value[0]), vector[:, 0]

    groups = [np.flatnonzero(which == j).tolist() for j in range(int(which.max()) + 1)]
    taken = [group[0] for group in groups]
    for j, group in enumerate(groups):
        if len(group) > 1:
            trials = [[*taken[:j], one, *taken[j + 1 :]] for one in group]
            taken = min(trials, key=lambda trial: solve(trial)[0])
    share = solve(taken)[1]
    null = np.concatenate([share, taken_over[:, taken] @ share])
    null /= sizes[np.append(taken, np.arange(held, unknowns))]
    shares, flat_affine = np.split(null, [len(taken)])
    net = Directed(flat_affine.reshape(numbers, width), outer[:, taken] * shares, rows[taken], name)
    return net if np.sum(net(points) * seen) > 0 else turn_around(net)


def turn_around(net: Directed) -> Directed:
    return Directed(-net.affine, -net.outer, net.rows, net.activation)


# --- all of it ------------------------------------------------------------------------------------


def read_directions(ask: Ask, width: int, unit: float, rng: np.random.Generator) -> HessianSketch:
    """Neurons of a network from the directions of its answers on the unit sphere of R^width, as
    many numbers; raises NotEnough."""
    steps = two_sided(unit)
    if steps.blurred:
        steps = steps.balanced(ask, np.linalg.qr(rng.standard_normal((width, width)))[0].T, unit)
    table, size, turns = grown_turns(ask, width, steps, rng)
    centre, gradient = np.array(table.centre), table.gradients(size)
    bent = bent_of(centre, gradient, table.hessians(size))
    matrices = bent.matrices(turns)
    span = find_span(unflat(matrices, size)[:, None], len(matrices), steps.gap)
    if span is None:
        raise NotEnough("the span of the Hessians is not seen")
    # a loose bound lets in what is no neuron, a tight one may miss the weakest neuron
    vectors = rank_ones(span, span.rank, rng, 1.5 / span.gap)
    if len(vectors) < span.rank:
        vectors = rank_ones(span, span.rank, rng)
    if len(vectors) < span.rank:
        raise NotEnough(f"in the span were found {len(vectors)} of {span.rank} neurons")
    atoms = flat(vectors[:, :, None] * vectors[:, None, :])
    unit_matrix = flat(np.eye(size)[None])[0] / np.sqrt(size)
    outer, bends = outer_directions(bent, turns, atoms - np.outer(atoms @ unit_matrix, unit_matrix))
    slopes = gradient.transpose(0, 2, 1) + centre[:, :, None] * turns[:, None]
    lengths, changes = relative_lengths(slopes, outer, vectors)
    axes = table.u_axes[:size]
    rest = np.vstack([table.x_axes, table.u_axes[size:]])
    count = int(np.ceil((len(vectors) + width) / (width - 1))) + 3
    places = [
        look_around(ask, axes, rest, slopes[0], outer, vectors, steps, rng) for _ in range(count)
    ]
    rows = vectors @ axes + extend_rows(places, outer) @ rest
    return HessianSketch(
        rows[None],
        outer,
        np.vstack([table.places, np.array([place.point for place in places]) @ axes]),
        np.column_stack([bends * lengths, *(place.curvature for place in places)])[None],
        np.column_stack([changes, *(place.slope for place in places)])[None],
    )


def two_sided(unit: float) -> HessianSteps:
    """Central differences: errors of Hessians are enlarged by the weakest neuron, and a neuron
    whose curve is off by a few hundredths may have several that explain it."""
    both = 1.3 * (4.0 * unit) ** 0.25
    if unit >= 1e-12:
        return HessianSteps.of(unit, 1)
    return HessianSteps(both, both, 4.0 * unit**0.5, True, room=1.17, spare=0.0)


def grown_turns(
    ask: Ask, width: int, steps: HessianSteps, rng: np.random.Generator
) -> tuple[HessianTable, int, Float[Array, "k s"]]:
    """Directions around more and more places along more and more axes, until the rank shows."""
    frame = np.linalg.qr(rng.standard_normal((width, width)))[0].T
    usual = 3  # number in the growth that the split into U and X makes room for
    growths = HESSIAN_GROWTH[usual:] if steps.blurred else HESSIAN_GROWTH
    p = int(np.clip(width - axes_for(HESSIAN_GROWTH[usual] * (width + 1) + 1, steps.room), 2, 5))
    table = HessianTable(ask, frame, p, steps)
    everywhere = spread_places(p, 512, rng)
    for growth in growths:
        dimension = growth * (width + 1) + 1
        wanted = axes_for(dimension, steps.room)
        size = min(wanted, width - p)
        if size < 3:
            break
        count = int(np.ceil((1.15 + steps.spare) * dimension / (width - 1)))
        table.grow(size, everywhere[: max(count, 3)])
        bent = bent_of(np.array(table.centre), table.gradients(size), table.hessians(size))
        rows = len(bent.fixed) * bent.fixed.shape[1]
        most = int(min(size * (size + 1) / 2 / 1.1, size * (size - 1) / 2 - 2, rows / 1.05))
        if (
            most >= 2
            and (
                found := find_turns(
                    bent, most, (1.0 if steps.blurred else 5.0) * steps.gap, EXPECTED * (width + 1)
                )
            )
            is not None
        ):
            return table, size, found[0]
        if size < wanted:
            break
    raise NotEnough("the Hessians span all that they could: too many neurons for so few inputs")
