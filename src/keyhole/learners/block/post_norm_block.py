"""Attention and network, both before norms: a = norm(x_N + attention(X)), y = norm(a + mlp(a)).

Statement.  y = Φ(ν), ν = z / sqrt(mean z^2 + epsilon), z = x_N + offset + Σ_h M_h Σ_i w_hi x_i, in
            a basis of what the norm keeps (p numbers). Φ (gain, network, second norm) is unknown,
            but the residual has coefficient one: under hard attention ∂y/∂x_N = DΦ Dν is what a
            move of z does. Invisible: means of what is added, the first norm's bias, the scale
            between the first gain and the second epsilon.
Queries.    1  many huge tokens before one anchor, patterns of moves  -> which token each head takes
            2  these tokens and the anchor, moved along a basis, at two lengths of it -> M_h
            3  huge single tokens                                   -> the second norm, the network
            4  single tokens of moderate size                       -> the offset of the attention
            5  single tokens where z nearly vanishes                -> the first epsilon
            6  contexts of near tokens                              -> soft_contexts.py
Algebra.    2: ∂y/∂x_N P M_h = ∂y/∂token_h; ∂y/∂x_N is blind along z, which the length of the anchor
            turns. 3: huge tokens have |ν| = sqrt(d) and ν along (1 + Σ M_h) x. The answers lie in a
            hyperplane, nearly on an ellipsoid; their directions are fitted by direction_fit.py;
            the lengths of z that it tells then correct the ellipsoid, which epsilon bends. The
            affine part is Σ_i gain_i e_i e_iᵀ - Σ_j s_j outer_j inner_jᵀ, s_j zero or one: that
            tells the gain and which way neurons are turned. 4: Φ known, an answer tells ν.
Fails.      Two heads on one token look like one head; neurons that hardly any point of the sphere
            switches; where Φ is not one to one an answer may be read wrongly, and the refinement
            stalls.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares, minimize_scalar

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.block.arcs import bends_smoothly
from keyhole.learners.block.box import Unclear
from keyhole.learners.block.direction_fit import (
    SMOOTH,
    Data,
    Directed,
    find_network,
    lengths,
    points_beside,
    points_wanted,
    with_one,
)
from keyhole.learners.block.direction_hessians import join_network, read_directions
from keyhole.learners.block.direction_refinement import refine_directions
from keyhole.learners.block.post_norm_attention import fit_layer_norm, huge_size, unit_rows
from keyhole.learners.block.refinement import Pairs, settle_block
from keyhole.learners.block.relu_circles import Pool, SphereBox, find_neurons
from keyhole.learners.block.scores import seen_rank
from keyhole.learners.block.soft_contexts import find_scores
from keyhole.learners.block.wide_network import BENT, is_crowded
from keyhole.learners.mlp import NotEnough, likely_activations, room_for_neurons
from keyhole.linalg.rank import count_above_share
from keyhole.measurement.asker import Asker
from keyhole.measurement.evidence import Evidence
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import ACTIVATIONS, Mlp, outer_table
from keyhole.models.norm import Norm, kept_plane
from keyhole.network.wide import Seen, WideOptions, search_wide
from keyhole.oracles.noise import DETECTION, NoiseModel

KINKS_APART = 1e-6  # error of directions up to which kinks of a circle are told apart
CONTEXT_SIZE = 1.0  # of tokens beside which the offset is small and the first norm is no sphere yet
TELLING = 1e-5  # relative error of differences that tell which tokens moved, some hundred at once


@dataclass(frozen=True)
class PostNormOptions:
    """What a person might tune.

    candidates: huge tokens of which each head selects one. draws: of these, at most. looks: draws
    of which the one that shows most heads is taken. patterns: of moves at first. spare: patterns
    beyond the number of heads. anchors: lengths of the anchor, relative to those tokens. circles:
    numbers that the norm keeps, from which kinks of a circle tell ReLUs faster than a fit does.
    """

    candidates: int = 256
    draws: int = 16
    looks: int = 2
    patterns: int = 8
    spare: int = 4
    anchors: tuple[float, ...] = (0.15, 0.5)
    circles: int = 10


# --- 1: which token each head takes ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Chosen:
    """The tokens that the heads select with an anchor along this direction."""

    tokens: Float[Array, "h d"]
    heading: Float[Array, " d"]


def difference_step(box: Asker) -> float:
    """Of first differences one way: rounding and curvature are alike."""
    return float(box.error**0.5)


@dataclass(frozen=True)
class Differences:
    """First differences: the step, the ways in which it is made, and their relative error."""

    step: float
    ways: tuple[float, ...]
    doubt: float

    @classmethod
    def rough(cls, box: Asker) -> "Differences":
        """One way, where that tells the patterns of tokens apart."""
        one_way = cls(difference_step(box), (1.0,), difference_step(box))
        return one_way if one_way.doubt < TELLING else cls.fine(box)

    @classmethod
    def fine(cls, box: Asker) -> "Differences":
        """Both ways, so that only a third derivative spoils them."""
        step = float(box.error ** (1.0 / 3.0))
        return cls(step, (1.0, -1.0), step**2)


def select_tokens(box: Asker, options: PostNormOptions, rng: np.random.Generator) -> Chosen | None:
    """Huge tokens of which each head takes one, or None where this draw does not tell."""
    size, differences = huge_size(box), Differences.rough(box)
    step, doubt = differences.step, differences.doubt
    longest = box.oracle.spec.domain.max_length
    count = options.candidates if longest is None else min(options.candidates, longest - 1)
    tokens = box.representable(size * unit_rows(rng, count, box.width))
    heading = unit_rows(rng, 1, box.width)[0]
    anchor = np.mean(options.anchors) * size * heading
    sequence = np.concatenate([tokens, anchor[None]])
    base = box(sequence[None], "selected tokens")[0]
    move = step * size * unit_rows(rng, 1, box.width)[0]
    patterns, responses = np.zeros((0, count)), np.zeros((0, box.width))
    number = options.patterns
    while True:
        fresh = rng.uniform(-1.0, 1.0, (number - len(patterns), count))
        moved = []
        for way in differences.ways:
            asked = np.repeat(sequence[None], len(fresh), axis=0)
            asked[:, :-1] += way * fresh[:, :, None] * move
            moved.append(box(asked, "selected tokens"))
        seen = (moved[0] - (moved[1] if len(moved) > 1 else base)) / (len(moved) * step)
        patterns, responses = np.concatenate([patterns, fresh]), np.concatenate([responses, seen])
        axes, values, _ = np.linalg.svd(responses, full_matrices=False)
        heads = count_above_share(values, 1e2 * doubt)
        if heads <= number - options.spare:
            break
        if heads >= box.width - 2 or number > 4 * box.width:
            return None
        number *= 2
    kept = axes[:, :heads]
    off = np.linalg.norm(patterns - kept @ (kept.T @ patterns), axis=0)
    (used,) = np.nonzero(off < 1e3 * doubt * np.linalg.norm(patterns, axis=0))
    if not heads or len(used) != heads:
        return None
    alone = box(np.concatenate([tokens[used], anchor[None]])[None], "selected tokens")[0]
    if np.abs(alone - base).max() > 1e4 * box.error * np.abs(base).max():
        return None
    return Chosen(tokens[used], heading)


# --- 2: value maps --------------------------------------------------------------------------------


def find_maps(
    box: Asker, chosen: Chosen, plane: Float[Array, "d p"], options: PostNormOptions
) -> Float[Array, "h p d"] | None:
    """M_h in the norm's plane; None where a head takes the anchor or jumps."""
    size, differences = huge_size(box), Differences.fine(box)
    heads, width = chosen.tokens.shape
    beside, moved = [], []
    along = np.column_stack([plane, np.ones(width) / np.sqrt(width)])
    moves = np.zeros((along.shape[1] + heads * width, heads + 1, width))
    moves[: along.shape[1], -1] = along.T
    for h in range(heads):
        start = along.shape[1] + h * width
        moves[start : start + width, h] = np.eye(width)
    for share in options.anchors:
        sequence = np.concatenate([chosen.tokens, share * size * chosen.heading[None]])
        sequence = box.representable(sequence)
        slopes = slopes_along(box, sequence, size * moves, differences)
        beside.append(slopes[: along.shape[1]].T)
        moved.append(slopes[along.shape[1] :].reshape(heads, width, width).transpose(0, 2, 1))
    table = np.concatenate(beside)
    doubt = 1e4 * differences.doubt * float(np.linalg.norm(table))
    if plane.shape[1] < width and np.linalg.norm(table[:, -1]) > doubt:
        return None  # the mean of the anchor is seen: a head takes it
    table = table[:, : plane.shape[1]]
    if np.linalg.svd(table, compute_uv=False)[-1] < 1e-4 * np.linalg.norm(table):
        return None
    right = np.concatenate(moved, axis=1)  # (h, answers, d)
    maps = np.array([np.linalg.lstsq(table, part, rcond=None)[0] for part in right])
    rest = np.einsum("ap,hpd->had", table, maps) - right
    if np.linalg.norm(rest) > 1e4 * differences.doubt * np.linalg.norm(right):
        return None
    return cut_maps(maps, 1e2 * differences.doubt)


