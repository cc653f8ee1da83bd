"""The only place that says when two parameter sets are the same function.

Attention: the order of heads does not matter; heads with equal score and key bias act as one head
with the sum of their values; a head with value zero does nothing. What remains after merging,
dropping and sorting is the canonical form (Proposition 7.1 of Bhattamishra, Shah, Hahn, Kanade,
"Provably Learning Attention with Queries", shows that no more can be known). Where only the sign
of the answers is seen, a positive factor on values and offset does not matter either.

Networks of ReLUs: the order of the neurons does not matter; positive scale moves between a neuron's
row and its output; a neuron may be turned around if the skip takes the difference; neurons on one
hyperplane act as one. The canonical form has unit rows whose first clearly nonzero entry is
positive, hyperplanes merged, dead neurons dropped and everything that turning leaves over in the
skip. `output_j weight_j`, with both taken as one block, is what `distance` compares, so that
neurons without weight do not count. A Transformer layer is a score, a key bias and a network.

Networks with any activation (`models.mlp` has their symmetries): brought to the activation that
stands for their class, to unit rows where rows have no scale, neurons matched and turned alike.

Blocks: a norm forgets the mean of its input ("layer"), and its gain and bias move into the maps
that read it. `canonical_block` says what is left.

Output layers of language models: known up to a linear map (then their spaces are compared by
principal angles) or up to a rotation (Procrustes). Attention on tokens: a vector may move from all
rows of an `ov` to all rows of `direct`, a constant may be added to a row of `qk`, heads have no
order; log-probabilities know logits up to a constant.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import numpy as np
from scipy.linalg import qr
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.language_model import OutputLayer, TokenAttention
from keyhole.models.mlp import (
    ACTIVATIONS,
    Mlp,
    only,
    outer_table,
    representative,
    scaled,
    turned,
    with_parts,
)
from keyhole.models.norm import Norm
from keyhole.models.position import Position
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.sign_attention import LabelledAttention, normalised
from keyhole.models.stack import Stack
from keyhole.models.transformer import TransformerModel

MERGE_TOLERANCE = 1e-12  # relative difference of two heads or hyperplanes that are one, and
# the size, relative to the largest, of a head or neuron that does nothing


@singledispatch
def distance(a: Any, b: Any) -> float:
    """Largest relative Frobenius error over the parameter blocks, after removing the symmetries.

    Blocks: the scores, the key biases, the values, the offset, the skip; with positions the scores
    at the distances 0 ... 16 with all their terms, sinks and position vectors.

    Args:
        a: A model.
        b: The yardstick: a block of `b` that is zero is compared in units of the block family it
            belongs to, absolute if that is zero too.

    Returns:
        The error; infinite where the structures (number of heads, shapes) differ.

    Raises:
        InvalidArgument: Models of different families.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> model = attention(np.random.default_rng(0), 4, heads=2)
        >>> swapped = Attention(model.heads[::-1], model.offset)
        >>> distance(swapped, model)
        0.0
    """
    raise InvalidArgument(f"no distance is defined for {type(a).__name__}")


def relative(error: float, scale: float) -> float:
    """error / scale, and the absolute error where there is no scale."""
    return error / scale if scale > 0 else error


def incomparable(a: Any, b: Any) -> InvalidArgument:
    return InvalidArgument(f"cannot compare {type(a).__name__} with {type(b).__name__}")


@distance.register
def _(a: Attention, b: Any) -> float:
    if isinstance(b, LabelledAttention):
        return sign_distance(a, b.model)
    if not isinstance(b, Attention):
        raise incomparable(a, b)
    if a.width != b.width or a.outputs != b.outputs:
        return float("inf")
    first, second = canonical(a), canonical(b)
    if first is None or second is None:  # no live head: only the offset remains
        if (first is None) != (second is None):
            return float("inf")
        return common_distance(a, b, 0.0)
    if len(first.heads) != len(second.heads):
        return float("inf")
    if first.position is not None or second.position is not None:
        return placed_distance(first, second)
    worst = heads_distance(first.heads, second.heads)
    values = max(float(np.linalg.norm(h.value)) for h in second.heads)
    return max(worst, common_distance(first, second, values))


def heads_distance(first: Sequence[Head], second: Sequence[Head]) -> float:
    """Of heads that see no places, each compared with its like."""
    scores = max(score_norm(h) for h in second)
    biases = max(float(np.linalg.norm(h.key_bias)) for h in second)
    worst = 0.0
    for mine, theirs in match_heads(first, second):
        worst = max(
            worst,
            relative(score_gap(mine, theirs), score_norm(theirs) or scores),
            relative(
                float(np.linalg.norm(mine.key_bias - theirs.key_bias)),
                float(np.linalg.norm(theirs.key_bias)) or biases or scores,
            ),
            value_distance(mine, theirs),
        )
    return worst


def value_distance(head: Head, other: Head) -> float:
    gap = float(np.linalg.norm(head.value - other.value))
    return relative(gap, float(np.linalg.norm(other.value)))


def common_distance(a: Attention, b: Attention, values: float) -> float:
    """Of what all heads share: the offset and the skip, in units of the values where `b` has
    none."""
    offset = float(np.linalg.norm(a.offset - b.offset))
    worst = relative(offset, float(np.linalg.norm(b.offset)) or values)
    if a.skip is None and b.skip is None:
        return worst
    mine, theirs = (0.0 if skip is None else skip for skip in (a.skip, b.skip))
    gap = float(np.linalg.norm(mine - theirs))
    return max(worst, relative(gap, float(np.linalg.norm(theirs)) or values))


def placed_distance(a: Attention, b: Attention) -> float:
    """Distance of two canonical layers of which one at least has positions. Scores are compared
    with all their terms; what a head adds to all tokens alike at every distance does not show."""
    mine, theirs = (m.position or Position() for m in (a, b))
    seen = [(p.window, p.longest, p.masked, bool(p.masked_anchor)) for p in (mine, theirs)]
    if seen[0] != seen[1]:
        return float("inf")
    compared = 17  # distances between token and anchor, from zero on, at which scores are compared
    reach = int(min(compared, mine.window or np.inf, mine.longest or np.inf))
    cost = placed_heads_distance(a, b, reach)
    rows, columns = linear_sum_assignment(np.minimum(cost, 2.0))
    sinks = [spell_sinks(p.sinks, a.width) for p in (mine, theirs)]
    worst = max(
        float(cost[rows, columns].max()),
        part_distance(of_heads(sinks[0], rows), of_heads(sinks[1], columns)),
        part_distance(of_heads(mine.sink_values, rows), of_heads(theirs.sink_values, columns)),
        part_distance(mine.vectors, theirs.vectors),
    )
    values = max(float(np.linalg.norm(h.value)) for h in b.heads)
    return max(worst, common_distance(a, b, values))


def placed_heads_distance(a: Attention, b: Attention, reach: int) -> Float[Array, "h k"]:
    """Of every head of `a` to every head of `b`: of the scores at each of so many distances with
    all their terms, or of the values, whichever is larger."""
    tables = [[visible_scores(m, h, reach) for h in range(len(m.heads))] for m in (a, b)]
    sizes = np.array([np.linalg.norm(t, axis=(1, 2)) for t in tables[1]])
    sizes = np.where(sizes > 0, sizes, sizes.max() or 1.0)
    cost = np.zeros((len(a.heads), len(b.heads)))
    for i, head in enumerate(a.heads):
        for j, other in enumerate(b.heads):
            scores = np.linalg.norm(tables[0][i] - tables[1][j], axis=(1, 2)) / sizes[j]
            cost[i, j] = max(float(scores.max()), value_distance(head, other))
    return cost


def of_heads(part: Array | None, order: Array) -> Array | None:
    return None if part is None else part[order]


def part_distance(one: Array | None, two: Array | None) -> float:
    """Of two parts of positions; infinite where one of them is missing."""
    if one is None or two is None:
        return 0.0 if one is two else float("inf")
    return relative(float(np.linalg.norm(one - two)), float(np.linalg.norm(two)))


def spell_sinks(sinks: Array | None, width: int) -> Array | None:
    """The scores of the sinks on [anchor; 1]."""
    if sinks is None or sinks.ndim == 2:
        return sinks
    return np.column_stack([np.zeros((len(sinks), width)), sinks])


def visible_scores(model: Attention, head: int, reach: int) -> Float[Array, "n e e"]:
    """Scores at the first distances; terms that no token shows are taken out, except where a sink
    competes with all of them."""
    table = np.stack([model.score_at(head, distance) for distance in range(reach)])
    if model.position is None or model.position.sinks is None:
        table[:, -1] -= table[0, -1].copy()
    return table


def canonical(model: Attention) -> Attention | None:
    """Equal heads merged, dead heads dropped; None where no head is left. Vectors of places start
    at zero: what they share belongs to the offset and the key biases."""
    model = without_common_vector(model)
    merged: list[Head] = []
    numbers: list[int] = []
    for number, head in enumerate(model.heads):
        for i, known in enumerate(merged):
            if same_attention(head, known) and same_places(model, number, numbers[i]):
                score: Any = known.score_factors or known.score
                merged[i] = Head(score, known.key_bias, known.value + head.value)
                break
        else:
            merged.append(head)
            numbers.append(number)
    largest = max(float(np.abs(head.value).max(initial=0.0)) for head in model.heads)
    alive = [
        i
        for i, head in enumerate(merged)
        if np.abs(head.value).max(initial=0.0) > MERGE_TOLERANCE * largest
    ]
    if not alive:
        return None
    return model.with_heads([merged[i] for i in alive], [numbers[i] for i in alive])


def without_common_vector(model: Attention) -> Attention:
    """The same layer, the vector of the first place moved into offset and key biases."""
    position = model.position
    if position is None or position.vectors is None:
        return model
    first = position.vectors[0]
    heads = [
        Head(h.score_factors or h.score, h.key_bias + h.score @ first, h.value) for h in model.heads
    ]
    offset = model.offset + sum(first @ h.value for h in model.heads)
    if model.skip is not None:
        offset = offset + first @ model.skip
    placed = replace(position, vectors=position.vectors - first)
    return Attention(heads, offset, model.skip, placed)


def same_places(model: Attention, one: int, other: int) -> bool:
    """Whether the position part treats two heads alike."""
    position = model.position
    if position is None:
        return True
    parts = (getattr(position, n) for n in ("keys", "queries", "bias", "slopes", "sinks"))
    return all(np.array_equal(part[one], part[other]) for part in parts if part is not None)


def same_attention(a: Head, b: Head) -> bool:
    """Whether two heads attend alike on every input: equal score and key bias."""
    scale = max(score_norm(a), score_norm(b))
    bias = max(float(np.linalg.norm(a.key_bias)), float(np.linalg.norm(b.key_bias)))
    gap = float(np.linalg.norm(a.key_bias - b.key_bias))
    same_bias = gap <= MERGE_TOLERANCE * max(bias, scale)
    return same_bias and score_gap(a, b) <= MERGE_TOLERANCE * scale


def match_heads(a: Sequence[Head], b: Sequence[Head]) -> list[tuple[Head, Head]]:
    """Heads of `a` paired with heads of `b`, least total distance of their parameters."""
    if len(a) == 1 == len(b):
        return [(a[0], b[0])]
    cost = np.array([[mismatch(x, y) for y in b] for x in a])
    rows, columns = linear_sum_assignment(cost)
    return [(a[i], b[j]) for i, j in zip(rows, columns, strict=True)]


def mismatch(a: Head, b: Head) -> float:
    """Sum of the relative errors of score, key bias and value, each at most 2."""
    gaps = (
        (score_gap(a, b), score_norm(b)),
        *(
            (float(np.linalg.norm(x - y)), float(np.linalg.norm(y)))
            for x, y in ((a.key_bias, b.key_bias), (a.value, b.value))
        ),
    )
    return sum(min(relative(gap, size), 2.0) for gap, size in gaps)


def score_norm(head: Head) -> float:
    """Frobenius norm of the score, without multiplying factors out."""
    if head.score_factors is None:
        return float(np.linalg.norm(head.score))
    return product_norm(head.score_factors.left, head.score_factors.right)


def score_gap(a: Head, b: Head) -> float:
    """Frobenius norm of the difference of two scores; factored scores stay factored."""
    if a.score_factors is None or b.score_factors is None:
        return float(np.linalg.norm(a.score - b.score))
    left = np.hstack([a.score_factors.left, b.score_factors.left])
    right = np.vstack([a.score_factors.right, -b.score_factors.right])
    return product_norm(left, right)


def product_norm(left: Array, right: Array) -> float:
    """Frobenius norm of left @ right through the two small triangular factors: a difference of
    nearly equal products keeps its digits, which a Gram matrix would lose."""
    if left.shape[1] >= left.shape[0]:
        return float(np.linalg.norm(left @ right))
    upper = qr(left, mode="r")[0][: left.shape[1]]
    lower = qr(right.T, mode="r")[0][: right.shape[0]]
    return float(np.linalg.norm(upper @ lower.T))


@distance.register
def _(a: LabelledAttention, b: Any) -> float:
    other = b.model if isinstance(b, LabelledAttention) else b
    if not isinstance(other, Attention):
        raise incomparable(a, b)
    return sign_distance(a.model, other)


def sign_distance(a: Attention, b: Attention) -> float:
    """Labels say nothing about a positive factor, so both sides are normalised first."""
    if a.outputs is not None or b.outputs is not None:
        return float("inf")
    return distance(normalised(a), normalised(b))


@distance.register
def _(a: ReluNetwork, b: Any) -> float:
    if not isinstance(b, ReluNetwork):
        raise incomparable(a, b)
    if a.width != b.width or a.outputs != b.outputs:
        return float("inf")
    first, second = canonical_network(a), canonical_network(b)
    if first.neurons != second.neurons:
        return float("inf")
    rows, columns = match_planes(*(np.column_stack([n.weight, n.bias]) for n in (first, second)))
    mine, theirs = gradient_jumps(first)[rows], gradient_jumps(second)[columns]
    size = float(np.linalg.norm(theirs))
    worst = relative(float(np.linalg.norm(mine - theirs)), size)
    for part in ("skip", "offset"):
        gap = float(np.linalg.norm(getattr(first, part) - getattr(second, part)))
        own = float(np.linalg.norm(getattr(second, part)))
        worst = max(worst, relative(gap, max(own, size)))
    return worst


def canonical_network(network: ReluNetwork) -> ReluNetwork:
    """The one representative of all networks that are the same function, neurons unordered."""
    planes, live, back = orient_planes(network)
    constant = ~live  # a neuron without weights only adds to the offset
    offset = network.offset + (
        np.maximum(network.bias[constant], 0) @ network.output_table[constant]
    ).reshape(network.offset.shape)
    rows = np.linalg.norm(network.weight[live], axis=1)
    output = network.output_table[live] * rows[:, None]
    skip = network.skip - (planes[back, :-1].T @ output[back]).reshape(network.skip.shape)
    offset = offset - (planes[back, -1] @ output[back]).reshape(offset.shape)
    planes, output = merge_planes(planes, output)
    size = np.abs(output).max(axis=1, initial=0.0)
    kept = size > MERGE_TOLERANCE * size.max(initial=0.0)
    answer = network.output.shape[1:]
    return ReluNetwork(
        planes[kept, :-1], planes[kept, -1], output[kept].reshape(-1, *answer), skip, offset
    )


def orient_planes(network: ReluNetwork) -> tuple[Float[Array, "live e"], Array, Array]:
    """Hyperplanes (weight, bias) of unit rows whose first clear entry is positive, of the neurons
    that have weights; which neurons those are; and which of these were turned around."""
    rows = np.linalg.norm(network.weight, axis=1)
    live = rows > 0
    planes = np.column_stack([network.weight, network.bias])[live] / rows[live, None]
    clear = 1e-6  # entry of a unit row that decides which way the row points
    first = np.argmax(np.abs(planes[:, :-1]) > clear, axis=1)
    back = planes[np.arange(len(planes)), first] < 0
    planes[back] *= -1
    return planes, live, back


def merge_planes(planes: Float[Array, "m e"], output: Float[Array, "m k"]) -> tuple[Array, Array]:
    """Hyperplanes that coincide, once, with the sum of their outputs."""
    kept: list[int] = []
    output = output.copy()
    for j in range(len(planes)):
        if kept:
            gaps = np.linalg.norm(planes[kept] - planes[j], axis=1)
            near = int(np.argmin(gaps))
            if gaps[near] <= MERGE_TOLERANCE * (1 + np.linalg.norm(planes[j])):
                output[kept[near]] += output[j]
                continue
        kept.append(j)
    return planes[kept], output[kept]


def match_planes(a: Float[Array, "m e"], b: Float[Array, "n e"]) -> tuple[Array, Array]:
    """Which hyperplane of `a` is which of `b`: least total squared distance."""
    square = (a**2).sum(axis=1)[:, None] + (b**2).sum(axis=1) - 2 * a @ b.T
    rows, columns = linear_sum_assignment(np.maximum(square, 0))
    return rows, columns


def gradient_jumps(network: ReluNetwork) -> Float[Array, "m e k"]:
    """output_j (weight_j, bias_j): what a neuron changes at its hyperplane."""
    planes = np.column_stack([network.weight, network.bias])
    return np.asarray(planes[:, :, None] * network.output_table[:, None, :])


@distance.register
def _(a: TransformerModel, b: Any) -> float:
    if not isinstance(b, TransformerModel):
        raise incomparable(a, b)
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
    """Of what a residual connection adds, neurons matched by their oriented hyperplanes."""
    first, second = orient_mixed(a), orient_mixed(b)
    if len(first[0]) != len(second[0]):
        return float("inf")
    rows, columns = match_planes(first[0], second[0])
    size = float(np.linalg.norm(second[1]))
    gap = float(np.linalg.norm(first[1][rows] - second[1][columns]))
    skip = float(np.linalg.norm(first[2] - second[2]))
    own = float(np.linalg.norm(second[2]))
    return max(relative(gap, size), relative(skip, max(own, size)))


def orient_mixed(model: TransformerModel) -> tuple[Array, Array, Array]:
    """Oriented hyperplanes, output_j mixed_weight_j and the mixed skip; neurons without weight
    are left out."""
    if model.mixed_weight is None or model.mixed_skip is None:
        raise InvalidArgument("the layer has no residual connection")
    planes, live, back = orient_planes(model.network)
    output = model.network.output_table[live]
    mixed = model.mixed_weight[live, :, None] * output[:, None, :]
    skip = model.mixed_skip.reshape(model.width, -1) + mixed[back].sum(axis=0)
    mixed[back] *= -1
    return planes, mixed, skip


def scale_free(network: Mlp) -> bool:
    """Whether rows of `inner` have no scale of their own."""
    return network.gated or network.activation == "relu"


def plain_mlp(network: Mlp) -> Mlp:
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
    network = only(network, size > MERGE_TOLERANCE * size.max(initial=0.0))
    if scale_free(network) and network.neurons:
        whole = np.column_stack([network.inner, network.inner_bias])
        network = scaled(network, 1.0 / np.linalg.norm(whole, axis=1))
    return network


def aligned_mlp(a: Mlp, b: Mlp) -> Mlp:
    """`a` with its neurons in the order of `b`'s, turned and signed alike. Both in plain form, with
    as many neurons."""
    first, second = mlp_arguments(a), mlp_arguments(b)
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


def mlp_arguments(network: Mlp) -> Float[Array, "m e"]:
    if network.gate is not None and network.gate_bias is not None:
        return np.column_stack([network.gate, network.gate_bias])
    return np.column_stack([network.inner, network.inner_bias])


@distance.register
def _(a: Mlp, b: Any) -> float:
    if not isinstance(b, Mlp):
        raise InvalidArgument(f"cannot compare Mlp with {type(b).__name__}")
    if a.width != b.width or a.outputs != b.outputs or a.gated != b.gated:
        return float("inf")
    first, second = plain_mlp(a), plain_mlp(b)
    if first.activation != second.activation or first.neurons != second.neurons:
        return float("inf")
    first = aligned_mlp(first, second)
    worst, mine, theirs = 0.0, first.to_arrays(), second.to_arrays()
    rows = float(np.linalg.norm(mlp_arguments(second)))
    through = float(np.linalg.norm(outer_table(second) @ second.inner))
    scale = {"inner_bias": rows, "gate_bias": rows, "linear": through, "offset": through}
    for name, array in theirs.items():
        gap = float(np.linalg.norm(mine[name] - array))
        own = float(np.linalg.norm(array))
        if array.size:
            worst = max(worst, relative(gap, max(own, scale.get(name, 0.0))))
    return worst


@distance.register
def _(a: Block, b: Any) -> float:
    if not isinstance(b, Block):
        raise incomparable(a, b)
    structure = [(m.width, m.norm, m.kind, m.parallel, m.mlp is None, m.attention is None)
                 for m in (a, b)]  # fmt: skip
    if structure[0] != structure[1]:
        return float("inf")
    first, second = canonical_block(a), canonical_block(b)
    worst = 0.0
    for part in ("attention", "mlp"):
        if getattr(first, part) is not None:
            worst = max(worst, distance(getattr(first, part), getattr(second, part)))
    for norm, other in zip(first.norms, second.norms, strict=True):
        worst = max(worst, norm_distance(norm, other))
    return worst


@distance.register
def _(a: Stack, b: Any) -> float:
    if not isinstance(b, Stack):
        raise incomparable(a, b)
    kinds = [
        # a single block answers at the last position only: the mask does not show
        (len(m.blocks), m.causal and len(m.blocks) > 1, m.final_norm and m.final_norm.kind,
         None if m.positions is None else m.positions.shape)
        for m in (a, b)
    ]  # fmt: skip
    if kinds[0] != kinds[1]:
        return float("inf")
    first, second = canonical_stack(a), canonical_stack(b)
    pairs = zip(first.blocks, second.blocks, strict=True)
    worst = max(distance(one, other) for one, other in pairs)
    if first.positions is not None and second.positions is not None:
        gap = float(np.linalg.norm(first.positions - second.positions))
        worst = max(worst, relative(gap, float(np.linalg.norm(second.positions))))
    if a.final_norm is not None and b.final_norm is not None:
        worst = max(worst, norm_distance(a.final_norm, b.final_norm))
    return worst


def canonical_stack(stack: Stack) -> Stack:
    """The representative of all stacks that are the same function, up to the symmetries inside its
    blocks. Where all blocks are pre-norm with LayerNorms, no norm sees the mean of the stream: of
    the means of all constants only the sum shows, and the last block's last part has it; positions
    have none on average. Behind a final LayerNorm no mean shows at all."""
    if any(block.norm != "pre" or block.kind != "layer" for block in stack.blocks):
        return stack
    hidden = stack.final_norm is not None and stack.final_norm.kind == "layer"
    total, positions = 0.0, stack.positions
    if positions is not None:
        total += float(positions.mean())
        positions = positions - positions.mean(axis=1 if hidden else None, keepdims=True)
    blocks = []
    for block in map(canonical_block, stack.blocks):
        total += float(sum(part.offset.mean() for part in block.parts))
        blocks.append(without_means(block, hidden))
    if not hidden:
        last = blocks[-1]
        if last.mlp is not None:
            mlp = with_parts(last.mlp, offset=last.mlp.offset + total)
            blocks[-1] = with_sublayers(last, last.attention, mlp)
        elif last.attention is not None:
            attention = Attention(last.attention.heads, last.attention.offset + total)
            blocks[-1] = with_sublayers(last, attention, None)
    return Stack(blocks, stack.final_norm, causal=stack.causal, positions=positions)


def norm_distance(norm: Norm, other: Norm) -> float:
    """Gain and bias relative to the gain, epsilon relative to itself."""
    size = float(np.linalg.norm(other.gain))
    return max(
        relative(float(np.linalg.norm(norm.gain - other.gain)), size),
        relative(float(np.linalg.norm(norm.bias - other.bias)), size),
        relative(abs(norm.epsilon - other.epsilon), other.epsilon),
    )


def without_means(block: Block, hidden: bool) -> Block:
    """The block whose parts add no constant mean to the stream; no mean at all where a norm at the
    end hides it."""
    attention, mlp = block.attention, block.mlp
    if attention is not None:
        heads = [Head(h.score_factors or h.score, h.key_bias,
                      h.value - hidden * h.value.mean(axis=1, keepdims=True))
                 for h in attention.heads]  # fmt: skip
        attention = Attention(heads, attention.offset - attention.offset.mean())
    if mlp is not None:
        outer = outer_table(mlp)
        mlp = with_parts(
            mlp,
            offset=mlp.offset - mlp.offset.mean(),
            outer=outer - hidden * outer.mean(axis=0),
            linear=mlp.linear - hidden * mlp.linear.mean(axis=0),
        )
    return with_sublayers(block, attention, mlp)


def with_sublayers(block: Block, attention: Attention | None, mlp: Mlp | None) -> Block:
    """The same norms around other parts."""
    return with_norms(block, attention, mlp, block.norms)


def with_norms(
    block: Block, attention: Attention | None, mlp: Mlp | None, norms: Sequence[Norm]
) -> Block:
    """A block of the same order and kind with other parts and norms."""
    return Block(
        attention,
        mlp,
        norm=block.norm,
        kind=block.kind,
        epsilons=[norm.epsilon for norm in norms],
        gain=np.array([norm.gain for norm in norms]) if norms else None,
        bias=np.array([norm.bias for norm in norms]) if norms else None,
        parallel=block.parallel,
    )


def canonical_block(block: Block) -> Block:
    """The representative of all blocks that are the same function, up to the symmetries of its
    attention and its network.

    A norm in front of a map gives its gain and bias to that map, which is then zero on what the
    norm forgets. What is added to a stream that only a norm reads loses its mean. Between two
    norms, the first has bias zero (the network's offset takes it) and a gain of root mean square
    one (the network's maps and the second epsilon take the scale). Where attention and network
    both add a constant to one stream and a norm does not see its mean, the network has it all;
    in a parallel block it has the whole constant.
    """
    plane = np.eye(block.width) if not block.norms else block.norms[0].plane
    flat = plane @ plane.T
    if block.norm == "pre":
        return canonical_pre(block, flat)
    return canonical_post(block, flat) if block.norm == "post" else block


def canonical_pre(block: Block, flat: Float[Array, "d d"]) -> Block:
    """Gains and biases of the norms in the maps behind them; `flat` projects onto what a norm
    sees."""
    attention, mlp, norms = block.attention, block.mlp, block.norms
    if attention is not None:
        attention = attention_behind(attention, norms[0], flat)
    if mlp is not None:
        mlp = mlp_behind(mlp, norms[-1], flat)
    if attention is not None and mlp is not None:
        unseen = np.eye(block.width) - flat
        moved = attention.offset if block.parallel else attention.offset @ unseen
        attention = Attention(attention.heads, attention.offset - moved)
        mlp = with_parts(mlp, offset=mlp.offset + moved)
    plain = [Norm(np.ones(block.width), None, norm.epsilon, norm.kind) for norm in norms]
    return with_norms(block, attention, mlp, plain)


def canonical_post(block: Block, flat: Float[Array, "d d"]) -> Block:
    """What is added loses the mean that the norm forgets; between two norms the first has no bias
    and a gain of root mean square one."""
    attention, mlp, norms = block.attention, block.mlp, block.norms
    if attention is not None:
        heads = [Head(h.score_factors or h.score, h.key_bias, h.value @ flat)
                 for h in attention.heads]  # fmt: skip
        attention = Attention(heads, attention.offset @ flat)
    if mlp is not None and attention is not None:
        first, second = norms
        scale = float(np.sqrt(np.mean(first.gain**2)))
        gain = first.gain / scale
        seen = mlp_behind(mlp, first, flat)
        # behind the first norm the network sees its direction; the maps are divided by the gain
        # again, because the block applies it
        mlp = with_parts(
            seen,
            inner=seen.inner / gain,
            linear=flat @ seen.linear / gain / scale,
            outer=flat @ outer_table(seen) / scale,
            offset=flat @ (seen.offset + first.bias) / scale,
            **({} if seen.gate is None else {"gate": seen.gate / gain}),
        )
        norms = (
            Norm(gain, None, first.epsilon, first.kind),
            Norm(second.gain, second.bias, second.epsilon / scale**2, second.kind),
        )
    elif mlp is not None:
        mlp = with_parts(
            mlp,
            linear=flat @ mlp.linear,
            outer=flat @ outer_table(mlp),
            offset=flat @ mlp.offset,
        )
    return with_norms(block, attention, mlp, norms)


def attention_behind(layer: Attention, norm: Norm, flat: Float[Array, "d d"]) -> Attention:
    """The layer that does with normalised tokens what this one does behind gain and bias."""
    heads, offset = [], np.array(layer.offset)
    read = flat * norm.gain  # rows: gain, then what the norm forgets is left out
    for head in layer.heads:
        key = head.keys(norm.bias[None])[0]
        score: Any = read @ head.score @ read.T
        if head.score_factors is not None:
            score = (read @ head.score_factors.left, head.score_factors.right @ read.T)
        heads.append(Head(score, read @ key, read @ head.value))
        offset += norm.bias @ head.value
    return Attention(heads, offset)


def mlp_behind(network: Mlp, norm: Norm, flat: Float[Array, "d d"]) -> Mlp:
    """The network that does with a normalised input what this one does behind gain and bias."""
    read = norm.gain[:, None] * flat
    parts: dict[str, Any] = {
        "inner": network.inner @ read,
        "inner_bias": network.inner_bias + network.inner @ norm.bias,
        "linear": network.linear @ read,
        "offset": network.offset + network.linear @ norm.bias,
    }
    if network.gate is not None and network.gate_bias is not None:
        parts["gate"] = network.gate @ read
        parts["gate_bias"] = network.gate_bias + network.gate @ norm.bias
    return with_parts(network, **parts)


# -- Language models -----------------------------------------------------------------------------


@distance.register
def _(a: OutputLayer, b: Any) -> float:
    """Up to a linear map: root mean square of the sines of the principal angles between the spaces
    of all answers. Where both are known up to a rotation: the relative error of the matrix after
    the best rotation, or that of the offset if that is larger."""
    if not isinstance(b, OutputLayer):
        raise incomparable(a, b)
    if a.tokens != b.tokens:
        return float("inf")
    first, second = (_output_columns(one, a.shifted or b.shifted) for one in (a, b))
    if "space" in (a.level, b.level):
        return space_distance(_span(np.column_stack(first)), _span(np.column_stack(second)))
    return gram_distance(*first, *second)


def _output_columns(layer: OutputLayer, shifted: bool) -> tuple[Array, Array]:
    """The matrix for states of length one, and the offset."""
    matrix = np.asarray(layer.matrix, dtype=np.float64) * np.sqrt(layer.width)
    offset = np.asarray(layer.offset, dtype=np.float64)
    if shifted:
        return matrix - matrix.mean(axis=0), offset - offset.mean()
    return matrix, offset


def _span(columns: Float[Array, "V k"]) -> Float[Array, "V r"]:
    """An orthonormal basis of what the columns span."""
    sizes = np.linalg.norm(columns, axis=0)
    columns = columns[:, sizes > 0] / sizes[sizes > 0]
    left, singular, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(left[:, singular > 1e-9 * singular.max(initial=TINY)])


def space_distance(a: Float[Array, "V r"], b: Float[Array, "V s"]) -> float:
    """Root mean square sine of the principal angles between two orthonormal bases; infinite where
    their dimensions differ."""
    if a.shape != b.shape:
        return float("inf")
    return float(np.linalg.norm(a - b @ (b.T @ a)) / np.sqrt(max(a.shape[1], 1)))


def gram_distance(
    matrix: Float[Array, "V h"],
    offset: Float[Array, " V"],
    other: Float[Array, "V k"],
    other_offset: Float[Array, " V"],
) -> float:
    """Relative error of the matrix after the best rotation, or of the offset."""
    width = max(matrix.shape[1], other.shape[1])
    mine, theirs = (np.pad(m, ((0, 0), (0, width - m.shape[1]))) for m in (matrix, other))
    left, _, right = np.linalg.svd(mine.T @ theirs)
    scale = float(np.linalg.norm(theirs))
    worst = relative(float(np.linalg.norm(mine @ (left @ right) - theirs)), scale)
    size = float(np.linalg.norm(other_offset)) or scale / np.sqrt(width)
    return max(worst, relative(float(np.linalg.norm(offset - other_offset)), size))


@distance.register
def _(a: TokenAttention, b: Any) -> float:
    if not isinstance(b, TokenAttention):
        raise incomparable(a, b)
    if a.tokens != b.tokens or len(a.heads) != len(b.heads):
        return float("inf")
    first, second = canonical_tables(a), canonical_tables(b)
    sizes = np.array([[np.linalg.norm(part) for part in head] for head in second[1]])
    sizes = np.where(sizes > 0, sizes, sizes.max(initial=0.0) or 1.0)
    cost = np.array(
        [
            [
                max(np.linalg.norm(mine[k] - theirs[k]) / size[k] for k in range(2))
                for theirs, size in zip(second[1], sizes, strict=True)
            ]
            for mine in first[1]
        ]
    )
    rows, columns = linear_sum_assignment(cost) if len(a.heads) else ([], [])
    gap = float(np.linalg.norm(first[0] - second[0]))
    return max([relative(gap, float(np.linalg.norm(second[0]))), *map(float, cost[rows, columns])])


def canonical_tables(model: TokenAttention) -> tuple[Array, list[tuple[Array, Array]]]:
    """The direct table and every head's (qk, ov), multiplied out: `ov` sums to zero over the
    tokens that are seen, each row of `qk` over those that are scored."""
    direct, heads = np.asarray(model.direct), []
    for head in model.heads:
        qk, ov = np.asarray(head.qk), np.asarray(head.ov)
        direct = direct + ov.mean(axis=0)
        heads.append((qk - qk.mean(axis=1, keepdims=True), ov - ov.mean(axis=0)))
    return direct, heads
