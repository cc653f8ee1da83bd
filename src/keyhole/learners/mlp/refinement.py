"""Least-squares refinement of a network with one hidden layer on all its answers.

Statement.  From a start near enough, Gauss-Newton steps converge quadratically to the network that
            fits the answers, at 1.2 times as many numbers as unknowns and more.
Queries.    None: points and answers are given.
Algebra.    Variable projection. With A the arguments of φ, the columns Φ = [φ(A), x, 1] carry
            outer, linear and offset linearly: they are eliminated by a QR decomposition Φ = Q R,
            which leaves the residual P Y, P = 1 - Q Qᵀ. Its derivative (Kaufman) is
            -P (φ'(A) * (x̃ δᵀ)) outerᵀ, never formed: products with it and its transpose drive
            conjugate gradients, with each neuron's own Gram matrix as preconditioner. Few unknowns
            are solved densely: the normal matrix is, blockwise, (outerᵀ outer) * (Hᵀ H) with
            H = P (φ'(A) * x̃).
            A gated neuron φ(g) u has two blocks, φ'(g) u and φ(g); the scale of u is held.
Fails.      One neuron far from its place: the residual stalls, and says so.
Source.     Golub and Pereyra (1973), Kaufman (1975), as in every separable least-squares problem.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve, qr, solve_triangular

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.conjugate_gradients import Ending, Scaled, solve_cgls
from keyhole.fitting.jackknife import list_fisher_steps, list_jackknife_steps
from keyhole.fitting.solver import Problem, Step, Stopping
from keyhole.fitting.solver import descend as solve_problem
from keyhole.network.weights import Weights, hidden_layer, with_one


@dataclass(frozen=True)
class RefinementOptions:
    """steps: of Gauss-Newton, at most. inner_steps: of conjugate gradients in one of them; for
    large problems, which are solved in single precision, `large_steps`. dense: unknowns up to which
    the normal matrix is formed; grams: up to which each neuron's Gram matrix is. draws: disturbed
    answers from which standard errors follow. ridge: of a normal matrix with unit diagonal, so that
    directions that no answer sees stay where they are."""

    steps: int = 30
    inner_steps: int = 800
    large_steps: int = 250
    dense: int = 2400
    grams: int = 60000
    draws: int = 4
    ridge: float = 1e-13


@dataclass(frozen=True, eq=False)
class RefinedNetwork:
    """What the refinement came to."""

    weights: Weights
    residual: float  # root mean square over all numbers, degrees of freedom taken off
    largest: float  # residual of one number, at most
    steps: int
    errors: Weights | None = None  # standard errors in the same places


Solve = Callable[[Array, float, float], Array]
Maps = tuple[Callable[[Array], Array], Callable[[Array], Array], tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class EliminatedSpan:
    """An orthonormal basis of what is eliminated."""

    points: Float[Array, "n c"]

    def project_out(self, values: Array) -> Array:
        """What the span leaves of values at the points."""
        return np.asarray(values - self.points @ (self.points.T @ values))

    def rounded(self, kind: Any) -> "EliminatedSpan":
        return EliminatedSpan(self.points.astype(kind))


class Linearised:
    """One linearisation: the linear part eliminated, derivatives ready to be multiplied."""

    def __init__(
        self,
        weights: Weights,
        homogeneous: Array,
        answers: Array,
        options: RefinementOptions,
        maps: Maps | None = None,
    ) -> None:
        self.weights, self.homogeneous, self.options = weights, homogeneous, options
        self.maps = maps  # the preconditioner of a linearisation nearby, where that is dear
        self.hidden, self.slopes = hidden_layer(weights, homogeneous)
        columns = np.column_stack([self.hidden, homogeneous])
        self.norms = np.maximum(np.linalg.norm(columns, axis=0), TINY)
        # not the neurons that are silent at all points, or as good as that
        self.seen = self.norms > np.finfo(np.float64).eps ** 2 * self.norms.max()
        scaled = (columns / self.norms)[:, self.seen]
        basis, self.triangle = qr(scaled, mode="economic", check_finite=False)
        self.span = EliminatedSpan(basis)
        self.residual = self.span.project_out(answers)
        self.left = max(len(columns) - basis.shape[1], 0) * answers.shape[1]  # numbers to explain
        self.linear = self.eliminated(answers)  # (m + e, k)
        self.outer = self.linear[: weights.neurons].T
        blocks = [weights.inner] if weights.gate is None else [weights.inner, weights.gate]
        self.shape = (len(blocks), *weights.inner.shape)
        self.held = None
        if weights.gate is not None:  # the scale of u belongs to outer: it is held
            self.held = weights.inner / np.linalg.norm(weights.inner, axis=1, keepdims=True)

    def eliminated(self, answers: Array) -> Array:
        """The linear part that fits the answers best."""
        found = np.zeros((len(self.seen), answers.shape[1]))
        found[self.seen] = solve_triangular(
            self.triangle, self.span.points.T @ answers, check_finite=False
        )
        return np.asarray(found / self.norms[:, None])

    def free(self, step: Array) -> Array:
        if self.held is None:
            return step
        along = (step[0] * self.held).sum(axis=1, keepdims=True)
        return np.concatenate([(step[0] - along * self.held)[None], step[1:]])

    def hidden_change(self, step: Array) -> Array:
        change = self.slopes[0] * (self.homogeneous @ step[0].T)
        for slope, part in zip(self.slopes[1:], step[1:], strict=True):
            change += slope * (self.homogeneous @ part.T)
        return change

    def forward(self, step: Float[Array, "b m e"]) -> Array:
        return self.span.project_out(self.hidden_change(self.free(step)) @ self.outer.T)

    def backward(self, residual: Array) -> Float[Array, "b m e"]:
        seen = self.span.project_out(residual @ self.outer)
        return self.free(np.stack([(slope * seen).T @ self.homogeneous for slope in self.slopes]))

    def solver(self) -> Solve:
        """Maps residuals, the relative accuracy wanted and the damping (in units in which every
        unknown acts alike) to the least-squares step."""
        if np.prod(self.shape) <= self.options.dense:
            return self._dense()
        if np.prod(self.shape) <= self.options.grams:
            return self._matrix_free(*self._gram_preconditioner())
        return self._in_single_precision()

    def _columns(self, j: int) -> Array:
        """P times the derivatives by neuron j's arguments, one column each."""
        parts = [slope[:, j, None] * self.homogeneous for slope in self.slopes]
        return self.span.project_out(np.concatenate(parts, axis=1))

    def _holding(self, j: int, gram: Array) -> Array:
        """The Gram matrix with a held direction made regular."""
        if self.held is None:
            return gram
        held = np.zeros(len(gram))
        held[: self.shape[2]] = self.held[j]
        projected = gram - np.outer(held, held @ gram)
        projected -= np.outer(projected @ held, held)
        return np.asarray(projected + np.outer(held, held) * np.trace(gram) / len(gram))

    def _dense(self) -> Solve:
        blocks, neurons, entries = self.shape
        each = blocks * entries
        tall = np.concatenate([self._columns(j) for j in range(neurons)], axis=1)
        if self.held is not None:
            cube = tall.reshape(len(tall), neurons, blocks, entries)
            along = np.einsum("qje,je->qj", cube[:, :, 0], self.held)
            cube[:, :, 0] -= along[:, :, None] * self.held
        weight = np.repeat(np.repeat(self.outer.T @ self.outer, each, axis=0), each, axis=1)
        normal = (tall.T @ tall) * weight
        sizes = np.diag(normal)  # of what no answer shows, nothing but rounding
        scale = np.sqrt(np.maximum(sizes, max(1e-30 * float(sizes.max()), TINY)))
        normal /= scale[:, None] * scale
        place, ridge = np.diag_indices(len(normal)), self.options.ridge * len(normal)

        def solve(residual: Array, accuracy: float, damping: float) -> Array:
            del accuracy  # it is exact
            damped = normal.copy()
            damped[place] += ridge + damping
            factor = cho_factor(damped, lower=True, check_finite=False, overwrite_a=True)
            right = self.backward(residual).transpose(1, 0, 2).ravel() / scale
            step = cho_solve(factor, right, check_finite=False) / scale
            return self.free(step.reshape(neurons, blocks, entries).transpose(1, 0, 2))

        return solve

    def _gram_preconditioner(self) -> Maps:
        """Every neuron's own Gram matrix, by its Cholesky factor."""
        blocks, neurons, entries = self.shape
        size = (self.outer**2).sum(axis=0)
        roots = np.empty((neurons, blocks * entries, blocks * entries))
        for j in range(neurons):
            tall = self._columns(j)
            gram = self._holding(j, size[j] * (tall.T @ tall))
            gram[np.diag_indices(len(gram))] += 1e-12 * np.trace(gram) + TINY
            lower = np.linalg.cholesky(gram)
            roots[j] = solve_triangular(lower, np.eye(len(gram)), lower=True, check_finite=False)

        def outward(z: Array) -> Array:
            step = np.einsum("jba,jb->ja", roots, z).reshape(neurons, blocks, entries)
            return step.transpose(1, 0, 2)

        def inward(step: Array) -> Array:
            return np.einsum("jab,jb->ja", roots, step.transpose(1, 0, 2).reshape(neurons, -1))

        return outward, inward, (neurons, blocks * entries)

    def _rough_preconditioner(self) -> Maps:
        """Gram matrices in single precision without the QR decomposition: across a neuron's row the
        slope less its mean, which the linear part takes; along the row and for the bias, two
        numbers that are kept apart, the slope less what Φ takes of it."""
        blocks, neurons, entries = self.shape
        points, width = self.homogeneous[:, :-1], entries - 1
        short = points.astype(np.float32)
        size = np.sqrt(np.maximum((self.outer**2).sum(axis=0), TINY))
        parts = [self.weights.inner] if blocks == 1 else [self.weights.gate, self.weights.gate]
        ways = np.zeros((blocks, neurons, width))
        across = np.empty((blocks, neurons, width, width), np.float32)
        roots = np.empty((blocks, neurons, 2, 2))
        for block, (slope, rows) in enumerate(zip(self.slopes, parts, strict=True)):
            if rows is None:
                raise ValueError("a gate is needed")
            way = rows[:, :-1] / np.maximum(np.linalg.norm(rows[:, :-1], axis=1), TINY)[:, None]
            ways[block], time = way, points @ way.T
            level = size * (slope - slope.mean(axis=0))
            for j in range(neurons):
                tall = short * level[:, j, None].astype(np.float32)
                gram = tall.T @ tall
                gram -= np.outer(way[j], way[j] @ gram).astype(np.float32)
                gram -= np.outer(gram @ way[j], way[j]).astype(np.float32)
                usual = float(np.trace(gram)) / width + TINY
                gram += (usual * np.outer(way[j], way[j])).astype(np.float32)
                gram[np.diag_indices(width)] += np.float32(0.05 * usual)  # what Φ takes differs
                across[block, j] = np.linalg.inv(np.linalg.cholesky(gram))
                known = np.column_stack([np.ones(len(time)), time[:, j], self.hidden[:, j]])
                own = np.column_stack([slope[:, j] * time[:, j], slope[:, j]])
                own = own - known @ np.linalg.lstsq(known, own, rcond=1e-12)[0]
                gram = size[j] ** 2 * (own.T @ own)
                gram += (1e-9 * np.trace(gram) + TINY) * np.eye(2)
                roots[block, j] = np.linalg.inv(np.linalg.cholesky(gram))

        def without_way(rows: Array) -> Array:
            return np.asarray(rows - (rows * ways).sum(axis=2, keepdims=True) * ways)

        def outward(z: Array) -> Array:
            wide = z[:, :, None, :width].astype(np.float32) @ across
            pair = np.einsum("njba,njb->nja", roots, z[:, :, width:])
            rows = without_way(wide[:, :, 0].astype(np.float64)) + pair[:, :, :1] * ways
            return np.concatenate([rows, pair[:, :, 1:]], axis=2)

        def inward(step: Array) -> Array:
            rows = step[:, :, :width]
            wide = across @ without_way(rows)[..., None].astype(np.float32)
            pair = np.stack([(rows * ways).sum(axis=2), step[:, :, width]], axis=2)
            pair = np.einsum("njab,njb->nja", roots, pair)
            return np.concatenate([wide[..., 0].astype(np.float64), pair], axis=2)

        return outward, inward, (blocks, neurons, width + 2)

    def _matrix_free(
        self,
        outward: Callable[[Array], Array],
        inward: Callable[[Array], Array],
        shape: tuple[int, ...],
    ) -> Solve:
        def solve(residual: Array, accuracy: float, damping: float) -> Array:
            z = solve_by_products(
                lambda z: self.forward(outward(z)),
                lambda r: inward(self.backward(r)),
                residual,
                shape,
                accuracy,
                self.options.inner_steps,
                damping,
            )
            return self.free(outward(z))

        return solve

    def _in_single_precision(self) -> Solve:
        """Large problems: steps need few digits, residuals are taken in double precision."""
        outward, inward, shape = self.maps = self.maps or self._rough_preconditioner()
        short = np.float32
        points, span = self.homogeneous.astype(short), self.span.rounded(short)
        outer, slopes = self.outer.astype(short), [slope.astype(short) for slope in self.slopes]

        def forward(z: Array) -> Array:
            step = self.free(outward(z)).astype(short)
            change = slopes[0] * (points @ step[0].T)
            for slope, part in zip(slopes[1:], step[1:], strict=True):
                change += slope * (points @ part.T)
            return span.project_out(change @ outer.T)

        def backward(residual: Array) -> Array:
            seen = span.project_out(residual.astype(short) @ outer)
            step = np.stack([(slope * seen).T @ points for slope in slopes])
            return inward(self.free(step.astype(np.float64)))

        def solve(residual: Array, accuracy: float, damping: float) -> Array:
            scale = max(float(np.abs(residual).max()), TINY)
            right = (residual / scale).astype(short)
            steps = self.options.large_steps
            z = solve_by_products(forward, backward, right, shape, accuracy, steps, damping)
            return scale * self.free(outward(z))

        return solve