def slopes_along(
    box: Asker,
    sequence: Float[Array, "length d"],
    moves: Float[Array, "n length d"],
    differences: Differences,
) -> Float[Array, "n d"]:
    """Derivatives of the answer along moves of a sequence. A kink of the network between two
    answers spoils their difference: where a few differences are others with a quarter of the step,
    all are taken with it, and those that still change again, until they do not."""

    def take(step: float, some: Array) -> tuple[Float[Array, "k d"], float]:
        ahead = [way * step * moves[some] for way in (1.0, -1.0)]
        asked = box.representable(sequence + np.concatenate(ahead))
        after, before = np.split(box(asked, "value maps"), 2)
        return (after - before) / (2.0 * step), box.error * float(np.abs(after).max()) / step

    step, changed = differences.step, np.arange(len(moves))
    slopes, _ = take(step, changed)
    truncation = differences.doubt * float(np.abs(slopes).max())
    chance = 0.5  # that a difference crosses no kink, where most of a box's do
    few = np.linspace(0, len(moves) - 1, Evidence(NoiseModel(box.error)).enough(chance)).astype(int)
    while len(changed) and step > difference_step(box):
        step /= 4.0
        looked = few if len(few) else changed
        fresh, rounding = take(step, looked)
        other = np.abs(fresh - slopes[looked]).max(axis=1) > DETECTION * (truncation + rounding)
        if len(few):
            few, step = few[:0], step * 4.0
            changed = changed if other.any() else changed[:0]
            continue
        slopes[looked[other]] = fresh[other]
        changed = looked[other]
    return slopes


