"""When two ReLU networks, or two Transformer layers, are the same function.

The order of the neurons does not matter; positive scale moves between a neuron's row and its
output; a neuron may be turned around if the skip takes the difference; neurons on one plane act as
one. The canonical form has unit rows whose first clearly nonzero entry is positive, planes merged,
dead neurons dropped and everything that turning leaves over in the skip. `output_j weight_j`, with
both taken as one block, is what `distance` compares, so that neurons without weight do not count.
"""

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument
from keyhole.models.canonical import distance, relative
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel

SAME_PLANE = 1e-12  # distance of two unit planes that are one
DEAD = 1e-12  # output of a neuron, relative to the largest, that does nothing
CLEAR = 1e-6  # entry of a unit row that decides which way it points


def canonical_network(network: ReluNetwork) -> ReluNetwork:
    """The one representative of all networks that are the same function, neurons unordered."""
    rows = np.linalg.norm(network.weight, axis=1)
    constant = rows == 0  # a neuron without weights only adds to the offset
    offset = network.offset + (
        np.maximum(network.bias[constant], 0) @ network.output_table[constant]
    ).reshape(network.offset.shape)
    live = ~constant
    planes = np.column_stack([network.weight, network.bias])[live] / rows[live, None]
    output = network.output_table[live] * rows[live, None]
    first = np.argmax(np.abs(planes[:, :-1]) > CLEAR, axis=1)
    back = planes[np.arange(len(planes)), first] < 0
    skip = network.skip + (planes[back, :-1].T @ output[back]).reshape(network.skip.shape)
    offset = offset + (planes[back, -1] @ output[back]).reshape(offset.shape)
    planes[back] *= -1
    planes, output = merged_planes(planes, output)
    size = np.abs(output).max(axis=1, initial=0.0)
    kept = size > DEAD * size.max(initial=0.0)
    answer = network.output.shape[1:]
    return ReluNetwork(
        planes[kept, :-1], planes[kept, -1], output[kept].reshape(-1, *answer), skip, offset
    )


def merged_planes(planes: Float[Array, "m e"], output: Float[Array, "m k"]) -> tuple[Array, Array]:
    """Planes that coincide, once, with the sum of their outputs."""
    kept: list[int] = []
    output = output.copy()
    for j in range(len(planes)):
        if kept:
            gaps = np.linalg.norm(planes[kept] - planes[j], axis=1)
            near = int(np.argmin(gaps))
            if gaps[near] <= SAME_PLANE * (1 + np.linalg.norm(planes[j])):
                output[kept[near]] += output[j]
                continue
        kept.append(j)
    return planes[kept], output[kept]


def matched_neurons(a: ReluNetwork, b: ReluNetwork) -> tuple[Array, Array]:
    """Which neuron of `a` is which of `b`: nearest planes."""
    first = np.column_stack([a.weight, a.bias])
    second = np.column_stack([b.weight, b.bias])
    square = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1) - 2 * first @ second.T
    rows, columns = linear_sum_assignment(np.maximum(square, 0))
    return rows, columns


def jumps(network: ReluNetwork) -> Float[Array, "m e k"]:
    """output_j (weight_j, bias_j): what a neuron changes at its plane."""
    planes = np.column_stack([network.weight, network.bias])
    return np.asarray(planes[:, :, None] * network.output_table[:, None, :])


@distance.register
def _(a: ReluNetwork, b: Any) -> float:
    if not isinstance(b, ReluNetwork):
        raise InvalidArgument(f"cannot compare ReluNetwork with {type(b).__name__}")
    if a.width != b.width or a.outputs != b.outputs:
        return float("inf")
    first, second = canonical_network(a), canonical_network(b)
    if first.neurons != second.neurons:
        return float("inf")
    rows, columns = matched_neurons(first, second)
    mine, theirs = jumps(first)[rows], jumps(second)[columns]
    size = float(np.linalg.norm(theirs))
    worst = relative(float(np.linalg.norm(mine - theirs)), size)
    for part in ("skip", "offset"):
        gap = float(np.linalg.norm(getattr(first, part) - getattr(second, part)))
        own = float(np.linalg.norm(getattr(second, part)))
        worst = max(worst, relative(gap, max(own, size)))
    return worst


@distance.register
def _(a: TransformerModel, b: Any) -> float:
    if not isinstance(b, TransformerModel):
        raise InvalidArgument(f"cannot compare TransformerModel with {type(b).__name__}")
    if a.width != b.width or a.outputs != b.outputs or a.residual != b.residual:
        return float("inf")
    size = float(np.linalg.norm(b.score))
    bias = float(np.linalg.norm(a.key_bias - b.key_bias))
    return max(
        relative(float(np.linalg.norm(a.score - b.score)), size),
        relative(bias, float(np.linalg.norm(b.key_bias)) or size),
        distance(a.network, b.network),
        *((mixed_distance(a, b),) if a.residual else ()),
    )


def mixed_distance(a: TransformerModel, b: TransformerModel) -> float:
    """Of what a residual connection adds, neurons matched by their planes and turned alike."""
    first, second = turned_mixed(a), turned_mixed(b)
    if len(first[0]) != len(second[0]):
        return float("inf")
    square = ((first[0][:, None] - second[0]) ** 2).sum(axis=2)
    rows, columns = linear_sum_assignment(square)
    size = float(np.linalg.norm(second[1]))
    gap = float(np.linalg.norm(first[1][rows] - second[1][columns]))
    skip = float(np.linalg.norm(first[2] - second[2]))
    own = float(np.linalg.norm(second[2]))
    return max(relative(gap, size), relative(skip, max(own, size)))


def turned_mixed(model: TransformerModel) -> tuple[Array, Array, Array]:
    """Planes of unit rows, output_j mixed_weight_j and the mixed skip, with every neuron turned so
    that the first clear entry of its row is positive. Neurons without weight are left out."""
    net = model.network
    if model.mixed_weight is None or model.mixed_skip is None:
        raise InvalidArgument("the layer has no residual connection")
    rows = np.linalg.norm(net.weight, axis=1)
    live = rows > 0
    planes = np.column_stack([net.weight, net.bias])[live] / rows[live, None]
    first = np.argmax(np.abs(planes[:, :-1]) > CLEAR, axis=1)
    back = planes[np.arange(len(planes)), first] < 0
    mixed = model.mixed_weight[live, :, None] * net.output_table[live][:, None, :]
    skip = model.mixed_skip.reshape(model.width, -1) + mixed[back].sum(axis=0)
    planes[back], mixed[back] = -planes[back], -mixed[back]
    return planes, mixed, skip
