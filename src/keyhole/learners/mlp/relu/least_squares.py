"""Least squares for the parameters of a ReLU network.

With the neurons' on/off patterns held fixed, f(x) = G (x, 1) + sum_j on_j(x) g_j (x, 1) is linear
in G and the g_j = output_j (weight_j, bias_j), which is also its true derivative. Hence:

- Differences of the size of rounding are removed by linear least squares: where a line has left
  doubts (`correct_doubts`, scalar answers only), for all parameters at once (`correct_all`,
  `fit_frozen_patterns`), or with errors known before (`update_network`).
- Larger ones by solving that linear problem again and again with fresh patterns, the method of
  Gauss and Newton, damped after Levenberg and Marquardt where hyperplanes are off by more than a
  little (`fit_network`). Before that, the outputs alone tell right neurons from wrong ones
  (`fit_outputs`, `rate_additions`).
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse.linalg import LinearOperator, lsqr

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.solver import NormalSystem, Problem, Stopping, descend
from keyhole.models.relu_network import ReluNetwork

DENSE_UNKNOWNS = 2500  # up to here the normal equations are formed; beyond, they are iterated
RIDGE = 1e-13  # of the largest diagonal entry: what no answer determines stays as it is
SHARED = 1e-10  # the same of outputs: neurons that were measured twice share theirs
LEAST_DAMPING = 1e-12  # relative to the diagonal


# -- networks as sums of parts --------------------------------------------------------------------


def flatten_output(network: ReluNetwork) -> ReluNetwork:
    """A scalar box's network, from answers kept as vectors of length one."""
    return ReluNetwork(
        network.weight, network.bias, network.output[:, 0], network.skip[:, 0], network.offset[0]
    )


def unflatten_output(network: ReluNetwork) -> ReluNetwork:
    return ReluNetwork(
        network.weight,
        network.bias,
        network.output[:, None],
        network.skip[:, None],
        network.offset[None],
    )


def keep_neurons(network: ReluNetwork, chosen: Array) -> ReluNetwork:
    """The network of the chosen neurons, affine part as it is."""
    return ReluNetwork(
        network.weight[chosen],
        network.bias[chosen],
        network.output[chosen],
        network.skip,
        network.offset,
    )


def join_neurons(network: ReluNetwork, more: ReluNetwork) -> ReluNetwork:
    """The network with further neurons."""
    return ReluNetwork(
        np.concatenate([network.weight, more.weight]),
        np.concatenate([network.bias, more.bias]),
        np.concatenate([network.output, more.output]),
        network.skip,
        network.offset,
    )


def append_one(points: Float[Array, "n d"]) -> Float[Array, "n e"]:
    return np.concatenate([points, np.ones((len(points), 1))], axis=1)


def find_active(network: ReluNetwork, points: Array) -> Array:
    """Which neurons are on, (n, m)."""
    return np.asarray(points @ network.weight.T + network.bias > 0)


def replace_parts(network: ReluNetwork, parts: Float[Array, "parts e"]) -> ReluNetwork:
    """The network with affine part parts[0] and neurons parts[1:], rows of unit length, each
    neuron's sign kept."""
    lengths = np.linalg.norm(parts[1:, :-1], axis=1)
    lengths = np.where(lengths > 0, lengths, 1.0)
    sign = np.where(network.output < 0, -1.0, 1.0)
    rows = parts[1:] * (sign / lengths)[:, None]
    return ReluNetwork(rows[:, :-1], rows[:, -1], sign * lengths, parts[0, :-1], parts[0, -1])


def list_parts(network: ReluNetwork) -> Float[Array, "parts e"]:
    own = network.output[:, None] * np.column_stack([network.weight, network.bias])
    return np.concatenate([np.append(network.skip, network.offset)[None], own])


# -- corrections of the size of rounding ----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Doubts:
    """What a line leaves open: the gradient of piece p is known up to `sizes[p]` per `length`,
    its value at `centres[p]` exactly. The error shows between hyperplanes p-1 and p."""

    sizes: Float[Array, " pieces"]
    centres: Float[Array, "pieces d"]
    length: float

    def features(self, network: ReluNetwork, points: Array) -> Float[Array, "n pieces"]:
        """Neuron p-1 (the affine part for p = 0) has too much of error p, neuron p too little."""
        on = find_active(network, points).astype(float)
        signs = np.concatenate([np.ones((len(on), 1)), on, np.zeros((len(on), 1))], axis=1)
        return np.asarray(signs[:, :-1] - signs[:, 1:])

    def covariance(self, features: Array, points: Array) -> Float[Array, "n n"]:
        """Of the network's errors at the points."""
        weights = (self.sizes / self.length) ** 2
        weighted = features * weights
        mixed = (weighted * (points @ self.centres.T)) @ features.T
        constant = (weighted * np.einsum("pd,pd->p", self.centres, self.centres)) @ features.T
        return np.asarray(
            (weighted @ features.T) * (points @ points.T) - mixed - mixed.T + constant
        )


