"""A network from random rows: more neurons than it has descend, and those that can be spared leave.

Statement.  A network of m neurons on a sphere is found from points alone where Hessians are too
            small to tell the neurons apart (m >= k (k - 1) / 2), from about six numbers for each
            of its parameters.
Queries.    None: points and answers are given.
Algebra.    Outer, linear part and offset are eliminated (thin QR), with a ridge on outer; damped
            Gauss-Newton steps move the rows. The normal matrix is, blockwise, (outerᵀ outer) *
            (Hᵀ H), H the slopes times the points less what the eliminated columns take of them;
            far from the end single precision is enough for it. With more neurons than there are, a
            descent ends where the ridge is all that is left: what is left of the answers themselves
            is then far below what the ridge costs, which tells at once whether the neurons were
            enough. A lower ridge follows, and neurons that cost little leave on the way. Where two
            neurons imitate one, random ones join, and the descent begins again.
Fails.      Where there are too few neurons, or their activation is another one.
Source.     Variable projection (Golub and Pereyra 1973, Kaufman 1975); that students with more
            neurons than the teacher find it is folklore (e.g. Safran and Shamir 2018).
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve, solve_triangular
from scipy.linalg.blas import dsyrk, ssyrk

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp import Weights, chosen, hidden_layer, random_start, with_one


@dataclass(frozen=True)
class DescentOptions:
    """What a person might tune. ridges: on outer, per point, one descent with each; steps: of a
    descent, at most. rounds: of descents, random neurons joining in between. enough: what may be
    left of the answers relative to the ridge's cost where neurons are enough. spare: what neurons
    that leave for good may cost, relative to what is left; bold: those that leave in an attempt to
    settle. settled: steps of such an attempt. alike: what it leaves, relative to the answers, where
    the activation is another one that is alike, at most. hopeful: from where single neurons are
    tried to be left out; candidates: so many of them."""

    ridges: tuple[float, ...] = (5e-6, 5e-7, 5e-8)
    steps: int = 60
    rounds: int = 4
    enough: float = 0.5
    spare: float = 0.3
    bold: float = 2.0
    settled: int = 30
    alike: float = 3e-3
    hopeful: float = 1e-5
    candidates: int = 5


@dataclass(frozen=True, eq=False)
class State:
    """A network whose linear part is eliminated: columns are basis times triangle times norms.
    `left`, `cost`: root mean squares of the answers' and of the ridge's part."""

    weights: Weights
    slopes: list[Array]
    basis: Float[Array, "n c"]
    triangle: Float[Array, "c c"]
    norms: Float[Array, " c"]
    residual: Float[Array, "n d"]
    left: float
    cost: float

    @property
    def total(self) -> float:
        return float(np.hypot(self.left, self.cost))


def eliminate(
    weights: Weights, points: Float[Array, "n e"], answers: Float[Array, "n d"], ridge: float
) -> State:
    """`points`: with a one at the end."""
    count = weights.neurons
    hidden, slopes = hidden_layer(weights, points)
    columns = np.column_stack([hidden, points])
    norms = np.maximum(np.linalg.norm(columns, axis=0), TINY)
    columns = columns / norms
    # a trace of a ridge where there is none: columns may coincide
    level = np.sqrt(max(ridge * len(points), 1e-26)) * np.ones(count)
    held = np.zeros((count, columns.shape[1]))
    held[np.arange(count), np.arange(count)] = level / (norms[:count] if ridge else 1.0)
    basis, triangle = np.linalg.qr(np.vstack([columns, held]))
    basis, below = basis[: len(points)], basis[len(points) :]
    inside = basis.T @ answers
    residual = answers - basis @ inside
    linear = solve_triangular(triangle, inside, check_finite=False) / norms[:, None]
    found = replace(weights, outer=linear[:count].T, affine=linear[count:].T)
    size = np.sqrt(answers.size)
    cost = float(np.linalg.norm(below @ inside)) / size
    left = float(np.linalg.norm(residual)) / size
    return State(found, slopes, basis, triangle, norms, residual, left, cost)


def step_matrix(
    state: State, points: Float[Array, "n e"], single: bool
) -> tuple[Float[Array, "u u"], Float[Array, " u"]]:
    """Normal matrix and gradient by the rows, inner before gate."""
    outer = state.weights.outer
    total, entries = points.shape
    tall = np.concatenate(
        [(slope[:, :, None] * points[:, None]).reshape(total, -1) for slope in state.slopes], axis=1
    )
    tall -= state.basis @ (state.basis.T @ tall)
    blocks, count = len(state.slopes), outer.shape[1]
    pulled = np.tile(state.residual @ outer, blocks)
    gradient = np.einsum("nje,nj->je", tall.reshape(total, -1, entries), pulled).ravel()
    short = np.asarray(tall, dtype=np.float32 if single else np.float64)
    multiply = ssyrk if single else dsyrk
    upper = np.triu(multiply(1.0, short.T).astype(np.float64))
    matrix = upper + np.triu(upper, 1).T
    weighed = np.tile(outer.T @ outer, (blocks, blocks))
    units = blocks * count
    matrix = matrix.reshape(units, entries, units, entries) * weighed[:, None, :, None]
    return matrix.reshape(units * entries, -1), gradient


def moved(weights: Weights, step: Float[Array, " u"]) -> Weights:
    """With other rows; the scale of a gated neuron's other factor is held."""
    parts = step.reshape(-1, *weights.inner.shape)
    inner = weights.inner + parts[0]
    if weights.gate is None:
        return replace(weights, inner=inner)
    inner = inner / np.maximum(np.linalg.norm(inner, axis=1, keepdims=True), TINY)
    return replace(weights, inner=inner, gate=weights.gate + parts[1])


