"""All parameters of a ReLU network from answers with errors: damped least squares.

With on/off patterns held fixed the network is linear in the products output_j (weight_j, bias_j),
which is its true derivative: solving that linear problem again and again, with fresh patterns, is
the method of Gauss and Newton; damping (Levenberg, Marquardt) keeps it going downhill where planes
are off by more than a little. Before that, the outputs alone tell right neurons from wrong ones.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.relu_corrections import patterns, products, with_blocks
from keyhole.models.relu_network import ReluNetwork

CHUNK = 512  # answers whose derivatives are held at once
DAMPING = 1e-3  # relative to the diagonal, in the beginning,
DAMPING_STEP = 10.0  # less after a success, more after a failure,
LEAST_DAMPING, MOST_DAMPING = 1e-12, 1e3  # within these bounds
ROUNDS = 25  # of linear problems; from a good start four
GAIN = 0.98  # a round that leaves more than this of the misfit is the last
RIDGE = 1e-10  # of outputs: neurons that were measured twice share theirs


@dataclass(frozen=True, eq=False)
class Data:
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


def fitted(network: ReluNetwork, data: Data) -> ReluNetwork:
    """The network that explains the data best, near the given one."""
    damping, misfit = DAMPING, data.misfit(network)
    for _ in range(ROUNDS):
        normal, right = normal_equations(network, data)
        before = misfit
        while damping <= MOST_DAMPING:
            step = solved(normal, right, damping)
            tried = with_blocks(network, step.reshape(network.neurons + 1, network.width + 1, -1))
            misfit = data.misfit(tried)
            if misfit < before:
                break
            damping *= DAMPING_STEP
        if not misfit < before:
            return network
        network, damping = tried, max(damping / DAMPING_STEP, LEAST_DAMPING)
        if misfit > GAIN * before:
            return network
    return network


def normal_equations(network: ReluNetwork, data: Data) -> tuple[Array, Array]:
    residual = data.residual(network)
    unknowns = (network.neurons + 1) * (network.width + 1)
    normal = np.zeros((unknowns, unknowns))
    right = np.zeros((unknowns, residual.shape[1]))
    for i in range(0, len(residual), CHUNK):
        part = slice(i, i + CHUNK)
        rows = products(*patterns(network, data.points[part])) / data.noise[part, None]
        normal += rows.T @ rows
        right += rows.T @ residual[part]
    return normal, right


def solved(normal: Array, right: Array, damping: float) -> Array:
    damped = normal.copy()
    diagonal = normal.diagonal()
    damped[np.diag_indices_from(damped)] += damping * np.maximum(diagonal, RIDGE * diagonal.max())
    return np.asarray(cho_solve(cho_factor(damped, overwrite_a=True), right))


def remaining_errors(network: ReluNetwork, data: Data) -> Float[Array, " parts"]:
    """Of the entries of each part (the affine one first), by the misfit and what was asked."""
    normal, _ = normal_equations(network, data)
    variance = solved(normal, np.eye(len(normal)), LEAST_DAMPING).diagonal()
    surplus = max(len(data.points) - len(normal), 1)
    variance = variance * data.misfit(network) * len(data.points) / surplus
    return np.asarray(np.sqrt(variance.reshape(network.neurons + 1, -1).mean(axis=1)))


def rescaled(network: ReluNetwork, data: Data) -> tuple[ReluNetwork, Float[Array, " m"]]:
    """Affine part and outputs that explain the data best, all planes as they are; and how much of
    its output each neuron keeps: one if it is right, zero if the others explain what it does."""
    features = weighted_features(network, data)
    sizes = np.maximum(np.linalg.norm(features, axis=0), TINY)
    features = features / sizes
    normal = features.T @ features
    normal[np.diag_indices_from(normal)] += RIDGE
    found = np.linalg.solve(normal, features.T @ (data.answers / data.noise[:, None]))
    found = found / sizes[:, None]
    width = network.width
    output = found[width + 1 :]
    square = np.maximum((network.output**2).sum(axis=1), TINY)
    kept = np.einsum("mk,mk->m", output, network.output) / square
    best = ReluNetwork(network.weight, network.bias, output, found[:width], found[width])
    return best, np.asarray(kept)


def weighted_features(network: ReluNetwork, data: Data) -> Float[Array, "n features"]:
    heights = data.points @ network.weight.T + network.bias
    ones = np.ones((len(heights), 1))
    table = np.concatenate([data.points, ones, np.maximum(heights, 0)], axis=1)
    return np.asarray(table / data.noise[:, None])


def gains(network: ReluNetwork, others: ReluNetwork, data: Data) -> Float[Array, " others"]:
    """How much of the squared residual each of the other neurons would explain, if added."""
    basis, _ = np.linalg.qr(weighted_features(network, data))
    fresh = weighted_features(others, data)[:, others.width + 1 :]
    fresh = fresh - basis @ (basis.T @ fresh)
    residual = data.residual(network)
    residual = residual - basis @ (basis.T @ residual)
    sizes = np.maximum((fresh**2).sum(axis=0), TINY)
    return np.asarray(((fresh.T @ residual) ** 2).sum(axis=1) / sizes)
