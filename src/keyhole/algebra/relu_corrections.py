"""Corrections of a ReLU network that leave its planes' sides alone: there it is linear.

With the neurons' on/off patterns held fixed, f(x) = G (x, 1) + sum_j on_j(x) g_j (x, 1) is linear
in G and the g_j = output_j (weight_j, bias_j). Differences to the box of the size of rounding are
therefore removed by linear least squares: for a few pieces of a line (`piece_features`), or for
all parameters at once (`polished`). Scalar answers only.
"""

import numpy as np
from scipy.linalg import cho_factor, cho_solve, qr
from scipy.sparse.linalg import LinearOperator, lsqr

from keyhole.arrays import Array, Float
from keyhole.models.relu_network import ReluNetwork

DENSE_UNKNOWNS = 2500  # up to here the normal equations are formed; beyond, they are iterated
RIDGE = 1e-13  # of the largest diagonal entry: what no answer determines stays as it is
ITERATIONS = 400  # of the iterative solver
ITERATION_TOLERANCE = 1e-9  # reduction of the remaining difference per solve
PIVOTED_UNKNOWNS = 400  # up to here questions are chosen by pivoted QR among random candidates


def lifted(points: Float[Array, "n d"]) -> Float[Array, "n d+1"]:
    return np.concatenate([points, np.ones((len(points), 1))], axis=1)


def active(network: ReluNetwork, points: Array) -> Array:
    """Which neurons are on, (n, m)."""
    return np.asarray(points @ network.weight.T + network.bias > 0)


def with_parts(network: ReluNetwork, parts: Float[Array, "m+1 d+1"]) -> ReluNetwork:
    """The network with affine part parts[0] and neurons parts[1:], rows of unit length, each
    neuron's sign kept."""
    lengths = np.linalg.norm(parts[1:, :-1], axis=1)
    lengths = np.where(lengths > 0, lengths, 1.0)
    sign = np.where(network.output < 0, -1.0, 1.0)
    rows = parts[1:] * (sign / lengths)[:, None]
    return ReluNetwork(rows[:, :-1], rows[:, -1], sign * lengths, parts[0, :-1], parts[0, -1])


def parts_of(network: ReluNetwork) -> Float[Array, "m+1 d+1"]:
    own = network.output[:, None] * np.column_stack([network.weight, network.bias])
    return np.concatenate([np.append(network.skip, network.offset)[None], own])


def piece_features(on: Array, pieces: Array) -> Float[Array, "n pieces"]:
    """How an error in the gradient of piece p of the line shows at points: neuron p-1 (the
    affine part for p = 0) has too much of it, neuron p too little."""
    signs = np.concatenate([np.ones((len(on), 1)), on, np.zeros((len(on), 1))], axis=1)
    return np.asarray(signs[:, pieces] - signs[:, pieces + 1])


def informative(
    network: ReluNetwork, pieces: Array, candidates: Float[Array, "n d"], count: int
) -> Array:
    """Candidates whose answers determine the errors of the pieces best (pivoted QR)."""
    if len(pieces) * (network.width + 1) > PIVOTED_UNKNOWNS:
        return candidates[: 5 * count // 4]
    rows = piece_rows(network, pieces, candidates)
    order = qr(rows.T, mode="r", pivoting=True)[1]
    return candidates[order[:count]]


def piece_rows(network: ReluNetwork, pieces: Array, points: Array) -> Array:
    features = piece_features(active(network, points).astype(float), pieces)
    return np.einsum("np,nd->npd", features, lifted(points)).reshape(len(points), -1)


def corrected_pieces(
    network: ReluNetwork, pieces: Array, points: Array, difference: Float[Array, " n"]
) -> ReluNetwork:
    """The network after removing the differences (box minus network) at the points."""
    errors = small_least_squares(piece_rows(network, pieces, points), difference)
    errors = errors.reshape(len(pieces), -1)
    parts = np.concatenate([parts_of(network), np.zeros((1, network.width + 1))])
    np.add.at(parts, pieces, errors)
    np.subtract.at(parts, pieces + 1, errors)
    return with_parts(network, parts[:-1])


def polished(
    network: ReluNetwork, points: Float[Array, "n d"], difference: Float[Array, " n"]
) -> ReluNetwork:
    """All parameters corrected at once, by least squares over the differences at the points."""
    on = np.concatenate([np.ones((len(points), 1)), active(network, points)], axis=1)
    flat = lifted(points)
    shape = (on.shape[1], flat.shape[1])
    if shape[0] * shape[1] <= DENSE_UNKNOWNS:
        rows = np.einsum("nm,nd->nmd", on, flat).reshape(len(points), -1)
        step = small_least_squares(rows, difference)
    else:
        step = iterated(on, flat, difference)
    return with_parts(network, parts_of(network) + step.reshape(shape))


def small_least_squares(rows: Array, difference: Array) -> Array:
    """Normal equations: the differences have few digits to lose, and a second step finds those."""
    normal = rows.T @ rows
    normal[np.diag_indices_from(normal)] += RIDGE * normal.diagonal().max()
    factor = cho_factor(normal, overwrite_a=True)
    step = cho_solve(factor, rows.T @ difference)
    return np.asarray(step + cho_solve(factor, rows.T @ (difference - rows @ step)))


def iterated(on: Array, flat: Array, difference: Array) -> Array:
    """The same by LSQR: two matrix products an iteration, columns of equal length."""
    shape = (on.shape[1], flat.shape[1])
    scale = np.sqrt(np.maximum(on.T @ flat**2, 1e-3)).ravel()

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
    return np.asarray(found[0]) / scale


def merged(network: ReluNetwork, tolerance: float) -> ReluNetwork:
    """Neurons with the same plane (within `tolerance`) taken together; a pair that faces each
    other leaves a linear part. Rows must have unit length."""
    sequence = np.arange(network.neurons)
    output = np.array(network.output.reshape(network.neurons, -1))
    skip = np.array(network.skip.reshape(network.width, -1))
    offset = np.array(network.offset.reshape(-1))
    planes = np.column_stack([network.weight, network.bias])
    cosine = planes[:, :-1] @ planes[:, :-1].T
    kept = np.ones(network.neurons, dtype=bool)
    for j in sequence:
        if not kept[j]:
            continue
        for i in np.nonzero(kept & (np.abs(cosine[j]) > 1 - tolerance) & (sequence > j))[0]:
            sign = 1.0 if cosine[j, i] > 0 else -1.0
            if np.linalg.norm(planes[j] - sign * planes[i]) > tolerance * np.linalg.norm(planes[j]):
                continue
            if sign < 0:  # relu(-h) = relu(h) - h
                skip += np.outer(planes[i, :-1], output[i])
                offset += planes[i, -1] * output[i]
            output[j] += output[i]
            kept[i] = False
    answer = network.output.shape[1:]
    return ReluNetwork(
        network.weight[kept],
        network.bias[kept],
        output[kept].reshape(-1, *answer),
        skip.reshape(network.width, *answer),
        offset.reshape(answer),
    )