def descend(
    weights: Weights,
    points: Float[Array, "n e"],
    answers: Float[Array, "n d"],
    ridge: float,
    steps: int,
    target: float = 0.0,
    single: bool = False,
) -> State:
    """Damped steps until `target` is left, or twenty of them take less than 1.5% off."""
    state = eliminate(weights, points, answers, ridge)
    totals, damping = [state.total], 1e-2
    least = 1e-6 if single else 1e-13  # roundings of the normal matrix
    while len(totals) <= steps and totals[-1] > target:
        matrix, gradient = step_matrix(state, points, single)
        diagonal = np.diag(matrix)
        scale = np.sqrt(np.maximum(diagonal, 1e-12 * diagonal.max() + TINY))
        matrix /= scale[:, None]
        matrix /= scale
        for _ in range(8):
            damped = matrix.copy()
            damped[np.diag_indices(len(damped))] += damping + least
            try:
                factor = cho_factor(damped, overwrite_a=True, check_finite=False)
            except np.linalg.LinAlgError:
                damping *= 16.0
                continue
            step = cho_solve(factor, gradient / scale, check_finite=False) / scale
            trial = eliminate(moved(state.weights, step), points, answers, ridge)
            if trial.total < state.total:
                break
            damping *= 4.0
        else:
            break
        state, damping = trial, max(damping / 4.0, 1e-10)
        totals.append(state.total)
        if len(totals) > 20 and totals[-1] > 0.985 * totals[-20]:
            break
    return state


