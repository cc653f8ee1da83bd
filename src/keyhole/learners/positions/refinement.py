"""All parameters of a layer with positions, refined on all answers at once.

Statement.  From a start that is good to a few per cent, scores, places, values and offset are
            brought to the noise of the answers, with standard errors that say how far answers tell
            them.
Queries.    Those that were paid for, and about as many random ones as there are unknowns per number
            in an answer (`draw_queries`): tokens of a size at which scores spread by about one, in
            sequences of a few lengths. What the algebra of the stages asks is ill-conditioned
            together; random queries beside it are what determines the layer.
Algebra.    Damped Gauss-Newton steps (`fitting.solver`) by conjugate gradients on products with the
            derivative (`forward`). Keys and queries of a head have the triangle of their exact
            information as unit, in which the damping is included; each of the other matrices has
            the Kronecker factors of its own. The gauge is left free: steps of least norm do not
            move along it. Standard errors: the step that noise of the size of the misfit causes.
When it fails.  From a start in another valley the residual stays above the noise: `Fit.level`. What
            the answers do not determine keeps its start and has wide standard errors. The triangles
            take 8 (2 r (d + 1))^2 bytes for each head.
Source.     Keyhole's own; George et al. (2018) for the units.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.linalg import cholesky, solve_triangular

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.bootstrap import smooth_errors
from keyhole.fitting.gauss_newton import Blocks
from keyhole.fitting.solver import Problem, Step, Stopping, descend
from keyhole.learners.positions.forward import (
    Answered,
    Parts,
    PlacedLayer,
    Seen,
    compute,
    count_freedom,
    differentiate_scores,
    gather,
    join_alike,
    pull,
    push,
)
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import ROUNDINGS

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
        strong, long = (reached**2).sum(axis=2), (read**2).sum(axis=2)
        right = np.linalg.eigh(np.einsum("nh,nhe,nhf->hef", strong, read, read, optimize=True))[1]
        left = np.linalg.eigh(np.einsum("nh,nhp,nhq->hpq", long, reached, reached, optimize=True))[
            1
        ]
        squares = np.einsum(
            "nhp,nhe->hpe",
            np.einsum("nhp,hpq->nhq", reached, left, optimize=True) ** 2,
            np.einsum("nhe,hef->nhf", read, right, optimize=True) ** 2,
            optimize=True,
        )
        floor = 1e-8 * squares.max(axis=(1, 2), keepdims=True)  # the gauge has no size of its own
        return cls(left, right, 1.0 / np.sqrt(squares + floor + TINY))

    def apply(self, z: Array) -> Array:
        return np.asarray(self.left @ (self.size * z) @ np.swapaxes(self.right, 1, 2))

    def adjoint(self, step: Array) -> Array:
        return np.asarray(self.size * (np.swapaxes(self.left, 1, 2) @ step @ self.right))


@dataclass(frozen=True, eq=False)
class ScoreUnits:
    """Keys and queries of each head together, in the triangle of their damped information."""

    triangles: tuple[Array, ...]
    sizes: Float[Array, "h u"]

    def apply(self, z: Float[Array, "h u"]) -> Float[Array, "h u"]:
        pairs = zip(self.triangles, z, strict=True)
        solved = [solve_triangular(t, row, check_finite=False) for t, row in pairs]
        return np.asarray(self.sizes * np.array(solved, dtype=np.float64))

    def adjoint(self, step: Float[Array, "h u"]) -> Float[Array, "h u"]:
        pairs = zip(self.triangles, self.sizes * step, strict=True)
        solved = [solve_triangular(t, row, trans=1, check_finite=False) for t, row in pairs]
        return np.array(solved, dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Information:
    """What units are made of: the information of the answers on the scores of each head, scaled to
    a diagonal of one, and units of the other parts."""

    normals: tuple[Array, ...]
    sizes: Float[Array, "h u"]
    others: Mapping[str, "Kronecker | Array"]

    def units(self, blocks: Blocks, damping: float) -> "Units":
        triangles = []
        for normal in self.normals:
            damped = normal.copy()
            damped[np.diag_indices(len(damped))] += damping + 10.0 * UNIT_ROUNDOFF * len(damped)
            triangle = cholesky(damped, overwrite_a=True, check_finite=False)
            triangles.append(triangle)
        return Units(blocks, self.others, ScoreUnits(tuple(triangles), self.sizes))


@dataclass(frozen=True, eq=False)
class Units:
    """The units of all unknowns."""

    blocks: Blocks
    others: Mapping[str, "Kronecker | Array"]
    scores: ScoreUnits

    def apply(self, z: Array) -> Array:
        return self._each(z, "apply")

    def adjoint(self, step: Array) -> Array:
        return self._each(step, "adjoint")

    def measure(self, step: Array, z: Array) -> Array:
        """A step in the metric of the damping: scores in the sizes of their columns."""
        parts, found = self.blocks.split(step), self.blocks.split(z)
        if "keys" in parts:
            scaled = join_scores(parts) / self.scores.sizes
            found = {**found, **split_scores(scaled, parts)}
        return self.blocks.join(found)

    def measure_adjoint(self, measured: Array) -> tuple[Array, Array]:
        """The adjoint, as a step and as what units do not touch."""
        parts = self.blocks.split(measured)
        step = {name: np.zeros_like(part) for name, part in parts.items()}
        rest = dict(parts)
        if "keys" in parts:
            step.update(split_scores(join_scores(parts) / self.scores.sizes, parts))
            rest.update({name: np.zeros_like(parts[name]) for name in ("keys", "queries")})
        return self.blocks.join(step), self.blocks.join(rest)

    def _each(self, vector: Array, way: str) -> Array:
        parts = self.blocks.split(vector)
        found = {
            name: unit * parts[name]
            if isinstance(unit, np.ndarray)
            else getattr(unit, way)(parts[name])
            for name, unit in self.others.items()
        }
        if "keys" in parts:
            found.update(split_scores(getattr(self.scores, way)(join_scores(parts)), parts))
        return self.blocks.join(found)


def join_scores(parts: Mapping[str, Array]) -> Float[Array, "h u"]:
    both = parts["keys"], parts["queries"]
    return np.concatenate([part.reshape(len(part), -1) for part in both], axis=1)


def split_scores(both: Float[Array, "h u"], like: Mapping[str, Array]) -> Parts:
    one, other = np.split(both, [like["keys"][0].size], axis=1)
    return {
        "keys": one.reshape(like["keys"].shape),
        "queries": other.reshape(like["queries"].shape),
    }


def find_information(
    layer: PlacedLayer, every: Sequence[Seen], rng: np.random.Generator
) -> Information:
    """The information of the answers on each part; on the values and what places add seen through
    random signs."""
    names = set(layer.free) - {"keys", "queries"}
    samples: dict[str, list[tuple[Array, Array]]] = {n: [] for n in ("ins", "outs") if n in names}
    squares = {name: np.zeros(layer.parts[name].shape) for name in names - set(samples)}
    probes = 2  # random signs on every answer: sums over hundreds of these even out
    for _ in range(probes):
        for seen in every:
            signs = rng.choice((-1.0, 1.0), seen.answers.shape) / seen.group.errors[:, None]
            pulled = pull(layer, seen, signs)
            if "ins" in samples:
                samples["ins"].append((seen.means, pulled.inner))
            if "outs" in samples:
                heads = seen.inner.shape[1]
                out = np.broadcast_to(signs[:, None], (len(signs), heads, signs.shape[1]))
                samples["outs"].append((seen.inner, out))
            for name, part in gather(layer, seen, pulled, list(squares)).items():
                squares[name] += part**2 / probes
    others: dict[str, Kronecker | Array] = {}
    for name, pairs in samples.items():
        reached, read = (np.concatenate(part) for part in zip(*pairs, strict=True))
        others[name] = Kronecker.of(reached, read)
    for name, part in squares.items():
        floor = 1e-8 * part.max(initial=0.0)
        others[name] = 1.0 / np.sqrt(part + floor + TINY)
    normals, sizes = [], []
    for head in range(len(layer.parts["keys"]) if "keys" in layer.free else 0):
        normal = np.zeros((0, 0))
        for seen in every:
            if seen.is_hard:  # such answers tell values alone
                continue
            rows = differentiate_scores(layer, seen, head)
            normal = rows.T @ rows if not normal.size else normal + rows.T @ rows
        size = np.sqrt(np.diagonal(normal))
        # what no answer shows (the key biases of what does not turn) has no size of its own
        size = np.maximum(size, 1e-6 * size.max(initial=TINY))
        normals.append(normal / size / size[:, None])
        sizes.append(1.0 / size)
    return Information(tuple(normals), np.array(sizes), others)


# -- The fit -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fit:
    """A layer, what it computes for all groups, and its residuals in standard errors."""

    layer: PlacedLayer
    every: tuple[Seen, ...]

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

    @cached_property
    def blocks(self) -> Blocks:
        return Blocks.of(self.layer.free)

    def push(self, step: Array) -> Float[Array, " numbers"]:
        """The derivative of the residual along a step."""
        change = self.blocks.split(step)
        rows = [push(self.layer, s, change) / s.group.errors[:, None] for s in self.every]
        return np.concatenate([row.ravel() for row in rows])

    def pull(self, vector: Float[Array, " numbers"]) -> Array:
        """The adjoint."""
        layer, every, names = self.layer, self.every, list(self.layer.free)
        total = {name: np.zeros(layer.parts[name].shape) for name in names}
        cuts = np.cumsum([seen.answers.size for seen in every])[:-1]
        for seen, part in zip(every, np.split(vector, cuts), strict=True):
            scaled = part.reshape(seen.answers.shape) / seen.group.errors[:, None]
            for name, found in gather(layer, seen, pull(layer, seen, scaled), names).items():
                total[name] += found
        return self.blocks.join(total)

    def move(self, step: Array) -> "Fit":
        change = self.blocks.split(step)
        moved = {name: part + change[name] for name, part in self.layer.free.items()}
        return Fit.of(self.layer.with_parts(moved), [seen.group for seen in self.every])


@dataclass(eq=False)
class Solver:
    """Damped linear problems by conjugate gradients, in units that stay as long as they serve."""

    rng: np.random.Generator
    information: Information | None = None
    enough: float = (
        0.003  # residual, relative, from which the next step corrects more than this one
    )
    window: int = 20  # products that must lower the cost by
    share: float = 0.03  # this share of it
    patience: int = 40  # products of a solution from which units are found anew
    most: int = 400  # products of a solution
    stale: bool = True
    units: tuple[float, Units] | None = None
    iterations: int = 0

    def prepare(self, at: Fit) -> "Linearized":
        if self.information is None or self.stale:
            self.information = find_information(at.layer, at.every, self.rng)
            self.stale, self.units = False, None
        return Linearized(self, at)

    def choose_units(self, blocks: Blocks, damping: float) -> Units:
        assert self.information is not None
        if self.units is None or not 0.3 < self.units[0] / max(damping, TINY) < 3.0:
            self.units = damping, self.information.units(blocks, damping)
        return self.units[1]

    def solve(self, at: Fit, right: Array, damping: float, share: float) -> Array:
        """The step s that minimises |J s - right|^2 + damping |s|^2 in the metric of the units;
        as far as a window of products lowers the cost by this share."""
        units = self.choose_units(at.blocks, damping)
        root = np.sqrt(damping)
        z = np.zeros(at.blocks.size)
        rest, held = right.copy(), np.zeros(len(z))

        def find_gradient() -> Array:
            step, beside = units.measure_adjoint(root * held)
            return np.asarray(units.adjoint(at.pull(rest) + step) + beside)

        gradient = find_gradient()
        way, size = gradient.copy(), float(gradient @ gradient)
        costs = [float(rest @ rest)]
        goal = self.enough**2 * costs[0]
        while len(costs) <= self.most and costs[-1] > goal and size > 0.0:
            step = units.apply(way)
            seen, kept = at.push(step), root * units.measure(step, way)
            length = size / float(seen @ seen + kept @ kept)
            z += length * way
            rest -= length * seen
            held -= length * kept
            costs.append(float(rest @ rest + held @ held))
            if len(costs) > self.window and costs[-1] > (1.0 - share) * costs[-1 - self.window]:
                break
            gradient = find_gradient()
            before, size = size, float(gradient @ gradient)
            way = gradient + size / before * way
        self.iterations = len(costs) - 1
        self.stale = self.stale or self.iterations > self.patience
        return units.apply(z)


@dataclass(frozen=True, eq=False)
class Linearized:
    """The linear problem at one fit."""

    solver: Solver
    at: Fit

    def step(self, damping: float) -> Step:
        step = self.solver.solve(self.at, -self.at.residual, damping, self.solver.share)
        after = self.at.residual + self.at.push(step)
        return Step(step, self.at.cost - float(after @ after))


@dataclass(frozen=True, eq=False)
class Refined:
    """A layer at the noise of the answers, and changes of its parts that the noise could have made,
    each as likely."""

    fit: Fit
    begin: float  # level of the start
    doubts: tuple[Parts, ...]

    @property
    def layer(self) -> PlacedLayer:
        return self.fit.layer

    def spread(self, measure: Callable[[PlacedLayer], Array]) -> Array:
        """Standard errors of what is computed from the parts: the change that a doubt makes; no
        entry of a matrix is known better than the usual one."""
        own = measure(self.layer)
        square = np.zeros(own.shape)
        for doubt in self.doubts:
            parts = {name: self.layer.parts[name] + change for name, change in doubt.items()}
            square += (measure(self.layer.with_parts(parts)) - own) ** 2 / len(self.doubts)
        return smooth_errors(np.sqrt(square)) if square.ndim > 1 else np.sqrt(square)


def refine(start: PlacedLayer, groups: Sequence[Answered], rng: np.random.Generator) -> Refined:
    """The least squares solution near the start, and what noise of the size of the misfit would
    have changed."""
    solver = Solver(rng)
    share = 0.1  # decrease of the misfit, relative, in a step after which there is no other
    steps = 10  # of Gauss-Newton: from a start off by a per cent about four
    problem = Problem(lambda fit: fit.cost, solver.prepare, lambda fit, step: fit.move(step))
    begin = Fit.of(start, join_alike(groups))
    target = 1.5**2 * begin.freedom  # the noise: a further step would gain next to nothing
    stopping = Stopping(
        steps=steps, target=target, tolerance=1e-6, window=1, share=share, damping=1e-4
    )
    fit = descend(problem, begin, stopping).state
    if fit.level > ROUNDINGS:  # then it explains nothing, and has no standard errors
        return Refined(fit, begin.level, ())
    probes = 1  # repetitions for the standard errors
    solver.prepare(fit)
    doubts = []
    for _ in range(probes):
        noise = fit.level * rng.standard_normal(len(fit.residual))
        step = solver.solve(fit, noise, damping=1e-12, share=0.02)
        doubts.append(fit.blocks.split(step))
    return Refined(fit, begin.level, tuple(doubts))


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
                length - 1,
            )
        )
    return groups
