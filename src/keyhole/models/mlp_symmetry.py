"""When two networks with one hidden layer are the same function.

The order of the neurons does not matter. φ(-a) = sign φ(a) + slope a + constant, so a neuron of a
plain network may be turned around if linear and offset take the difference; that of a gated one
only where slope is zero. A ReLU's row has no scale of its own, nor has the ungated factor of a
gated neuron. Sigmoid and tanh are one class (the offset takes the difference), quick GELU and SiLU
too. Neurons without weight, inside or outside, are left out.
"""

from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import InvalidArgument
from keyhole.models.mlp import ACTIVATIONS, Mlp
from keyhole.models.symmetry import distance, relative

DEAD = 1e-12  # size of a neuron's part in the answers, relative to the largest, that is nothing


def outer_table(network: Mlp) -> Float[Array, "k m"]:
    """`outer` as a table also where the answer is a number."""
    return np.atleast_2d(network.outer)


def with_parts(network: Mlp, **parts: Any) -> Mlp:
    """The network with some parameters (and perhaps the activation) replaced. Tables (1, .) stand
    for vectors where the answer is a number."""
    answer = network.outer.shape[:-1]
    known: dict[str, Any] = {
        "inner": network.inner,
        "inner_bias": network.inner_bias,
        "outer": outer_table(network),
        "activation": network.activation,
        "linear": network.linear,
        "offset": network.offset,
        "gate": network.gate,
        "gate_bias": network.gate_bias,
        **parts,
    }
    known["outer"] = np.reshape(known["outer"], (*answer, -1))
    known["linear"] = np.reshape(known["linear"], (*answer, -1))
    known["offset"] = np.reshape(known["offset"], answer)
    return Mlp(**known)


def representative(network: Mlp) -> Mlp:
    """The same function with the activation that stands for its class."""
    alias = ACTIVATIONS[network.activation].alias
    if alias is None:
        return network
    name, inside, outside, added = alias
    outer = outer_table(network)
    if network.gate is None or network.gate_bias is None:
        offset = np.atleast_1d(network.offset) + added * outer.sum(axis=1)
        return with_parts(
            network,
            activation=name,
            inner=inside * network.inner,
            inner_bias=inside * network.inner_bias,
            outer=outside * outer,
            offset=offset,
        )
    return with_parts(
        network,
        activation=name,
        gate=inside * network.gate,
        gate_bias=inside * network.gate_bias,
        outer=outside * outer,
        linear=np.atleast_2d(network.linear) + added * outer @ network.inner,
        offset=np.atleast_1d(network.offset) + added * outer @ network.inner_bias,
    )


def turned(network: Mlp, back: Array) -> Mlp:
    """The same function with the chosen neurons' arguments of φ turned around."""
    kind = ACTIVATIONS[network.activation]
    way = np.where(back, -1.0, 1.0)
    outer, taken = outer_table(network), np.where(back, 1.0, 0.0)
    left = outer * np.where(back, kind.sign, 1.0)
    linear, offset = np.atleast_2d(network.linear), np.atleast_1d(network.offset)
    if network.gate is None or network.gate_bias is None:
        inner, bias = way[:, None] * network.inner, way * network.inner_bias
        linear = linear + kind.slope * (outer * taken) @ inner
        offset = offset + (outer * taken) @ (kind.slope * bias + kind.constant)
        return with_parts(
            network, inner=inner, inner_bias=bias, outer=left, linear=linear, offset=offset
        )
    if kind.slope and back.any():
        raise InvalidArgument(f"a {kind.name} gate cannot be turned around")
    linear = linear + kind.constant * (outer * taken) @ network.inner
    offset = offset + kind.constant * (outer * taken) @ network.inner_bias
    gate, bias = way[:, None] * network.gate, way * network.gate_bias
    return with_parts(network, gate=gate, gate_bias=bias, outer=left, linear=linear, offset=offset)


def scaled(network: Mlp, factor: Float[Array, " m"]) -> Mlp:
    """The same function: rows of `inner` times a factor, `outer` divided by it. For gated networks
    any factor but zero, for ReLU positive ones."""
    return with_parts(
        network,
        inner=factor[:, None] * network.inner,
        inner_bias=factor * network.inner_bias,
        outer=outer_table(network) / factor,
    )