def solve_by_products(
    forward: Callable[[Array], Array],
    backward: Callable[[Array], Array],
    right: Array,
    shape: tuple[int, ...],
    accuracy: float,
    steps: int,
    damping: float = 0.0,
) -> Array:
    """z that minimises |forward(z) - right|^2 + damping |z|^2, until the gradient is `accuracy`
    times what it was."""
    at = Scaled(
        lambda z: forward(z.reshape(shape)).ravel(),
        lambda residual: backward(residual.reshape(right.shape)).ravel(),
    )
    ending = Ending(gradient=accuracy, window=steps + 1, most=steps)  # no matter what steps bring
    return solve_cgls(at, right.ravel(), ending, damping).z.reshape(shape)


def refine(
    weights: Weights,
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    unit: float,
    *,
    options: RefinementOptions | None = None,
    errors: bool = True,
    rng: np.random.Generator | None = None,
) -> RefinedNetwork:
    """Gauss-Newton from `weights` until the residual stops falling. `unit` is the rounding of an
    answer relative to the answers: below it there is nothing to gain."""
    options = RefinementOptions() if options is None else options
    homogeneous = with_one(points)
    scale = float(np.sqrt(np.mean(answers**2)))
    large = weights.inner.size > options.grams  # a step takes minutes: sums round by that much
    enough = unit * scale * (100.0 if large else 0.3)

    def linearize(state: Linearised) -> StepSolver:
        relative = float(np.linalg.norm(state.residual))
        relative /= max(scale * np.sqrt(state.left), TINY)
        # a step is worth no more digits than its own second order or the answers' rounding
        worth = max(relative, enough / max(relative * scale, TINY))
        return StepSolver(state, float(np.clip(worth, 1e-6, 1e-2)))

    def move(state: Linearised, step: Array) -> Linearised:
        after = stepped(state.weights, step)
        return Linearised(after, homogeneous, answers, options, maps=state.maps)

    start = Linearised(weights, homogeneous, answers, options)
    problem = Problem(lambda state: float((state.residual**2).sum()), linearize, move)
    # two steps that do not halve the residual each have met the rounding of the answers
    stopping = Stopping(
        steps=options.steps, target=enough**2 * start.left, window=2, share=15 / 16, damping=0.0
    )
    end = solve_problem(problem, start, stopping)
    return _finished(end.state, homogeneous, answers, end.steps, errors, rng)