def cut_maps(maps: Float[Array, "h p d"], least: float) -> Float[Array, "h p d"]:
    """The maps without singular values that are their error, relative to the largest."""
    axes, sizes, rows = np.linalg.svd(maps, full_matrices=False)
    sizes = np.where(sizes > least * sizes[:, :1], sizes, 0.0)
    return np.asarray((axes * sizes[:, None]) @ rows)


def find_values(
    box: Asker, plane: Float[Array, "d p"], options: PostNormOptions, rng: np.random.Generator
) -> Float[Array, "h p d"]:
    """M_h of all heads. Two heads on one token look like one whose rank is the sum of theirs: as
    long as ranks differ, draws that show more heads are looked for."""
    seen: list[Chosen] = []
    found: Array | None = None
    for draw in range(options.draws):
        chosen = select_tokens(box, options, rng)
        if chosen is not None and (found is None or len(chosen.tokens) > len(found)):
            seen.append(chosen)
        last = draw + 1 == options.draws
        if not seen or (found is None and len(seen) < options.looks and not last):
            continue
        best = max(seen, key=lambda one: len(one.tokens))
        maps = find_maps(box, best, plane, options)
        if maps is None:
            seen.remove(best)
            continue
        found, seen = maps, []
        least = Differences.fine(box).doubt
        if len({seen_rank(np.linalg.svd(one, compute_uv=False), least) for one in maps}) == 1:
            return maps
    if found is not None:
        return found
    raise Unclear("no draw of huge tokens showed which token each head selects")


# --- 3: the network -------------------------------------------------------------------------------