def choose_informative(
    network: ReluNetwork, doubts: Doubts, candidates: Float[Array, "n d"], count: int
) -> Array:
    """Candidates whose answers leave the least doubt: each the most doubtful given those before
    (a pivoted Cholesky factorisation of the covariance)."""
    if count > 400:  # too many to choose one by one
        return candidates[:count]
    covariance = doubts.covariance(doubts.features(network, candidates), candidates)
    left = covariance.diagonal().copy()
    factor = np.zeros((count, len(candidates)))
    chosen = []
    for i in range(count):
        best = int(np.argmax(left))
        if left[best] <= 0:
            break
        row = covariance[best] - factor[:i, best] @ factor[:i]
        factor[i] = row / np.sqrt(left[best])
        left = left - factor[i] ** 2
        left[best] = -np.inf
        chosen.append(best)
    return candidates[chosen]


def correct_doubts(
    network: ReluNetwork,
    doubts: Doubts,
    points: Array,
    difference: Float[Array, " n"],
    noise: float,
) -> ReluNetwork:
    """The network given the differences (box minus network) at the points: the most likely one
    for normal errors of the stated sizes. What the answers say nothing about stays as it is."""
    features = doubts.features(network, points)
    covariance = doubts.covariance(features, points)
    covariance[np.diag_indices_from(covariance)] += noise**2 + RIDGE * covariance.diagonal().max()
    weights = cho_solve(cho_factor(covariance, overwrite_a=True), difference)
    by_piece = features * weights[:, None]
    slopes = by_piece.T @ points - by_piece.sum(axis=0)[:, None] * doubts.centres
    slopes *= (doubts.sizes[:, None] / doubts.length) ** 2
    errors = np.column_stack([slopes, -np.einsum("pd,pd->p", slopes, doubts.centres)])
    parts = list_parts(network)
    parts += errors
    parts[1:] -= errors[:-1]
    return replace_parts(network, parts)


def balance_points(network: ReluNetwork, points: Float[Array, "n d"], least: int) -> Array:
    """The points, some of them mirrored at hyperplanes that have fewer than `least` points on one
    side: every neuron must be seen at work and at rest."""
    points = np.array(points)
    unused = 0
    for j in range(network.neurons):
        height = points @ network.weight[j] + network.bias[j]
        rare = height > 0 if (height > 0).sum() < len(points) / 2 else height <= 0
        missing = least - int(rare.sum())
        common = np.nonzero(~rare[unused:])[0][: max(missing, 0)] + unused
        if missing <= 0 or len(common) == 0 or unused > len(points) // 2:
            continue
        square = float(network.weight[j] @ network.weight[j])
        points[common] -= np.outer(2 * height[common] / square, network.weight[j])
        unused = int(common[-1]) + 1
    return points


def correct_all(
    network: ReluNetwork, points: Float[Array, "n d"], difference: Float[Array, "n *k"]
) -> ReluNetwork:
    """All parameters corrected at once, by least squares over the differences at the points."""
    on, flat = find_patterns(network, points)
    shape = (on.shape[1], flat.shape[1])
    if shape[0] * shape[1] <= DENSE_UNKNOWNS:
        step = solve_dense(multiply_patterns(on, flat), difference)
    elif difference.ndim == 1:
        step = solve_iteratively(on, flat, difference)
    else:
        columns = [solve_iteratively(on, flat, column).reshape(-1) for column in difference.T]
        step = np.stack(columns, axis=1)
    if difference.ndim == 1:
        return replace_parts(network, list_parts(network) + step.reshape(shape))
    return add_blocks(network, step.reshape(*shape, -1))


def fit_frozen_patterns(
    network: ReluNetwork, points: Float[Array, "n d"], answers: Float[Array, " n"]
) -> ReluNetwork:
    """A scalar network from all answers at random points: the best of six solutions, each with
    fresh on/off patterns; a round that leaves 70% of the difference is the last."""
    best, smallest, current = network, np.inf, flatten_output(network)
    for _ in range(6):
        difference = answers - current(points)
        size = float(np.sqrt(np.mean(difference**2)))
        stalled = size > 0.7 * smallest
        if size < smallest:
            best, smallest = unflatten_output(current), size
        if stalled:
            break
        current = correct_all(current, points, difference)
    return best


