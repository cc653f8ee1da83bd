"""On which side of its hyperplane each neuron is active: the normal form back to a plain network.

Statement.  relu(h) = relu(-h) + h: turning neuron j around adds output_j weight_j to the skip. A
            network without skip is hidden in the normal form as the subset y of neurons to turn,

                sum_j y_j output_j weight_j = -skip,      y in {0, 1}^m.

Queries.    None.
Algebra.    Up to m = k d neurons this is a linear system. Beyond, it is a subset sum in k d
            dimensions: the box [0, 1]^m leaves nearly a single point while m < 2 k d, and branch
            and bound finds it at once; for small networks it goes on to m = 4 k d. Every answer is
            certified by substituting it, at the accuracy of the parameters, and by counting: 2^m
            subsets cannot meet that many equations to that accuracy by chance.
Fails.      Parameters too coarse, or too many neurons: the orientation stays open, the function is
            known all the same.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from keyhole.arrays import Array, Float
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.noise import DETECTION

NEARLY_BINARY = 1e-3  # distance of a computed y from 0 or 1 that may be rounded away


@dataclass(frozen=True, eq=False)
class Orientation:
    """The network with the sides that were decided, how, and whether the decision is certain."""

    network: ReluNetwork
    certified: bool
    method: str
    leak: float | None = None  # slope below zero, if the neurons are leaky


def orient_neurons(network: ReluNetwork, error: float) -> Orientation:
    """Turns neurons around so that the skip vanishes, if that can be done.

    `error` is the accuracy of the products output_j weight_j."""
    columns, target = build_subset_problem(network)
    size = max(float(np.linalg.norm(target)), float(np.abs(columns).max(initial=0.0)))
    allowed = max(DETECTION * error, 1e-13 * size)  # our own sums round, too
    if float(np.linalg.norm(target)) <= allowed:
        return Orientation(drop_skip(network), True, "nothing to turn")
    if network.neurons == 0:
        return Orientation(network, True, "an affine box")
    singular = np.linalg.svd(columns, compute_uv=False)
    if len(singular) == network.neurons and singular[-1] > 1e-9 * singular[0]:
        return solve_linear_system(network, columns, target, allowed)
    if not unlikely_by_chance(network, columns, allowed):
        return Orientation(network, False, "the parameters are too coarse to decide")
    y = solve_subset_sum(columns, target, allowed)
    if y is not None and float(np.linalg.norm(columns @ y - target)) <= allowed:
        return Orientation(drop_skip(turn_neurons(network, y > 0.5)), True, "branch and bound")
    return Orientation(network, False, "undecided")


def build_subset_problem(network: ReluNetwork) -> tuple[Float[Array, "kd m"], Float[Array, " kd"]]:
    columns = np.einsum("mk,md->dkm", network.output_table, network.weight)
    return columns.reshape(network.skip.size, network.neurons), -network.skip.reshape(-1)


def turn_neurons(network: ReluNetwork, flip: Array) -> ReluNetwork:
    """The same function with some neurons turned around."""
    sign = np.where(flip, -1.0, 1.0)
    output = network.output_table[flip]
    answer = network.output.shape[1:]
    skip = network.skip + (network.weight[flip].T @ output).reshape(network.width, *answer)
    offset = network.offset + (network.bias[flip] @ output).reshape(answer)
    return ReluNetwork(
        network.weight * sign[:, None], network.bias * sign, network.output, skip, offset
    )


def drop_skip(network: ReluNetwork) -> ReluNetwork:
    return ReluNetwork(network.weight, network.bias, network.output, None, network.offset)


def solve_linear_system(
    network: ReluNetwork, columns: Array, target: Array, allowed: float
) -> Orientation:
    """As many equations as neurons: the answer is unique, binary or not."""
    y = np.linalg.lstsq(columns, target)[0]
    explained = float(np.linalg.norm(columns @ y - target)) <= allowed
    binary = np.abs(y - np.round(np.clip(y, 0, 1))).max() <= NEARLY_BINARY
    plain = turn_neurons(network, y > 0.5)
    if explained and binary and float(np.linalg.norm(plain.skip)) <= allowed:
        return Orientation(drop_skip(plain), True, "linear system")
    leak = find_common_leak(y) if explained else None
    return Orientation(
        plain if leak is not None else network, leak is not None, "linear system", leak
    )


def find_common_leak(y: Float[Array, " m"]) -> float | None:
    """The slope below zero that all neurons share, if y takes two values that mirror at 1/2."""
    excess = np.abs(y - 0.5) - 0.5
    middle = float(np.median(excess))
    if np.abs(excess - middle).max() > NEARLY_BINARY or middle <= -0.5:
        return None
    return middle / (1 + middle)


def unlikely_by_chance(network: ReluNetwork, columns: Array, allowed: float) -> bool:
    bits = columns.shape[0] * np.log2(np.linalg.norm(columns) / allowed)
    chance_bits = 20.0  # a coincidence must be this many bits less likely than one
    return bool(bits > network.neurons + chance_bits)


def solve_subset_sum(columns: Array, target: Array, allowed: float) -> Array | None:
    """A subset on the equations, by branch and bound over [0, 1]^m; None where that would take too
    long: beyond 2.2 neurons per equation, and four in networks of up to 72 neurons."""
    rows, neurons = columns.shape
    if neurons > 2.2 * rows and neurons > min(72, 4 * rows):
        return None
    scale = np.linalg.norm(columns, axis=1)
    sides, slack = target / scale, np.maximum(1e-8, allowed / scale)
    found = milp(
        np.zeros(neurons),
        constraints=LinearConstraint(columns / scale[:, None], sides - slack, sides + slack),
        bounds=Bounds(0, 1),
        integrality=np.ones(neurons),
        options={"node_limit": 20000},  # a few seconds
    )
    return None if found.x is None else np.round(found.x)