@dataclass(eq=False)
class SphereAnswers:
    """Huge single tokens, the ν that they have, and the answers; and the second norm as far as
    it is known. More tokens are asked as they are needed."""

    box: Asker
    whole: Float[Array, "p d"]
    rng: np.random.Generator
    points: Float[Array, "n p"]
    tokens: Float[Array, "n d"]
    answers: Float[Array, "n d"]
    norm: Norm
    drawn: int = 0  # random ones among the points

    @classmethod
    def begin(
        cls, box: Asker, whole: Float[Array, "p d"], rng: np.random.Generator
    ) -> "SphereAnswers":
        p, d = whole.shape
        kind = "layer" if p < d else "rms"
        none = np.zeros((0, d))
        return cls(box, whole, rng, np.zeros((0, p)), none, none, Norm(np.ones(d), kind=kind))

    def grow(self, count: int) -> None:
        """So many random points, at least."""
        p, d = self.whole.shape
        wanted = self.rng.standard_normal((max(0, count - self.drawn), p))
        self.drawn = max(count, self.drawn)
        self.add(wanted * (np.sqrt(d) / lengths(wanted)))

    def grow_beside(self, net: Directed) -> None:
        """More points on that side of a neuron's hyperplane where there are few."""
        radius = float(np.sqrt(self.whole.shape[1]))
        self.add(points_beside(net, self.points, radius, self.rng))

    def ask(self, wanted: Float[Array, "n p"]) -> tuple[Array, Array, Array]:
        """Points of the sphere along these, huge single tokens that have them, and answers."""
        d = self.whole.shape[1]
        size = self.box.error ** (-5.0 / 8.0)  # beside which the offset vanishes
        tokens = self.box.representable(size * wanted @ np.linalg.pinv(self.whole).T)
        points = tokens @ self.whole.T
        points *= np.sqrt(d) / lengths(points)
        return points, tokens, self.box(tokens[:, None], "network")

    def add(self, wanted: Float[Array, "n p"]) -> None:
        if not len(wanted):
            return
        points, tokens, answers = self.ask(wanted)
        self.points = np.concatenate([self.points, points])
        self.tokens = np.concatenate([self.tokens, tokens])
        self.answers = np.concatenate([self.answers, answers])

    def directions(self, answers: Float[Array, "n d"]) -> Float[Array, "n p"]:
        """Of what the second norm sees."""
        seen = self.normalised(answers)
        return np.asarray(seen / lengths(seen))

    def normalised(self, answers: Float[Array, "n d"]) -> Float[Array, "n p"]:
        return np.asarray(((answers - self.norm.bias) / self.norm.gain) @ self.norm.plane)

    def read(self, known: Directed | None) -> tuple[Float[Array, "n p"], Float[Array, "n p"]]:
        """Points and directions; with a network that nearly explains them, better ones."""
        if known is None:
            self.norm, _ = fit_layer_norm(self.answers)
        else:
            for _ in range(2):
                self.correct_norm(known)
        return self.points, self.directions(self.answers)

    def find_centre(self, flats: int = 12) -> float:
        """The bias where the network is made of ReLUs, whatever epsilon is: on an arc without kinks
        what the answers have in the norm's plane lies in a flat of three dimensions through the
        centre. How far it may be off, relative to the gain."""
        p, d = self.whole.shape
        width, count = 0.5, 7
        rows, right = list[Array](), list[Array]()
        turns = np.cos(np.pi * (np.arange(count) + 0.5) / count)
        while len(rows) < flats and width > 1e-4:
            first, second = np.linalg.qr(self.rng.standard_normal((p, 2)))[0].T
            angles = width * turns / 2.0
            path = np.cos(angles)[:, None] * first + np.sin(angles)[:, None] * second
            seen = self.normalised(self.ask(path)[2])
            middle = seen.mean(axis=0)
            _, sizes, axes = np.linalg.svd(seen - middle, full_matrices=False)
            if sizes[3] > 1e2 * self.box.error * np.sqrt(d):
                width *= 0.75  # a kink lies on it
                continue
            across = sizes[2] * (np.eye(p) - axes[:3].T @ axes[:3])
            rows.append(across)
            right.append(across @ middle)
            width *= 1.2
        if len(rows) < flats:
            raise Unclear("no arc without kinks shows the centre of the second norm")
        table = np.concatenate(rows)
        centre, *_ = np.linalg.lstsq(table, np.concatenate(right), rcond=None)
        norm = self.norm
        bias = norm.bias + norm.gain * (norm.plane @ centre)
        self.norm = Norm(norm.gain, bias, norm.epsilon, norm.kind)
        weakest = np.linalg.svd(table, compute_uv=False)[-1]
        return float(10.0 * self.box.error * np.sqrt(d) / weakest)

    def correct_norm(self, known: Directed) -> float:
        """Gain and bias where epsilon bends the ellipsoid: |n|^2 / d = 1 + a + c.n - epsilon / v,
        v the mean square of z. The epsilon, in the network's units."""
        norm, d = self.norm, self.norm.width
        n = self.normalised(self.answers)
        v = np.sum(known(self.points) ** 2, axis=1) / d
        table = np.column_stack([np.ones(len(n)), 2.0 * n / d, -1.0 / v])
        found, *_ = np.linalg.lstsq(table, np.sum(n**2, axis=1) / d - 1.0, rcond=None)
        gain = norm.gain * np.sqrt(1.0 + found[0])
        bias = norm.bias + norm.gain * (norm.plane @ found[1:-1])
        self.norm = Norm(gain, bias, max(float(found[-1]), 0.0), norm.kind)
        return float(found[-1])


def is_smooth(sphere: SphereAnswers, rng: np.random.Generator) -> bool:
    """Whether Φ curves otherwise than a norm does between kinks."""

    def ask(points: Float[Array, "n p"]) -> Float[Array, "n p"]:
        return sphere.directions(sphere.ask(points)[2])

    return bends_smoothly(ask, len(sphere.whole), sphere.box.error, rng)