class StepSolver:
    """The linear problem of a network whose linear part is eliminated, solved to an accuracy."""

    def __init__(self, state: Linearised, accuracy: float) -> None:
        self.state, self.accuracy, self.solve = state, accuracy, state.solver()

    def step(self, damping: float) -> Step:
        residual = self.state.residual
        step = self.solve(residual, self.accuracy, damping)
        after = residual - self.state.forward(step)
        return Step(step, float((residual**2).sum() - (after**2).sum()))


def stepped(weights: Weights, step: Float[Array, "b m e"]) -> Weights:
    gate = None if weights.gate is None else weights.gate + step[1]
    return Weights(weights.inner + step[0], weights.outer, weights.affine, weights.activation, gate)


def _with_linear_part(state: Linearised) -> Weights:
    kept, neurons = state.weights, state.weights.neurons
    return Weights(
        kept.inner, state.linear[:neurons].T, state.linear[neurons:].T, kept.activation, kept.gate
    )


def _finished(
    state: Linearised,
    homogeneous: Array,
    answers: Array,
    steps: int,
    errors: bool,
    rng: np.random.Generator | None,
) -> RefinedNetwork:
    found = _with_linear_part(state)
    freedom = max(state.left - int(np.prod(state.shape)), 1)
    level = float(np.linalg.norm(state.residual) / np.sqrt(freedom))
    whole = state.span.project_out(state.residual)
    deviations = None
    if errors:
        draws = rng if rng is not None else np.random.default_rng(0)
        rounding = UNIT_ROUNDOFF * float(np.sqrt(np.mean(answers**2)))
        deviations = dense_errors(found, homogeneous, answers, max(level, rounding))
        if deviations is None:
            deviations = _standard_errors(state, found, len(answers), level, draws)
    return RefinedNetwork(found, level, float(np.abs(whole).max()), steps, deviations)


