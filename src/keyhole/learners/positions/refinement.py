"""All parameters of a layer with positions, refined on all answers at once.

Statement.  From a start that is good to a few per cent, scores, places, values and offset are
            brought to the noise of the answers, with standard errors that say how far answers tell
            them.
Queries.    Those that were paid for, and about as many random ones as there are unknowns per number
            in an answer (`draw_queries`): tokens of a size at which scores spread by about one, in
            sequences of a few lengths. What the algebra of the stages asks is ill-conditioned
            together; random queries beside it are what determines the layer.
Algebra.    Gauss-Newton steps (`fitting.solver`) by conjugate gradients on products with the
            derivative (`forward`) in single precision, residuals in double. What turns keys is a
            free matrix for each head, A in e^(A D): pairs that hardly turn within the sequences
            could else be mixed with each other almost for nothing, along a valley that is long and
            curved, while A is determined as well as scores are; so is what key biases add by place,
            a row of A. The first step has units from Kronecker factors, the others for what makes
            scores the triangle of their exact information. The gauge is left free: steps of least
            norm do not move along it. Standard errors: the step that noise of the size of the
            misfit causes.
When it fails.  From a start in another valley the residual stays above the noise: `Fit.level`. What
            the answers do not determine keeps its start and has wide standard errors. The triangles
            take 4 (2 r (d + 1) + r^2)^2 bytes for each head.
Source.     Keyhole's own; George et al. (2018) for the units.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.linalg import cholesky, solve_triangular
from scipy.linalg.blas import ssyrk

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, Array, Float
from keyhole.fitting.bootstrap import smooth_errors
from keyhole.fitting.conjugate_gradients import Ending, Scaled, Solved, solve_cgls
from keyhole.fitting.gauss_newton import Blocks
from keyhole.fitting.kronecker import LEAST
from keyhole.fitting.solver import Problem, Step, Stopping, descend
from keyhole.learners.positions.forward import (
    Answered,
    Parts,
    PlacedLayer,
    Pulled,
    Seen,
    anchor_vectors,
    compute,
    count_freedom,
    differentiate_scores,
    gather,
    join_alike,
    name_pairs,
    pull,
    pull_tokens,
    push,
)
from keyhole.measurement.asker import Asker

SCORES = ("keys", "queries", "turns")  # what makes the scores of a head, in this order
VALUES = frozenset({"ins", "outs", "offset", "vectors"})  # what hard attention tells
MATRICES = ("keys", "queries", "ins", "outs")  # one for each head; the derivative: outer products
SHORTER = (1.0, 0.5, 0.2, 0.05)  # parts of a step that are tried, until the cost falls
NEARLY = 0.05  # share of the residual left by a step below which its units serve for the next one
DAMPING = 1e-4  # of the first step with exact units, which columns have the norm one
ROUGH = 0.5  # share of the cost that steps with rough units take off, each, while they go on
STEPS = 40  # with exact units; from a start off by a few per cent about four
MOST = 300  # products for standard errors: along the gauge they would grow for ever
ENOUGH = 1.5  # misfit in standard errors from which a further step would gain next to nothing


# -- Units of the unknowns ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Kronecker:
    """A matrix per head in the eigenvectors of what it reads and of what reaches its result."""

    left: Float[Array, "h p p"]
    right: Float[Array, "h e e"]
    size: Float[Array, "h p e"]

    @classmethod
    def of(cls, reached: Float[Array, "n h p"], read: Float[Array, "n h e"]) -> "Kronecker":
        """reached, read: what reaches the result of the matrix and what it reads, sample by
        sample; their squares summed are its Fisher information."""
        lefts, rights, sizes = [], [], []
        for g, a in zip(np.moveaxis(reached, 1, 0), np.moveaxis(read, 1, 0), strict=True):
            outside = (g * (a * a).sum(axis=1, keepdims=True)).T @ g
            inside = (a * (g * g).sum(axis=1, keepdims=True)).T @ a
            left, right = (
                np.linalg.eigh(gram.astype(np.float64))[1].astype(g.dtype)
                for gram in (outside, inside)
            )
            squares = (((g @ left) ** 2).T @ (a @ right) ** 2).astype(np.float64)
            lefts.append(left)
            rights.append(right)
            sizes.append(scale_of(squares).astype(g.dtype))
        return cls(np.array(lefts), np.array(rights), np.array(sizes))

    def apply(self, z: Array) -> Array:
        return np.asarray(self.left @ (self.size * z) @ np.swapaxes(self.right, 1, 2))

    def adjoint(self, step: Array) -> Array:
        return np.asarray(self.size * (np.swapaxes(self.left, 1, 2) @ step @ self.right))


@dataclass(frozen=True, eq=False)
class Directions:
    """Vectors of all places, in eigenvectors over the places and over their entries: answers to
    long sequences show means over many places far better than single vectors."""

    left: Float[Array, "places places"]
    right: Float[Array, "d d"]
    size: Float[Array, "places d"]

    @classmethod
    def of(cls, samples: Sequence[tuple[Array, Array]], count: int) -> "Directions":
        """samples: what reaches the tokens (n, m, d) and their places (n, m), group by group; as
        matrices of all places their squares summed are the Fisher information."""
        width = samples[0][0].shape[2]
        outside, inside = np.zeros((count, count)), np.zeros((width, width))
        for matrices in scatter(samples, count):
            flat = matrices.reshape(-1, width)
            inside += flat.T @ flat
            outside += np.tensordot(matrices, matrices, axes=((0, 2), (0, 2)))
        left, right = (np.linalg.eigh(gram)[1].astype(np.float32) for gram in (outside, inside))
        squares = np.zeros((count, width))
        for matrices in scatter(samples, count):
            squares += ((left.T @ matrices @ right) ** 2).sum(axis=0)
        return cls(left, right, scale_of(squares).astype(np.float32))

    def apply(self, z: Array) -> Array:
        return np.asarray(self.left @ (self.size * z) @ self.right.T)

    def adjoint(self, step: Array) -> Array:
        return np.asarray(self.size * (self.left.T @ step @ self.right))


def scatter(
    samples: Sequence[tuple[Array, Array]], count: int
) -> Iterator[Float[Array, "n places d"]]:
    """What reaches the tokens of some queries after the others, as matrices of all places."""
    for reached, places in samples:
        some = max(1, 2**22 // (count * reached.shape[2]))  # queries whose matrices fit in a cache
        for start in range(0, len(reached), some):
            part, stood = reached[start : start + some], places[start : start + some]
            matrices = np.zeros((len(part), count, part.shape[2]), np.float32)
            matrices[np.arange(len(part))[:, None], stood] = part
            yield matrices


def scale_of(squares: Array) -> Array:
    """One over the columns' norms; the gauge has none of its own."""
    largest = squares.max(initial=0.0) or 1.0  # nothing shows where attention is hard
    return np.asarray(1.0 / np.sqrt(np.maximum(squares, LEAST * largest)))