def find_relus(sphere: SphereAnswers, rng: np.random.Generator) -> Directed:
    """A network of ReLUs by the kinks of a great circle; raises Unclear."""
    p, d = sphere.whole.shape
    off = sphere.find_centre()

    def ask(points: Float[Array, "n p"]) -> Float[Array, "n p"]:
        return sphere.directions(sphere.ask(points)[2])

    box = SphereBox(ask, p, float(np.sqrt(d)), 4.0 * sphere.box.error, lengths=False, bend=off)

    def draw(count: int) -> Pool:
        sphere.grow(count)
        return Pool(sphere.points, sphere.directions(sphere.answers))

    net = find_neurons(box, draw, rng)
    sphere.grow_beside(net)
    # the values, and so the points, are as exact as first differences
    doubt = 30.0 * Differences.fine(sphere.box).doubt
    for _ in range(2):
        data = Data(with_one(sphere.points), sphere.read(net)[1])
        net, _ = refine_directions(net, data, target=doubt)
    return net


def fit_wide(
    sphere: SphereAnswers, activations: tuple[str, ...], level: float, rng: np.random.Generator
) -> Directed:
    """A network from directions of few digits, which those beside kinks would want: more neurons
    than it has are fitted to random points, then thinned out. `level`: of the points and
    directions, about. Raises Unclear."""

    def look(count: int) -> Seen:
        sphere.grow(count)
        return Seen(*sphere.read(None), direction=True)

    # a norm and maps that are known roughly may be worth more: the turns of neurons will tell
    root, rough = float(np.sqrt(len(sphere.whole))), WideOptions().hopeful
    explained = level * root  # relative to unit vectors
    found, left = search_wide(look, activations, sphere.box.error * root, explained, rng)
    if left > rough:
        raise Unclear(f"no wide network explains the directions of the answers: {left:.1e} is left")
    sphere.grow_beside(net := Directed(found.affine, found.outer, found.inner, found.activation))
    return settle_directions(net, sphere, 5.0 * sphere.box.error)[0]


def find_crowded(
    sphere: SphereAnswers, level: float, options: PostNormOptions, rng: np.random.Generator
) -> Directed | None:
    """A smooth network that second derivatives have hardly room for, by a wide one; None where
    there is room, or it is not found."""
    p = len(sphere.whole)
    if p < options.circles or not is_crowded(p):
        return None
    try:
        return fit_wide(sphere, BENT, level, rng)
    except Unclear:
        sphere.read(None)
        return None


def find_smooth(
    sphere: SphereAnswers, activations: tuple[str, ...], level: float, rng: np.random.Generator
) -> Directed:
    """A network of a smooth activation by second derivatives of the directions; raises Unclear,
    or NotEnough where it has too many neurons for that."""
    p, d = sphere.whole.shape
    radius = float(np.sqrt(d))

    def ask(points: Float[Array, "n p"], purpose: str) -> Float[Array, "n p"]:
        return sphere.directions(sphere.ask(radius * points)[2])

    # activations that are nearly alike differ by little more than single precision tells
    rest, target = np.inf, min(level, 2.0**-22)
    for _ in range(3):  # a neuron whose curve is misread spoils the fit: other places
        sketch = read_directions(ask, p, sphere.box.error, rng)
        sphere.grow(points_wanted(p, p, sketch.rows.shape[1], 1.25))
        fits = []
        for name in likely_activations(sketch, activations):
            net = join_network(sketch, name, radius, *sphere.read(None))
            fits.append(settle_directions(net, sphere, target))
        net, rest = min(fits, key=lambda fit: fit[1])
        if rest <= 3.0 * level:
            return drop_undecided(net, rest, sphere, target)[0]
        sphere.read(None)
    raise Unclear(f"no network explains the directions of the answers: {rest:.1e} is left")


def settle_directions(
    net: Directed, sphere: SphereAnswers, target: float
) -> tuple[Directed, float]:
    """The network fitted to directions that it makes more exact in turn; what is left of them."""
    rest = np.inf
    for _ in range(4):
        data = Data(with_one(sphere.points), sphere.read(net)[1])
        before = rest
        net, rest = refine_directions(net, data, 12, target=target)
        if rest < target or rest > 0.5 * before:
            break
    return net, rest


def neuron_products(net: Directed) -> Float[Array, "numbers m"]:
    """What every neuron adds to the affine part where it is turned around, entries as rows."""
    slope = ACTIVATIONS[net.activation].slope
    products = np.einsum("am,mb->abm", net.outer, net.rows[:, :-1])
    return np.asarray(slope * products.reshape(-1, net.neurons))