def find_patterns(network: ReluNetwork, points: Array) -> tuple[Array, Array]:
    """Which parts are on at each point (the affine one always), and the points with a one."""
    on = np.concatenate([np.ones((len(points), 1)), find_active(network, points)], axis=1)
    return on, append_one(points)


def multiply_patterns(on: Array, flat: Array) -> Float[Array, "n unknowns"]:
    return np.asarray(np.einsum("nm,nd->nmd", on, flat).reshape(len(on), -1))


def update_network(
    network: ReluNetwork,
    spread: Float[Array, " parts"],
    points: Float[Array, "n d"],
    difference: Float[Array, "n k"],
    noise: Float[Array, " n"],
) -> tuple[ReluNetwork, Float[Array, " parts"]] | None:
    """The network given the differences at the points, for normal errors: of each part's entries
    as stated by `spread` (the affine part first), of the answers by `noise`. With the errors that
    remain; None where there are too many unknowns for that."""
    on, flat = find_patterns(network, points)
    if on.shape[1] * flat.shape[1] > DENSE_UNKNOWNS:
        return None
    rows = multiply_patterns(on, flat) / noise[:, None]
    normal = rows.T @ rows
    prior = np.repeat(spread, flat.shape[1]) ** -2.0
    normal[np.diag_indices_from(normal)] += prior
    factor = cho_factor(normal, overwrite_a=True)
    step = cho_solve(factor, rows.T @ (difference / noise[:, None]))
    variance = cho_solve(factor, np.eye(len(normal))).diagonal().reshape(on.shape[1], -1)
    left = np.sqrt(np.maximum(variance, 0.0).mean(axis=1))
    return add_blocks(network, step.reshape(on.shape[1], flat.shape[1], -1)), left


def add_blocks(network: ReluNetwork, step: Float[Array, "parts e k"]) -> ReluNetwork:
    """Vector answers: parts corrected by the step, neurons brought back to plane times output."""
    planes = np.column_stack([network.weight, network.bias])
    blocks = planes[:, :, None] * network.output[:, None, :] + step[1:]
    left, sizes, right = np.linalg.svd(blocks, full_matrices=False)
    output = sizes[:, :1] * right[:, 0]
    rows = left[:, :, 0]
    turn = np.where(np.einsum("me,me->m", rows, planes) < 0, -1.0, 1.0)
    lengths = np.linalg.norm(rows[:, :-1], axis=1)
    lengths = np.where(lengths > 0, lengths, 1.0)
    rows = rows * (turn / lengths)[:, None]
    return ReluNetwork(
        rows[:, :-1],
        rows[:, -1],
        output * (turn * lengths)[:, None],
        network.skip + step[0, :-1],
        network.offset + step[0, -1],
    )


def solve_dense(rows: Array, difference: Array) -> Array:
    """Normal equations: the differences have few digits to lose, and a second step finds those."""
    normal = rows.T @ rows
    normal[np.diag_indices_from(normal)] += RIDGE * normal.diagonal().max()
    factor = cho_factor(normal, overwrite_a=True)
    step = cho_solve(factor, rows.T @ difference)
    return np.asarray(step + cho_solve(factor, rows.T @ (difference - rows @ step)))


def solve_iteratively(on: Array, flat: Array, difference: Array) -> Array:
    """The same by LSQR, two matrix products an iteration. Counting a neuron as +1/2 and -1/2
    instead of 1 and 0 makes the neurons' columns nearly orthogonal: few iterations."""
    shape = (on.shape[1], flat.shape[1])
    on = on - 0.5
    on[:, 0] = 1.0
    scale = np.sqrt((on**2).T @ flat**2).ravel()

    def forward(step: Array) -> Array:
        table = (step.ravel() / scale).reshape(shape)
        return np.asarray(np.einsum("nm,nm->n", on, flat @ table.T))

    def backward(values: Array) -> Array:
        return np.asarray(((on * values.ravel()[:, None]).T @ flat).ravel() / scale)

    operator = LinearOperator(
        (len(flat), shape[0] * shape[1]), matvec=forward, rmatvec=backward, dtype=np.float64
    )
    found = lsqr(
        operator,
        difference,
        atol=1e-6,
        btol=1e-6,
        iter_lim=400,
    )
    step = (np.asarray(found[0]) / scale).reshape(shape)
    step[0] -= 0.5 * step[1:].sum(axis=0)
    return np.asarray(step)