@dataclass(frozen=True, eq=False)
class Triangles:
    """What makes the scores of each head together, in the triangle of its damped information."""

    triangles: tuple[Array, ...]
    sizes: Float[Array, "h u"]

    def apply(self, z: Float[Array, "h u"]) -> Float[Array, "h u"]:
        pairs = zip(self.triangles, z, strict=True)
        solved = [solve_triangular(t, row, check_finite=False) for t, row in pairs]
        return np.asarray(self.sizes * np.array(solved))

    def adjoint(self, step: Float[Array, "h u"]) -> Float[Array, "h u"]:
        pairs = zip(self.triangles, self.sizes * step, strict=True)
        return np.array([solve_triangular(t, row, trans=1, check_finite=False) for t, row in pairs])


@dataclass(frozen=True, eq=False)
class Information:
    """What units are made of: the information of the answers on what makes the scores of each head,
    scaled to a diagonal of one, and units of the other parts."""

    single: Mapping[str, Kronecker | Directions | Array]
    normals: tuple[Array, ...] = ()
    sizes: Float[Array, "h u"] | None = None

    def hold(self, layer: PlacedLayer) -> "Information":
        """The same where more is known of what makes scores."""
        if self.sizes is None:
            return self
        known = find_unknown(layer)
        return replace(
            self,
            normals=tuple(
                normal * mask * mask[:, None]
                for normal, mask in zip(self.normals, known, strict=True)
            ),
        )

    def units(self, damping: float) -> "Units":
        if self.sizes is None:
            return Units(self.single)
        triangles = []
        for normal in self.normals:
            damped = normal.copy()
            damped[np.diag_indices(len(damped))] += damping + SINGLE_ROUNDOFF * len(damped)
            triangles.append(cholesky(damped, overwrite_a=True, check_finite=False))
        return Units(self.single, Triangles(tuple(triangles), self.sizes))