def turned_shares(net: Directed, plane: Float[Array, "d p"]) -> Float[Array, " m"]:
    """One for neurons that are turned around, zero for the others: a diagonal gain and these shares
    of the neurons are the affine part."""
    products = neuron_products(net)
    sizes = np.maximum(np.linalg.norm(products, axis=0), TINY)
    squares = np.einsum("ia,ib->abi", plane, plane).reshape(-1, len(plane))
    table = np.column_stack([squares, products / sizes])
    solution, *_ = np.linalg.lstsq(table, net.affine[:, :-1].ravel(), rcond=None)
    return np.asarray(solution[len(plane) :] / sizes)


def undecided(shares: Float[Array, " m"]) -> Array:
    """Neurons whose share says neither that they are turned nor that they are not."""
    return np.asarray(np.minimum(np.abs(shares), np.abs(shares - 1.0)) > 0.2)


def drop_undecided(
    net: Directed, rest: float, sphere: SphereAnswers, target: float
) -> tuple[Directed, float]:
    """The network without neurons whose way is not seen, if the directions are explained as well
    without them: second derivatives that are off may show a neuron too many."""
    if not ACTIVATIONS[net.activation].slope:
        return net, rest
    strange = undecided(turned_shares(net, sphere.norm.plane))
    if not strange.any() or strange.all():
        return net, rest
    fewer = replace(net, outer=net.outer[:, ~strange], rows=net.rows[~strange])
    fewer, left = settle_directions(fewer, sphere, target)
    return (fewer, left) if left <= 1.1 * rest else (net, rest)


def gain_of(
    net: Directed, plane: Float[Array, "d p"]
) -> tuple[Float[Array, " d"], Float[Array, " m"]]:
    """The first gain, and which neurons are turned around; raises Unclear where neither is seen."""
    squares = np.einsum("ia,ib->abi", plane, plane).reshape(-1, len(plane))
    right, turned = net.affine[:, :-1].ravel(), np.zeros(net.neurons)
    if ACTIVATIONS[net.activation].slope:
        shares = turned_shares(net, plane)
        if undecided(shares).any():
            raise Unclear("which way the neurons are turned was not seen")
        turned = np.round(shares)
        right = right - neuron_products(net) @ turned
    gain, *_ = np.linalg.lstsq(squares, right, rcond=None)
    if np.linalg.norm(squares @ gain - right) > 0.05 * np.linalg.norm(gain):
        raise Unclear("the residual connection around the network was not seen")
    return gain, turned


def assemble(net: Directed, sphere: SphereAnswers) -> tuple[Mlp, Norm, Norm]:
    """The network behind the first gain, and both norms (the first epsilon is not known yet)."""
    plane, norm = sphere.norm.plane, sphere.norm
    gain, turned = gain_of(net, plane)
    phi = ACTIVATIONS[net.activation]
    # φ(a) = (φ(-a) - slope a - constant) / sign at the turned ones
    way = 1.0 - 2.0 * turned
    outer = net.outer * np.where(turned > 0, phi.sign, 1.0)
    offset = net.affine[:, -1] - net.outer @ (turned * (phi.constant + phi.slope * net.rows[:, -1]))
    scale = float(np.sqrt(np.mean(gain**2)) * np.sign(np.median(gain)))
    gain = gain / scale
    rows = way[:, None] * net.rows
    network = Mlp(
        (rows[:, :-1] @ plane.T) / gain,
        rows[:, -1],
        plane @ outer / scale,
        activation=net.activation,
        offset=plane @ offset / scale,
    )
    epsilon = max(norm.epsilon / scale**2, 1e-14)
    last = Norm(np.sign(scale) * norm.gain, norm.bias, epsilon, norm.kind)
    return network, Norm(gain, None, 0.0, norm.kind), last


def directed_of(block: Block) -> Directed:
    """What the second norm reads, as a network of what the first one gives."""
    assert block.mlp is not None
    plane, gain, bias, network = block.norms[0].plane, block.gain[0], block.bias[0], block.mlp
    affine = np.column_stack([plane.T @ (gain[:, None] * plane), (bias + network.offset) @ plane])
    thresholds = network.inner_bias + network.inner @ bias
    rows = np.column_stack([(network.inner * gain) @ plane, thresholds])
    return Directed(affine, plane.T @ outer_table(network), rows, network.activation)