# -- fits to answers with errors ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Samples:
    """Answers at points, each with its error."""

    points: Float[Array, "n d"]
    answers: Float[Array, "n k"]
    noise: Float[Array, " n"]

    def residual(self, network: ReluNetwork) -> Float[Array, "n k"]:
        """What the network leaves over, in errors."""
        return np.asarray((self.answers - network(self.points)) / self.noise[:, None])

    def misfit(self, network: ReluNetwork) -> float:
        """Mean square of that: about one for the right network."""
        return float(np.mean(self.residual(network) ** 2))


def fit_network(network: ReluNetwork, data: Samples) -> ReluNetwork:
    """The network that explains the data best, near the given one."""

    def move(network: ReluNetwork, step: Array) -> ReluNetwork:
        return add_blocks(network, step.reshape(network.neurons + 1, network.width + 1, -1))

    problem = Problem(
        lambda network: float(np.sum(data.residual(network) ** 2)),
        lambda network: NormalSystem(*build_normal_equations(network, data)),
        move,
    )
    return descend(problem, network, Stopping(steps=75, tolerance=0.002)).state


def build_normal_equations(network: ReluNetwork, data: Samples) -> tuple[Array, Array]:
    residual = data.residual(network)
    unknowns = (network.neurons + 1) * (network.width + 1)
    normal = np.zeros((unknowns, unknowns))
    right = np.zeros((unknowns, residual.shape[1]))
    held = 512  # answers whose derivatives are held at once
    for i in range(0, len(residual), held):
        part = slice(i, i + held)
        rows = (
            multiply_patterns(*find_patterns(network, data.points[part])) / data.noise[part, None]
        )
        normal += rows.T @ rows
        right += rows.T @ residual[part]
    return normal, right


def solve_damped(normal: Array, right: Array, damping: float) -> Array:
    damped = normal.copy()
    diagonal = normal.diagonal()
    damped[np.diag_indices_from(damped)] += damping * np.maximum(diagonal, SHARED * diagonal.max())
    return np.asarray(cho_solve(cho_factor(damped, overwrite_a=True), right))


def estimate_errors(network: ReluNetwork, data: Samples) -> Float[Array, " parts"]:
    """Of the entries of each part (the affine one first), by the misfit and what was asked."""
    normal, _ = build_normal_equations(network, data)
    variance = solve_damped(normal, np.eye(len(normal)), LEAST_DAMPING).diagonal()
    surplus = max(len(data.points) - len(normal), 1)
    variance = variance * data.misfit(network) * len(data.points) / surplus
    return np.asarray(np.sqrt(variance.reshape(network.neurons + 1, -1).mean(axis=1)))


def fit_outputs(network: ReluNetwork, data: Samples) -> tuple[ReluNetwork, Float[Array, " m"]]:
    """Affine part and outputs that explain the data best, all hyperplanes as they are; and how much
    of its output each neuron keeps: one if it is right, zero if the others explain what it does."""
    features = weigh_features(network, data)
    sizes = np.maximum(np.linalg.norm(features, axis=0), TINY)
    features = features / sizes
    normal = features.T @ features
    normal[np.diag_indices_from(normal)] += SHARED
    found = np.linalg.solve(normal, features.T @ (data.answers / data.noise[:, None]))
    found = found / sizes[:, None]
    width = network.width
    output = found[width + 1 :]
    square = np.maximum((network.output**2).sum(axis=1), TINY)
    kept = np.einsum("mk,mk->m", output, network.output) / square
    best = ReluNetwork(network.weight, network.bias, output, found[:width], found[width])
    return best, np.asarray(kept)


def weigh_features(network: ReluNetwork, data: Samples) -> Float[Array, "n features"]:
    heights = data.points @ network.weight.T + network.bias
    ones = np.ones((len(heights), 1))
    table = np.concatenate([data.points, ones, np.maximum(heights, 0)], axis=1)
    return np.asarray(table / data.noise[:, None])


def rate_additions(
    network: ReluNetwork, others: ReluNetwork, data: Samples
) -> Float[Array, " others"]:
    """How much of the squared residual each of the other neurons would explain, if added."""
    basis, _ = np.linalg.qr(weigh_features(network, data))
    fresh = weigh_features(others, data)[:, others.width + 1 :]
    fresh = fresh - basis @ (basis.T @ fresh)
    residual = data.residual(network)
    residual = residual - basis @ (basis.T @ residual)
    sizes = np.maximum((fresh**2).sum(axis=0), TINY)
    return np.asarray(((fresh.T @ residual) ** 2).sum(axis=1) / sizes)