def without_cheap(
    state: State, points: Float[Array, "n e"], answers: Float[Array, "n d"], spare: float
) -> Weights:
    """Neurons leave, the cheapest first, while what is left stays below `spare`: without neuron
    j squares of |B_j|^2 / P_jj more are left, P the inverse normal matrix, B the linear part."""
    weights = state.weights
    while True:
        one = eliminate(weights, points, answers, 0.0)
        count = weights.neurons
        inverse = solve_triangular(one.triangle, np.eye(len(one.triangle)), check_finite=False)
        table = inverse @ inverse.T
        linear = np.vstack([one.weights.outer.T, one.weights.affine.T]) * one.norms[:, None]
        left = one.left**2 * answers.size
        here = np.arange(count)
        # formulas for one neuron after the other lose digits: anew after an eighth of them
        for _ in range(max(1, count // 8)):
            diagonal = np.maximum(np.diag(table)[here], TINY)
            costs = (linear[here] ** 2).sum(axis=1) / diagonal
            place = int(np.argmin(costs))
            if len(here) == 1 or left + costs[place] > spare**2 * answers.size:
                break
            j = here[place]
            left += costs[place]
            linear = linear - np.outer(table[:, j], linear[j]) / table[j, j]
            table = table - np.outer(table[:, j], table[j]) / table[j, j]
            here = np.delete(here, place)
        if len(here) == count:
            return one.weights
        weights = chosen(weights, here)


def leaving_costs(
    weights: Weights, points: Float[Array, "n e"], answers: Float[Array, "n d"]
) -> Float[Array, " m"]:
    """Root mean squares that would be left more without each neuron."""
    one = eliminate(weights, points, answers, 0.0)
    inverse = solve_triangular(one.triangle, np.eye(len(one.triangle)), check_finite=False)
    linear = one.weights.outer.T * one.norms[: weights.neurons, None]
    diagonal = (inverse**2).sum(axis=1)[: weights.neurons]
    return np.asarray(np.sqrt((linear**2).sum(axis=1) / diagonal / answers.size))


@dataclass(frozen=True, eq=False)
class Attempt:
    """The network, if it was found, and what the last descent left, relative to the answers."""

    network: Weights | None
    left: float


def fit_network(
    points: Float[Array, "n k"],
    answers: Float[Array, "n d"],
    neurons: int,
    names: tuple[str, ...],
    gated: bool,
    accepted: float,
    rng: np.random.Generator,
    options: DescentOptions | None = None,
) -> Attempt:
    """The network, from starts with so many neurons, that leaves at most `accepted` of the answers;
    of activations that are alike (`names`) the one that does."""
    options = DescentOptions() if options is None else options
    scale = float(np.sqrt(np.mean(answers**2)))
    tall = with_one(points)

    def draw(count: int) -> Weights:
        return random_start(count, points, answers.shape[1], names[0], gated, rng)

    start, left = draw(neurons), 1.0
    for _ in range(options.rounds):
        for place, ridge in enumerate(options.ridges):
            single = ridge > 1e-7  # what is left is then far above the roundings
            state = descend(start, tall, answers, ridge, options.steps, single=single)
            explained = state.left <= options.enough * state.cost
            left = state.left / scale
            if not explained and place:
                return Attempt(None, left)
            spare = options.spare * state.total
            start = without_cheap(state, tall, answers, max(spare, 1.1 * state.left))
            if not explained:
                continue
            bold = without_cheap(state, tall, answers, options.bold * state.total)
            for name in names:
                tried = replace(bold, activation=name)
                settled = descend(tried, tall, answers, 0.0, options.settled, 0.1 * accepted)
                found = leave_out(settled, tall, answers, accepted, scale, options)
                if found is not None:
                    return Attempt(found, settled.left / scale)
                if settled.left > options.alike * scale:
                    break
        start = joined(start, draw(max(neurons - start.neurons, neurons // 4)))
    return Attempt(None, left)


def leave_out(
    state: State,
    points: Float[Array, "n e"],
    answers: Float[Array, "n d"],
    accepted: float,
    scale: float,
    options: DescentOptions,
) -> Weights | None:
    """Single neurons leave while that explains the answers; None if they are not explained."""
    if state.left > max(options.hopeful * scale, accepted):
        return None
    best = state.weights if state.left <= accepted else None
    weights = state.weights
    while weights.neurons > 1:
        costs = leaving_costs(weights, points, answers)
        order = np.argsort(costs)[: options.candidates]
        if best is not None:  # two that do the same leave nothing behind
            order = order[costs[order] < 1e3 * accepted]
        for j in order:
            fewer = chosen(weights, np.delete(np.arange(weights.neurons), j))
            tried = descend(fewer, points, answers, 0.0, options.settled, 0.1 * accepted)
            if tried.left <= accepted:
                best = weights = tried.weights
                break
        else:
            break
    return best


def joined(weights: Weights, more: Weights) -> Weights:
    gate = None
    if weights.gate is not None and more.gate is not None:
        gate = np.concatenate([weights.gate, more.gate])
    return Weights(
        np.concatenate([weights.inner, more.inner]),
        np.concatenate([weights.outer, more.outer], axis=1),
        weights.affine,
        weights.activation,
        gate,
    )