# --- 4: the offset of the attention ---------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Behind:
    """What an answer tells of z, Φ being known."""

    net: Directed
    directions: Callable[[Array], Array]  # of what the second norm sees
    width: int

    def read(
        self, answers: Float[Array, "n d"], start: Float[Array, "n p"], radius: Float[Array, " n"]
    ) -> tuple[Float[Array, "n p"], Float[Array, " n"]]:
        """ν of these lengths near a start, by Gauss-Newton steps along the sphere; residuals."""
        wanted = self.directions(answers)
        point = start * (radius[:, None] / lengths(start))

        ridge = 1e-15  # of normal equations, relative to their trace

        def rest_of(place: Array, some: Array | slice = slice(None)) -> tuple[Array, Array, Array]:
            z = self.net(place)
            size = lengths(z)
            return z / size - wanted[some], z / size, size

        rest, u, size = rest_of(point)
        length, active = np.ones(len(point)), np.arange(len(point))
        for _ in range(60):
            here, at = point[active], radius[active]
            slopes = self.net.slopes(here) / size[active][:, :, None]
            slopes = (
                slopes
                - u[active][:, :, None] * np.einsum("np,npk->nk", u[active], slopes)[:, None, :]
            )
            table = np.concatenate([slopes, (here / at[:, None])[:, None, :]], axis=1)
            pulled = np.einsum("npk,np->nk", table[:, :-1], rest[active])
            normal = table.transpose(0, 2, 1) @ table
            normal += ridge * np.einsum("nkk->n", normal)[:, None, None] * np.eye(here.shape[1])
            step = np.linalg.solve(normal, pulled[:, :, None])[:, :, 0]
            # no step is longer than a third of the sphere's radius
            far = np.linalg.norm(step, axis=1)
            cut = np.minimum(1.0, 0.33 * at / np.maximum(far, 1e-300))
            moved = here - (length[active] * cut)[:, None] * step
            moved = moved * (at[:, None] / lengths(moved))
            after = rest_of(moved, active)
            better = np.linalg.norm(after[0], axis=1) < np.linalg.norm(rest[active], axis=1)
            good = active[better]
            point[good] = moved[better]
            rest[good], u[good], size[good] = (new[better] for new in after)
            length[active] *= np.where(better, 2.0, 0.5)
            length = np.minimum(1.0, length)
            active = active[np.where(better, far > 1e-12 * at, length[active] > 1e-3)]
            if not len(active):
                break
        return point, np.linalg.norm(rest, axis=1)


def find_offset(
    box: Asker, behind: Behind, whole: Float[Array, "p d"], rng: np.random.Generator
) -> tuple[Float[Array, " p"], list[tuple[Array, Array]]]:
    """The offset of the attention from single tokens of two sizes, and these with answers."""
    p, d = whole.shape
    radius = np.sqrt(d)
    found, pairs = np.zeros(p), []
    for size in (30.0, 3.0):
        tokens = box.representable(size * unit_rows(rng, 5, d))
        answers = box(tokens[:, None], "offset")
        pairs.append((tokens[:, None], answers))
        start = tokens @ whole.T + found
        point, rest = behind.read(answers, start, np.full(len(tokens), radius))
        good = rest < max(1e-3, 1e2 * box.error**0.5)
        if good.sum() < 2:
            raise Unclear("no point of the sphere explains the answer to a single token")
        n = point[good] / radius
        across = np.eye(p) - np.einsum("na,nb->nab", n, n)
        right = -np.einsum("nab,nb->na", across, tokens[good] @ whole.T)
        found, *_ = np.linalg.lstsq(across.reshape(-1, p), right.ravel(), rcond=None)
    return found, pairs


# --- 5: the first epsilon -------------------------------------------------------------------------


def find_epsilon(
    box: Asker, whole: Float[Array, "p d"], offset: Float[Array, " p"],
    build: Callable[[float], Block], rng: np.random.Generator,
) -> tuple[float, tuple[Array, Array]]:  # fmt: skip
    """From tokens whose z has root mean squares from 0.1 to 1e-4: the epsilon that explains the
    answers best; and these queries."""
    d = whole.shape[1]
    back = np.linalg.pinv(whole)
    sizes = np.repeat(10.0 ** -np.arange(1.0, 4.6, 0.5), 2)
    z = rng.standard_normal((len(sizes), len(whole)))
    z *= np.sqrt(d) * sizes[:, None] / lengths(z)
    tokens = box.representable((z - offset) @ back.T)[:, None]
    answers = box(tokens, "epsilon")

    def misfit(power: float) -> float:
        return float(np.sum((build(10.0**power)(tokens) - answers) ** 2))

    grid = np.linspace(-14.0, -0.5, 55)
    best = grid[int(np.argmin([misfit(power) for power in grid]))]
    found = minimize_scalar(misfit, bounds=(best - 0.3, best + 0.3), method="bounded")
    return float(10.0**found.x), (tokens, answers)