def find_unknown(layer: PlacedLayer) -> Float[Array, "h u"]:
    """One where an entry of what makes the scores is unknown, else zero."""
    parts = {name: np.ones_like(layer.parts[name]) for name in SCORES if name in layer.free}
    masks = {name: mask for name, mask in layer.masks.items() if name in parts}
    return join_scores({**parts, **masks}).astype(np.float32)


def inform(layer: PlacedLayer, every: Sequence[Seen]) -> tuple[tuple[Array, ...], Array]:
    """The information on what makes the scores of each head, and the sizes of its unknowns."""
    normals, sizes = [], []
    for head, unknown in enumerate(find_unknown(layer)):
        normal: Array | None = None
        for seen in every:
            if not seen.is_hard:  # such answers show values alone
                rows = differentiate_scores(layer, seen, head)
                first = {} if normal is None else {"beta": 1.0, "c": normal, "overwrite_c": 1}
                normal = ssyrk(1.0, rows.T, **first)
        assert normal is not None
        # what no answer shows (the key biases of what does not turn) has no size of its own
        size = scale_of(unknown * normal.diagonal()).astype(np.float32)
        scale = unknown * size
        normal *= scale
        normal *= scale[:, None]
        normals.append(normal)
        sizes.append(size)
    return tuple(normals), np.array(sizes)


@dataclass(frozen=True, eq=False)
class Units:
    """The units of all unknowns: of each part its own, or of what makes the scores together."""

    single: Mapping[str, Kronecker | Directions | Array]
    scores: Triangles | None = None

    def apply(self, z: Parts) -> Parts:
        return self._each(z, "apply")

    def adjoint(self, step: Parts) -> Parts:
        return self._each(step, "adjoint")

    def measure(self, step: Parts, z: Parts) -> Parts:
        """A step in the metric of the damping: what makes scores in the sizes of its columns."""
        if self.scores is None:
            return z
        return {**z, **split_scores(join_scores(step) / self.scores.sizes, z)}

    def adjoint_both(self, step: Parts, measured: Parts) -> Parts:
        """The adjoint of `apply`, and that of `measure`, in one pass through the triangles."""
        if self.scores is None:
            own = self.adjoint(step)
            return {name: own[name] + part for name, part in measured.items()}
        held = split_scores(join_scores(measured) / self.scores.sizes, measured)
        both = self.adjoint({**step, **{name: step[name] + part for name, part in held.items()}})
        return {
            name: both[name] if name in held else both[name] + part
            for name, part in measured.items()
        }

    def _each(self, parts: Parts, way: str) -> Parts:
        found = {
            name: unit * parts[name]
            if isinstance(unit, np.ndarray)
            else getattr(unit, way)(parts[name])
            for name, unit in self.single.items()
        }
        if self.scores is not None:
            found.update(split_scores(getattr(self.scores, way)(join_scores(parts)), parts))
        return found


def join_scores(parts: Mapping[str, Array]) -> Float[Array, "h u"]:
    both = [parts[name] for name in SCORES if name in parts]
    return np.concatenate([part.reshape(len(part), -1) for part in both], axis=1)


def split_scores(both: Float[Array, "h u"], like: Mapping[str, Array]) -> Parts:
    names = [name for name in SCORES if name in like]
    cuts = np.cumsum([like[name][0].size for name in names])[:-1]
    split = np.split(both, cuts, axis=1)
    return {name: part.reshape(like[name].shape) for name, part in zip(names, split, strict=True)}


