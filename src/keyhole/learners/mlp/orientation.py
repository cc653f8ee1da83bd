"""Which side of its plane each neuron is on: the normal form back to a plain network.

relu(h) = relu(-h) + h: turning neuron j around adds output_j weight_j to the skip. A network
without skip is hidden in the normal form as the subset y of neurons to be turned with

    sum_j y_j output_j weight_j = -skip,      y in {0, 1}^m.

Up to m = k d neurons this is a linear system. Beyond, it is a subset sum in k d dimensions: the
box [0, 1]^m leaves nearly a single point while m < 2 k d, and branch and bound finds it at once;
for small networks it goes on to m = 4 k d. Every answer is certified by substituting it, at the
accuracy of the parameters, and by counting: 2^m subsets cannot meet that many equations to that
accuracy by chance.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from keyhole.arrays import Array, Float
from keyhole.models.relu_network import ReluNetwork

SAFETY = 5.0  # allowed remainder in units of the summed errors of the products
NEARLY_BINARY = 1e-3  # distance of a computed y from 0 or 1 that may be rounded away
CHANCE_BITS = 20.0  # a coincidence must be this many bits less likely than one
ROUNDING = 1e-13  # of our own sums over neurons, relative to their terms
WEAKEST = 1e-9  # relative singular value below which the linear system has no unique answer
EASY_NEURONS = 2.2  # neurons per equation up to which the box [0, 1]^m leaves nearly one point
HARD_NEURONS = 72  # neurons up to which the search goes on to four per equation
NODES = 20000  # branches looked at before giving up: a few seconds
SLACK = 1e-8  # of the equations in the search, at least; its result is substituted exactly


@dataclass(frozen=True, eq=False)
class Signs:
    """The network with the sides that were decided, how, and whether the decision is certain."""

    network: ReluNetwork
    certified: bool
    method: str
    leak: float | None = None  # slope below zero, if the neurons are leaky


def decided_signs(network: ReluNetwork, error: float) -> Signs:
    """Turns neurons around so that the skip vanishes, if that can be done.

    `error` is the accuracy of the products output_j weight_j."""
    columns, target = subset_problem(network)
    size = max(float(np.linalg.norm(target)), float(np.abs(columns).max(initial=0.0)))
    allowed = max(SAFETY * error, ROUNDING * size)
    if float(np.linalg.norm(target)) <= allowed:
        return Signs(without_skip(network), True, "nothing to turn")
    if network.neurons == 0:
        return Signs(network, True, "an affine box")
    singular = np.linalg.svd(columns, compute_uv=False)
    if len(singular) == network.neurons and singular[-1] > WEAKEST * singular[0]:
        return by_linear_system(network, columns, target, allowed)
    if not unlikely_by_chance(network, columns, allowed):
        return Signs(network, False, "the parameters are too coarse to decide")
    y = by_program(columns, target, allowed)
    if y is not None and float(np.linalg.norm(columns @ y - target)) <= allowed:
        return Signs(without_skip(turned(network, y > 0.5)), True, "branch and bound")
    return Signs(network, False, "undecided")


def subset_problem(network: ReluNetwork) -> tuple[Float[Array, "kd m"], Float[Array, " kd"]]:
    columns = np.einsum("mk,md->dkm", network.output_table, network.weight)
    return columns.reshape(network.skip.size, network.neurons), -network.skip.reshape(-1)


def turned(network: ReluNetwork, flip: Array) -> ReluNetwork:
    """The same function with some neurons turned around."""
    sign = np.where(flip, -1.0, 1.0)
    output = network.output_table[flip]
    answer = network.output.shape[1:]
    skip = network.skip + (network.weight[flip].T @ output).reshape(network.width, *answer)
    offset = network.offset + (network.bias[flip] @ output).reshape(answer)
    return ReluNetwork(
        network.weight * sign[:, None], network.bias * sign, network.output, skip, offset
    )


def without_skip(network: ReluNetwork) -> ReluNetwork:
    return ReluNetwork(network.weight, network.bias, network.output, None, network.offset)


def by_linear_system(network: ReluNetwork, columns: Array, target: Array, allowed: float) -> Signs:
    """As many equations as neurons: the answer is unique, binary or not."""
    y = np.linalg.lstsq(columns, target)[0]
    explained = float(np.linalg.norm(columns @ y - target)) <= allowed
    binary = np.abs(y - np.round(np.clip(y, 0, 1))).max() <= NEARLY_BINARY
    plain = turned(network, y > 0.5)
    if explained and binary and float(np.linalg.norm(plain.skip)) <= allowed:
        return Signs(without_skip(plain), True, "linear system")
    leak = common_leak(y) if explained else None
    return Signs(plain if leak is not None else network, leak is not None, "linear system", leak)


def common_leak(y: Float[Array, " m"]) -> float | None:
    """The slope below zero that all neurons share, if y takes two values that mirror at 1/2."""
    excess = np.abs(y - 0.5) - 0.5
    middle = float(np.median(excess))
    if np.abs(excess - middle).max() > NEARLY_BINARY or middle <= -0.5:
        return None
    return middle / (1 + middle)


def unlikely_by_chance(network: ReluNetwork, columns: Array, allowed: float) -> bool:
    bits = columns.shape[0] * np.log2(np.linalg.norm(columns) / allowed)
    return bool(bits > network.neurons + CHANCE_BITS)


def by_program(columns: Array, target: Array, allowed: float) -> Array | None:
    """A subset on the equations, by branch and bound over [0, 1]^m."""
    rows, neurons = columns.shape
    if neurons > EASY_NEURONS * rows and neurons > min(HARD_NEURONS, 4 * rows):
        return None
    scale = np.linalg.norm(columns, axis=1)
    sides, slack = target / scale, np.maximum(SLACK, allowed / scale)
    found = milp(
        np.zeros(neurons),
        constraints=LinearConstraint(columns / scale[:, None], sides - slack, sides + slack),
        bounds=Bounds(0, 1),
        integrality=np.ones(neurons),
        options={"node_limit": NODES},
    )
    return None if found.x is None else np.round(found.x)
