"""Corrections of a ReLU network that leave its planes' sides alone: there it is linear.

With the neurons' on/off patterns held fixed, f(x) = G (x, 1) + sum_j on_j(x) g_j (x, 1) is linear
in G and the g_j = output_j (weight_j, bias_j). Differences to the box of the size of rounding are
therefore removed by linear least squares: where a line has left doubts (`corrected`, scalar answers
only), or for all parameters at once (`polished`).
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from scipy.sparse.linalg import LinearOperator, lsqr

from keyhole.arrays import Array, Float
from keyhole.models.relu_network import ReluNetwork

DENSE_UNKNOWNS = 2500  # up to here the normal equations are formed; beyond, they are iterated
RIDGE = 1e-13  # of the largest diagonal entry: what no answer determines stays as it is
ITERATIONS = 400  # of the iterative solver
ITERATION_TOLERANCE = 1e-6  # reduction of the remaining difference per solve; others follow
PIVOTED_QUERIES = 400  # up to here queries are chosen among random candidates


def lifted(points: Float[Array, "n d"]) -> Float[Array, "n e"]:
    return np.concatenate([points, np.ones((len(points), 1))], axis=1)


def active(network: ReluNetwork, points: Array) -> Array:
    """Which neurons are on, (n, m)."""
    return np.asarray(points @ network.weight.T + network.bias > 0)


def with_parts(network: ReluNetwork, parts: Float[Array, "parts e"]) -> ReluNetwork:
    """The network with affine part parts[0] and neurons parts[1:], rows of unit length, each
    neuron's sign kept."""
    lengths = np.linalg.norm(parts[1:, :-1], axis=1)
    lengths = np.where(lengths > 0, lengths, 1.0)
    sign = np.where(network.output < 0, -1.0, 1.0)
    rows = parts[1:] * (sign / lengths)[:, None]
    return ReluNetwork(rows[:, :-1], rows[:, -1], sign * lengths, parts[0, :-1], parts[0, -1])


def parts_of(network: ReluNetwork) -> Float[Array, "parts e"]:
    own = network.output[:, None] * np.column_stack([network.weight, network.bias])
    return np.concatenate([np.append(network.skip, network.offset)[None], own])


@dataclass(frozen=True, eq=False)
class Doubts:
    """What a line leaves open: the gradient of piece p is known up to `sizes[p]` per `length`,
    its value at `centres[p]` exactly. The error shows between the planes of neurons p-1 and p."""

    sizes: Float[Array, " pieces"]
    centres: Float[Array, "pieces d"]
    length: float

    def features(self, network: ReluNetwork, points: Array) -> Float[Array, "n pieces"]:
        """Neuron p-1 (the affine part for p = 0) has too much of error p, neuron p too little."""
        on = active(network, points).astype(float)
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


def informative(
    network: ReluNetwork, doubts: Doubts, candidates: Float[Array, "n d"], count: int
) -> Array:
    """Candidates whose answers leave the least doubt: each the most doubtful given those before
    (a pivoted Cholesky factorisation of the covariance)."""
    if count > PIVOTED_QUERIES:
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


def corrected(
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
    parts = parts_of(network)
    parts += errors
    parts[1:] -= errors[:-1]
    return with_parts(network, parts)


def balanced_points(network: ReluNetwork, points: Float[Array, "n d"], least: int) -> Array:
    """The points, some of them mirrored at planes that have fewer than `least` points on one
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


def polished(
    network: ReluNetwork, points: Float[Array, "n d"], difference: Float[Array, "n *k"]
) -> ReluNetwork:
    """All parameters corrected at once, by least squares over the differences at the points."""
    on, flat = patterns(network, points)
    shape = (on.shape[1], flat.shape[1])
    if shape[0] * shape[1] <= DENSE_UNKNOWNS:
        step = small_least_squares(products(on, flat), difference)
    elif difference.ndim == 1:
        step = iterated(on, flat, difference)
    else:
        columns = [iterated(on, flat, column).reshape(-1) for column in difference.T]
        step = np.stack(columns, axis=1)
    if difference.ndim == 1:
        return with_parts(network, parts_of(network) + step.reshape(shape))
    return with_blocks(network, step.reshape(*shape, -1))


def patterns(network: ReluNetwork, points: Array) -> tuple[Array, Array]:
    """Which parts are on at each point (the affine one always), and the points with a one."""
    on = np.concatenate([np.ones((len(points), 1)), active(network, points)], axis=1)
    return on, lifted(points)


def products(on: Array, flat: Array) -> Float[Array, "n unknowns"]:
    return np.asarray(np.einsum("nm,nd->nmd", on, flat).reshape(len(on), -1))


def updated(
    network: ReluNetwork,
    spread: Float[Array, " parts"],
    points: Float[Array, "n d"],
    difference: Float[Array, "n k"],
    noise: Float[Array, " n"],
) -> tuple[ReluNetwork, Float[Array, " parts"]] | None:
    """The network given the differences at the points, for normal errors: of each part's entries
    as stated by `spread` (the affine part first), of the answers by `noise`. With the errors that
    remain; None where there are too many unknowns for that."""
    on, flat = patterns(network, points)
    if on.shape[1] * flat.shape[1] > DENSE_UNKNOWNS:
        return None
    rows = products(on, flat) / noise[:, None]
    normal = rows.T @ rows
    prior = np.repeat(spread, flat.shape[1]) ** -2.0
    normal[np.diag_indices_from(normal)] += prior
    factor = cho_factor(normal, overwrite_a=True)
    step = cho_solve(factor, rows.T @ (difference / noise[:, None]))
    variance = cho_solve(factor, np.eye(len(normal))).diagonal().reshape(on.shape[1], -1)
    left = np.sqrt(np.maximum(variance, 0.0).mean(axis=1))
    return with_blocks(network, step.reshape(on.shape[1], flat.shape[1], -1)), left


def with_blocks(network: ReluNetwork, step: Float[Array, "parts e k"]) -> ReluNetwork:
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


def small_least_squares(rows: Array, difference: Array) -> Array:
    """Normal equations: the differences have few digits to lose, and a second step finds those."""
    normal = rows.T @ rows
    normal[np.diag_indices_from(normal)] += RIDGE * normal.diagonal().max()
    factor = cho_factor(normal, overwrite_a=True)
    step = cho_solve(factor, rows.T @ difference)
    return np.asarray(step + cho_solve(factor, rows.T @ (difference - rows @ step)))


def iterated(on: Array, flat: Array, difference: Array) -> Array:
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
        atol=ITERATION_TOLERANCE,
        btol=ITERATION_TOLERANCE,
        iter_lim=ITERATIONS,
    )
    step = (np.asarray(found[0]) / scale).reshape(shape)
    step[0] -= 0.5 * step[1:].sum(axis=0)
    return np.asarray(step)