# -- The linear problem ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Linear:
    """The derivative of all answers in their standard errors at one layer, in single precision."""

    layer: PlacedLayer
    every: tuple[Seen, ...]
    weights: tuple[Float[Array, "_ 1"], ...]  # one over the standard errors of the answers

    @classmethod
    def of(cls, layer: PlacedLayer, every: Sequence[Seen]) -> "Linear":
        single = {name: part.astype(np.float32) for name, part in layer.parts.items()}
        weights = [(1.0 / seen.group.errors[:, None]).astype(np.float32) for seen in every]
        cast = tuple(seen.astype(np.float32) for seen in every)
        return cls(layer.with_parts(single), cast, tuple(weights))

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.layer.free)

    @cached_property
    def masks(self) -> Parts:
        return self.layer.masks

    def mask(self, change: Parts) -> Parts:
        """A change of what is unknown alone."""
        masks = {name: mask for name, mask in self.masks.items() if name in change}
        return {**change, **{name: mask * change[name] for name, mask in masks.items()}}

    def push(self, change: Parts) -> Float[Array, " numbers"]:
        pairs = zip(self.every, self.weights, strict=True)
        return np.concatenate(
            [(push(self.layer, s, change) * weight).ravel() for s, weight in pairs]
        )

    def pull(self, vector: Float[Array, " numbers"]) -> Parts:
        """The adjoint."""
        names = list(self.layer.free)
        total = {name: np.zeros_like(self.layer.parts[name]) for name in names}
        cuts = np.cumsum([seen.answers.size for seen in self.every])[:-1]
        parts = np.split(vector, cuts)
        for seen, weight, part in zip(self.every, self.weights, parts, strict=True):
            pulled = pull(self.layer, seen, part.reshape(seen.answers.shape) * weight)
            for name, found in gather(self.layer, seen, pulled, names).items():
                total[name] += found
        return total

    def scaled(self, units: Units, damping: float) -> Scaled:
        """Products with the derivative in these units, and the damping below it."""
        blocks, root = self.blocks, np.float32(np.sqrt(damping))

        def push_scaled(vector: Array) -> Array:
            z = blocks.split(vector)
            step = units.apply(z)
            return np.append(self.push(self.mask(step)), root * blocks.join(units.measure(step, z)))

        def pull_scaled(vector: Array) -> Array:
            answers, held = np.split(vector, [len(vector) - blocks.size])
            measured = blocks.split(root * held)
            return blocks.join(units.adjoint_both(self.mask(self.pull(answers)), measured))

        return Scaled(push_scaled, pull_scaled)

    def solve(
        self, units: Units, damping: float, right: Array, ending: Ending
    ) -> tuple[Array, Solved]:
        """The step towards a right side, and how it was found."""
        size = float(np.linalg.norm(right)) + TINY
        rows = np.append(right / size, np.zeros(self.blocks.size)).astype(np.float32)
        found = solve_cgls(self.scaled(units, damping), rows, ending)
        step = self.blocks.join(self.mask(units.apply(self.blocks.split(found.z))))
        return size * step.astype(np.float64), found

    def inform(self, rng: np.random.Generator, together: bool) -> Information:
        """Units from random signs on all answers; for what makes scores `together` the exact ones
        of each head."""
        together = together and "keys" in self.layer.free
        names = [n for n in self.layer.free if not (together and n in SCORES)]
        samples: dict[str, list[tuple[Array, Array]]] = {n: [] for n in MATRICES if n in names}
        places: list[tuple[Array, Array]] = []  # what reaches the tokens, and where they stand
        squares = {
            n: np.zeros(self.layer.parts[n].shape)
            for n in names
            if n not in samples and n != "vectors"
        }
        probes = 2  # random signs on every answer: sums over hundreds of these even out
        for _ in range(probes):
            for seen, weight in zip(self.every, self.weights, strict=True):
                signs = rng.choice(np.array([-1.0, 1.0], np.float32), seen.answers.shape) * weight
                signs /= np.sqrt(np.float32(probes))
                pulled = pull(self.layer, seen, signs)
                for name, pairs in samples.items():
                    pairs.append(sample(name, seen, pulled, signs))
                if "vectors" in names:
                    places.append((pull_tokens(self.layer, seen, pulled), seen.group.places))
                for name, part in gather(self.layer, seen, pulled, list(squares)).items():
                    squares[name] += part**2
        squares = self.mask(squares)
        single: dict[str, Kronecker | Directions | Array] = {
            name: scale_of(part).astype(np.float32) for name, part in squares.items()
        }
        for name, pairs in samples.items():
            reached, read = (np.concatenate(part) for part in zip(*pairs, strict=True))
            single[name] = Kronecker.of(reached, read)
        if places:
            single["vectors"] = Directions.of(places, len(self.layer.parts["vectors"]))
        return Information(single, *(inform(self.layer, self.every) if together else ()))


def sample(name: str, seen: Seen, pulled: Pulled, signs: Array) -> tuple[Array, Array]:
    """What reaches the result of a matrix of every head, and what it reads."""
    count, heads = seen.inner.shape[:2]
    if name == "keys":
        reached = pulled.keys.reshape(-1, *pulled.keys.shape[2:])
        read = seen.with_one.reshape(-1, 1, seen.with_one.shape[2])
        return reached, np.broadcast_to(read, (len(read), heads, read.shape[2]))
    if name == "queries":
        last = seen.with_one[:, -1:]
        return pulled.queries, np.broadcast_to(last, (count, heads, last.shape[2]))
    if name == "ins":
        return seen.means, pulled.inner
    return seen.inner, np.broadcast_to(signs[:, None], (count, heads, signs.shape[1]))