def dense_errors(
    weights: Weights, homogeneous: Float[Array, "n e"], answers: Float[Array, "n k"], level: float
) -> Weights | None:
    """Standard errors of every number of the network, where these are few enough: by leaving one
    answer out, or, with too few answers for that, from the Fisher matrix at this level of noise."""
    (count, outputs), parts = answers.shape, _parts(weights)
    unknowns = sum(part.size for part in parts)
    redundancy, entries = 1.5, 10_000_000  # numbers per unknown; of a Jacobian
    if answers.size < unknowns or answers.size * unknowns > entries:
        return None
    hidden, slopes = hidden_layer(weights, homogeneous)
    columns = [
        np.einsum("nj,ne,oj->noje", slope, homogeneous, weights.outer, optimize=True)
        for slope in slopes
    ]
    eye = np.eye(outputs)
    columns += [np.einsum("nj,op->nopj", part, eye) for part in (hidden, homogeneous)]
    jacobian = np.concatenate([part.reshape(count * outputs, -1) for part in columns], axis=1)
    held = 0 if weights.gate is None else weights.neurons  # the scale of u belongs to outer
    total = np.zeros(unknowns)
    if answers.size >= redundancy * unknowns:
        residual = (weights.linear_sum(hidden, homogeneous) - answers).ravel()
        for step in list_jackknife_steps(jacobian, residual, [outputs] * count, unknowns - held):
            total += step**2
    else:
        for step in list_fisher_steps(jacobian, unknowns - held):
            total += (level * step) ** 2
    cuts = np.cumsum([part.size for part in parts])[:-1]
    errors = [
        np.sqrt(piece).reshape(part.shape)
        for piece, part in zip(np.split(total, cuts), parts, strict=True)
    ]
    gate = errors[1] if weights.gate is not None else None
    return Weights(errors[0], errors[-2], errors[-1], weights.activation, gate)