def only(network: Mlp, chosen: Array) -> Mlp:
    """The network of the chosen neurons, affine part as it is."""
    parts: dict[str, Any] = {
        "inner": network.inner[chosen],
        "inner_bias": network.inner_bias[chosen],
        "outer": outer_table(network)[:, chosen],
    }
    if network.gate is not None and network.gate_bias is not None:
        parts.update(gate=network.gate[chosen], gate_bias=network.gate_bias[chosen])
    return with_parts(network, **parts)


def scale_free(network: Mlp) -> bool:
    """Whether rows of `inner` have no scale of their own."""
    return network.gated or network.activation == "relu"


def plain_form(network: Mlp) -> Mlp:
    """Representative activation, no dead neurons, unit rows where they have no scale."""
    network = representative(network)
    rows = np.linalg.norm(np.column_stack([network.inner, network.inner_bias]), axis=1)
    size = rows * np.linalg.norm(outer_table(network), axis=0)
    if network.gate is not None:
        rows = np.linalg.norm(network.gate, axis=1)
    else:
        rows = np.linalg.norm(network.inner, axis=1)
    constant = rows == 0
    if network.gate is None and constant.any():
        phi = ACTIVATIONS[network.activation].value
        added = outer_table(network)[:, constant] @ phi(network.inner_bias[constant])
        network = with_parts(network, offset=np.atleast_1d(network.offset) + added)
        size = np.where(constant, 0.0, size)
    network = only(network, size > DEAD * size.max(initial=0.0))
    if scale_free(network) and network.neurons:
        whole = np.column_stack([network.inner, network.inner_bias])
        network = scaled(network, 1.0 / np.linalg.norm(whole, axis=1))
    return network


def aligned(a: Mlp, b: Mlp) -> Mlp:
    """`a` with its neurons in the order of `b`'s, turned and signed alike. Both in plain form, with
    as many neurons."""
    first, second = _arguments(a), _arguments(b)
    size = (first**2).sum(axis=1)[:, None] + (second**2).sum(axis=1)
    product = 2.0 * first @ second.T
    plus = size - product
    turns = not a.gated or ACTIVATIONS[a.activation].slope == 0
    minus = size + product if turns else np.full_like(plus, np.inf)
    rows, columns = linear_sum_assignment(np.minimum(plus, minus) / np.maximum(size, TINY))
    order = rows[np.argsort(columns)]
    back = (minus < plus)[order, np.arange(len(order))]
    network = turned(only(a, order), back)
    if network.gated:
        mine = np.column_stack([network.inner, network.inner_bias])
        theirs = np.column_stack([b.inner, b.inner_bias])
        network = scaled(network, np.where((mine * theirs).sum(axis=1) < 0, -1.0, 1.0))
    return network


def _arguments(network: Mlp) -> Float[Array, "m e"]:
    if network.gate is not None and network.gate_bias is not None:
        return np.column_stack([network.gate, network.gate_bias])
    return np.column_stack([network.inner, network.inner_bias])


@distance.register
def _(a: Mlp, b: Any) -> float:
    if not isinstance(b, Mlp):
        raise InvalidArgument(f"cannot compare Mlp with {type(b).__name__}")
    if a.width != b.width or a.outputs != b.outputs or a.gated != b.gated:
        return float("inf")
    first, second = plain_form(a), plain_form(b)
    if first.activation != second.activation or first.neurons != second.neurons:
        return float("inf")
    first = aligned(first, second)
    worst, mine, theirs = 0.0, first.to_arrays(), second.to_arrays()
    rows = float(np.linalg.norm(_arguments(second)))
    through = float(np.linalg.norm(outer_table(second) @ second.inner))
    scale = {"inner_bias": rows, "gate_bias": rows, "linear": through, "offset": through}
    for name, array in theirs.items():
        gap = float(np.linalg.norm(mine[name] - array))
        own = float(np.linalg.norm(array))
        if array.size:
            worst = max(worst, relative(gap, max(own, scale.get(name, 0.0))))
    return worst