# -- The fit -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fit:
    """A layer, what it computes for all groups, and its residuals in standard errors."""

    layer: PlacedLayer
    every: tuple[Seen, ...]
    share: float = 1.0  # of the residual that the last step left

    @classmethod
    def of(cls, layer: PlacedLayer, groups: Sequence[Answered]) -> "Fit":
        return cls(layer, tuple(compute(layer, group) for group in groups))

    @cached_property
    def residual(self) -> Float[Array, " numbers"]:
        rows = [
            (seen.answers - seen.group.answers) / seen.group.errors[:, None] for seen in self.every
        ]
        return np.concatenate([row.ravel() for row in rows])

    @property
    def cost(self) -> float:
        return float(self.residual @ self.residual)

    @property
    def freedom(self) -> int:
        """Numbers in the answers less unknowns."""
        return max(1, len(self.residual) - count_freedom(self.layer))

    @property
    def level(self) -> float:
        """Root mean square residual per degree of freedom: about one where all is well."""
        return float(np.sqrt(self.cost / self.freedom))

    def move(self, step: Array) -> "Fit":
        """After a step, or the first part of it that lowers the cost."""
        change = Blocks.of(self.layer.free).split(step)
        groups, best = [seen.group for seen in self.every], self
        for part in SHORTER:
            moved = {name: own + part * change[name] for name, own in self.layer.free.items()}
            best = Fit.of(self.layer.with_parts(moved), groups)
            if best.cost < self.cost:
                break
        return replace(best, share=float(np.sqrt(best.cost / max(self.cost, TINY))))


@dataclass(eq=False)
class Settling:
    """Damped Gauss-Newton steps, with units that stay as long as the answers are nearly linear.

    together: whether what makes the scores of a head has units of its own, or each part of it.
    """

    rng: np.random.Generator
    together: bool
    ending: Ending
    information: Information | None = None

    def settle(self, begin: Fit, stopping: Stopping) -> Fit:
        problem = Problem(lambda fit: fit.cost, self.linearize, lambda fit, step: fit.move(step))
        return descend(problem, begin, stopping).state

    def linearize(self, fit: Fit, near: float = NEARLY) -> "Linearized":
        """The linear problem at a fit; units are found anew if a step left more than `near`."""
        linear = Linear.of(fit.layer, fit.every)
        if self.information is None or fit.share > near:
            self.information = linear.inform(self.rng, self.together)
        return Linearized(self, fit, linear)

    def solve(self, at: "Linearized", damping: float, right: Array, ending: Ending) -> Step:
        """The step towards a right side, and how much of its square it explains."""
        assert self.information is not None
        step, found = at.linear.solve(self.information.units(damping), damping, right, ending)
        return Step(step, float(right @ right) * (1.0 - found.left))

    def doubt(self, fit: Fit) -> Parts:
        """A step that noise of the size of the misfit would cause."""
        at = self.linearize(fit, near=1.0)
        noise = fit.level * self.rng.standard_normal(len(fit.residual))
        step = self.solve(at, 0.0, noise, Ending(window=20, growth=0.02, most=MOST)).step
        return at.linear.blocks.split(step)


@dataclass(frozen=True, eq=False)
class Linearized:
    """The linear problem at one fit."""

    settling: Settling
    fit: Fit
    linear: Linear

    def step(self, damping: float) -> Step:
        # a step is solved as exactly as the last one was linear
        share = float(np.clip(0.3 * self.fit.share, 1e-3, 0.1))
        ending = replace(self.settling.ending, share=share)
        return self.settling.solve(self, damping, -self.fit.residual, ending)


def refine(
    start: PlacedLayer, groups: Sequence[Answered], rng: np.random.Generator
) -> tuple[Fit, Settling]:
    """The least squares solution near the start, and what its last steps were found with."""
    groups = join_alike(groups)
    # hard attention tells the values far better than a start of scores is, which comes first
    told = start.held | VALUES
    first = replace(start, held=told) if start.parts.keys() - told else start
    rough = Stopping(steps=STEPS, target=0.0, damping=0.0, window=1, share=ROUGH)
    settling = Settling(rng, False, Ending(window=25, least=0.1))
    near = settling.settle(Fit.of(first, groups), rough).layer
    settling = Settling(rng, True, Ending(window=25, least=0.01))
    return settle_finely(Fit.of(replace(near, held=start.held), groups), settling)