def _parts(weights: Weights) -> list[Array]:
    """The numbers of the network in the order of its derivatives."""
    gate = [] if weights.gate is None else [weights.gate]
    return [weights.inner, *gate, weights.outer, weights.affine]


def _standard_errors(
    state: Linearised, found: Weights, count: int, level: float, rng: np.random.Generator
) -> Weights:
    """What disturbed answers do to the parameters: root mean squares over neurons and draws."""
    solve, neurons = state.solver(), found.neurons
    large = np.prod(state.shape) > state.options.grams  # entries enough for one draw
    draws, accuracy = (1, 0.03) if large else (state.options.draws, 1e-3)
    squares: list[Array] = []
    linear: list[Array] = []
    for _ in range(draws):
        noise = level * rng.standard_normal((count, len(found.outer)))
        step = solve(state.span.project_out(noise), accuracy, 0.0)
        squares.append(step**2)
        linear.append(state.eliminated(noise - state.hidden_change(step) @ state.outer.T).T ** 2)
    rows = np.sqrt(np.mean(squares, axis=(0, 3)))[..., None] * np.ones(state.shape[2])
    table = np.mean(linear, axis=0)
    outer = np.sqrt(table[:, :neurons].mean(axis=0)) * np.ones_like(found.outer)
    affine = np.sqrt(table[:, neurons:].mean(axis=0)) * np.ones_like(found.affine)
    gate = None if found.gate is None else rows[1]
    return Weights(rows[0], outer, affine, found.activation, gate)