def polish_offset(
    build: Callable[[Array, float], Block], offset: Float[Array, " p"], epsilon: float, pairs: Pairs
) -> tuple[Float[Array, " p"], float]:
    """Offset and epsilon, by least squares on all single tokens of moderate size."""
    tokens, answers = (np.concatenate(part) for part in zip(*pairs, strict=True))

    def rest(place: Array) -> Array:
        return np.asarray((build(place[:-1], float(np.exp(place[-1])))(tokens) - answers).ravel())

    start = np.append(offset, np.log(epsilon))
    # an epsilon that hardly shows stays within three powers of ten
    room = np.append(np.full(len(offset), np.inf), 7.0)
    found = least_squares(
        rest, start, x_scale="jac", max_nfev=30, bounds=(start - room, start + room)
    )
    return found.x[:-1], float(np.exp(found.x[-1]))


# --- all of it ------------------------------------------------------------------------------------


def bends(box: Asker, rng: np.random.Generator) -> bool:
    """Whether there is a network behind the attention: without one, huge tokens x and -x have
    answers whose sum is the same for all x."""
    tokens = box.error ** (-5.0 / 8.0) * unit_rows(rng, 2, box.width)
    tokens = box.representable(np.concatenate([tokens, -tokens]))
    answers = box(tokens[:, None], "network")
    sums = answers[:2] + answers[2:]
    # the offset of the attention shows by its share in a huge token
    doubt = max(1e3 * box.error, 1e2 * box.error ** (5.0 / 8.0))
    return bool(np.abs(sums[0] - sums[1]).max() > doubt * np.abs(answers).max())


def find_post_norm_block(
    box: Asker, rng: np.random.Generator, options: PostNormOptions | None = None
) -> tuple[list[Block], Pairs]:
    """The block to a few digits, and the queries and answers that refine it; raises Unclear."""
    options = PostNormOptions() if options is None else options
    plane = kept_plane(box.width, "layer")
    maps = find_values(box, plane, options, rng)
    sphere = SphereAnswers.begin(box, plane.T + maps.sum(axis=0), rng)
    sphere.grow(4 * box.width)
    sphere.read(None)
    net = choose_network(sphere, options, rng)
    sphere.correct_norm(net)
    single, pairs = find_without_scores(box, sphere, net, maps, rng)
    # contexts are seen through the network
    block, contexts = find_scores(box, settle_block(single, pairs), CONTEXT_SIZE, rng)
    return [block], [*pairs, *contexts]


def choose_network(
    sphere: SphereAnswers, options: PostNormOptions, rng: np.random.Generator
) -> Directed:
    """The network, kinked or smooth, by the way that asks least; raises Unclear."""
    p, d = sphere.whole.shape
    activations = SMOOTH if is_smooth(sphere, rng) else ("relu",)
    # points and directions are as exact as the maps
    level = 30.0 * Differences.rough(sphere.box).doubt
    if activations == ("relu",) and Differences.fine(sphere.box).doubt > KINKS_APART:
        return fit_wide(sphere, activations, level, rng)
    try:
        if activations == ("relu",) and p >= options.circles:
            return find_relus(sphere, rng)
        if activations != ("relu",):
            crowded = find_crowded(sphere, level, options, rng)
            return find_smooth(sphere, activations, level, rng) if crowded is None else crowded
    except Unclear:
        if activations != ("relu",):
            raise
        sphere.read(None)
    except NotEnough as failed:
        # the fit from a random start takes long where there are many neurons
        if room_for_neurons(p) >= 4 * d:
            raise Unclear(str(failed)) from failed
        sphere.read(None)
    return find_network(sphere, np.eye(p, p + 1), activations, level, rng)


def find_without_scores(
    box: Asker,
    sphere: SphereAnswers,
    net: Directed,
    maps: Float[Array, "h p d"],
    rng: np.random.Generator,
) -> tuple[Block, Pairs]:
    """The block whose scores are zero: all that single tokens show; and their answers."""
    plane, d = kept_plane(box.width, "layer"), box.width
    network, first, last = assemble(net, sphere)
    offset, pairs = find_offset(box, Behind(net, sphere.directions, d), sphere.whole, rng)
    none = np.zeros((d, 1))
    flat = [Head((none, none.T), np.zeros(d), (plane @ part).T) for part in maps]

    def build(offset: Array, epsilon: float) -> Block:
        return Block(
            Attention(flat, plane @ offset),
            network,
            norm="post",
            epsilons=[epsilon, last.epsilon],
            gain=np.array([first.gain, last.gain]),
            bias=np.array([first.bias, last.bias]),
        )

    epsilon, near = find_epsilon(box, sphere.whole, offset, lambda e: build(offset, e), rng)
    pairs.append(near)
    single = build(*polish_offset(build, offset, epsilon, pairs))
    return single, [*pairs, (sphere.tokens[:, None], sphere.answers)]