def search_layer(
    start: PlacedLayer, groups: Sequence[Answered], rng: np.random.Generator
) -> PlacedLayer:
    """The layer that explains the answers, from small random scores: damped steps, in
    which the answers see a matrix of low rank; the values, and what turns keys, follow."""
    groups, layer = join_alike(groups), start
    first = (VALUES - {"vectors"}) | {"turns"}
    for held in (first, frozenset({"turns"}), frozenset[str]())[: 2 + ("turns" in start.parts)]:
        begin = Fit.of(replace(layer, held=start.held | held), groups)
        target = ENOUGH**2 * begin.freedom
        far = Stopping(steps=2 * STEPS, target=target, damping=1.0, window=6, share=0.1)
        layer = Settling(rng, False, Ending(window=25, least=0.1)).settle(begin, far).layer
    return replace(layer, held=start.held)


def refine_held(fit: Fit, settling: Settling, layer: PlacedLayer) -> tuple[Fit, Settling]:
    """The solution from a fit on of a layer in which more is held, in the units of its steps."""
    begin = Fit.of(layer, [seen.group for seen in fit.every])
    if settling.information is not None:
        begin = replace(begin, share=min(fit.share, NEARLY))
        settling = replace(settling, information=settling.information.hold(layer))
    return settle_finely(begin, settling)


def settle_finely(begin: Fit, settling: Settling) -> tuple[Fit, Settling]:
    target = ENOUGH**2 * begin.freedom
    fine = Stopping(
        steps=STEPS, target=target, tolerance=1e-3, window=2, share=0.1, damping=DAMPING
    )
    return settling.settle(begin, fine), settling


@dataclass(frozen=True, eq=False)
class Doubts:
    """Changes of the parts of a layer that the noise could have made, each as likely."""

    layer: PlacedLayer
    changes: tuple[Parts, ...]

    @classmethod
    def of(cls, fit: Fit, settling: Settling, probes: int = 1) -> "Doubts":
        return cls(fit.layer, tuple(settling.doubt(fit) for _ in range(probes)))

    @staticmethod
    def view(layer: PlacedLayer) -> PlacedLayer:
        """As layers are told: in pairs, less what all vectors share."""
        return anchor_vectors(name_pairs(layer))

    def spread(self, measure: Callable[[PlacedLayer], Array]) -> Array:
        """Standard errors of what is computed from the parts: the change that a doubt makes; no
        entry of a matrix is known better than the usual one."""
        own = measure(self.view(self.layer))
        square = np.zeros(own.shape)
        for doubt in self.changes:
            parts = {name: self.layer.parts[name] + change for name, change in doubt.items()}
            moved = self.view(self.layer.with_parts(parts))
            square += (measure(moved) - own) ** 2 / len(self.changes)
        return smooth_errors(np.sqrt(square)) if square.ndim > 1 else np.sqrt(square)


def find_natural_size(layer: PlacedLayer, rng: np.random.Generator) -> float:
    """The size of tokens' entries at which scores of two tokens differ by about one."""
    tokens, length = 64, 8  # sequences that are looked at, none of which is asked
    width = layer.parts["ins"].shape[1]
    drawn = rng.standard_normal((tokens, length, width))
    low, high = 1e-6, 1e6

    def spread(size: float) -> float:
        with_one = np.concatenate([size * drawn, np.ones((tokens, length, 1))], axis=2)
        keys = np.tensordot(with_one, layer.parts["keys"], axes=(2, 2))
        queries = np.tensordot(with_one[:, -1], layer.parts["queries"], axes=(1, 2))
        scores = np.einsum("nmhp,nhp->nmh", keys, queries)
        return float(np.median(scores.std(axis=1)))

    for _ in range(40):  # halvings of the logarithm's interval
        middle = np.sqrt(low * high)
        low, high = (middle, high) if spread(middle) < 1.0 else (low, middle)
    return float(np.sqrt(low * high))


def draw_queries(
    ask: Asker,
    rng: np.random.Generator,
    count: int,
    size: float,
    lengths: Mapping[int, float],
    purpose: str,
) -> list[Answered]:
    """Random tokens of this size in sequences of a few lengths, each with its share of the
    queries; one list for each length."""
    groups = []
    for length, share in lengths.items():
        some = max(1, round(share * count))
        tokens = ask.representable(size * rng.standard_normal((some, length, ask.width)))
        answers = ask(tokens, purpose)
        groups.append(
            Answered(
                tokens,
                np.arange(length)[::-1].copy(),
                answers,
                np.maximum(ask.unit * np.abs(answers).max(axis=1), TINY),
                np.full(some, length - 1),
            )
        )
    return groups
