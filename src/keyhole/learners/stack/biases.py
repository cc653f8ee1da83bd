"""What each sublayer adds to every token.

Statement.  c_1 of a single token is known but for the constants in the streams that the heads of
            block l (B_l) and its neurons (C_l) read, and is linear in them. B_1 = 0, C_l - B_l is
            the offset of attention l, B_(l+1) - C_l that of network l; the sum of all is in c_0. A
            LayerNorm sees no mean: of the means only that sum is known, and the last network has
            it. Where the box adds vectors to its tokens, B_1 is that of the first place; those of
            other places differ from it in the limit (positions.py).
Queries.    None: single tokens were asked already.
Algebra.    Linear least squares in (2 L - 1) k unknowns. For one block passed L times, F, G, O and
            N what all passes of the heads, the neurons, the attention's offset and both offsets
            add, θ = (L - 1) / 2L and ψ = (L + 1) / 2L:
            c_1 = DF Π θ (F + G + N) + DG Π (ψ F + θ (G + N)) + DG Π O / L.
Fails.      Where a block has neither heads nor neurons that change with their input.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.block import Unclear
from keyhole.learners.stack.neurons import slopes_of
from keyhole.learners.stack.order import Order, couple_heads, project
from keyhole.learners.stack.scores import WideHead
from keyhole.learners.stack.shallow import Shallow, Terms
from keyhole.models.mlp import outer_table


def find_offsets(
    shallow: Shallow, heads: tuple[WideHead, ...], order: Order, alone: Terms
) -> tuple[Float[Array, "l d"], Float[Array, "l d"], Float[Array, " d"]]:
    """Offsets of attention and of networks, block by block, and the vector of the first place, zero
    where there are none."""
    if order.repeated > 1:
        if shallow.positions:
            raise Unclear("one block that is passed again behind positions is not solved")
        return *find_shared_offsets(shallow, heads, order, alone), np.zeros(len(shallow.plane))
    points, network, layers = alone.anchors, order.network, order.layers
    plane = shallow.plane
    outputs, width = plane.shape
    outer = outer_table(network)
    added, slopes = couple_heads(heads, alone.context, points)
    hidden, bends = network.hidden(points), slopes_of(network, points)
    into = project(points, outputs) @ plane.T  # Π Eᵀ
    stream = np.zeros((len(points), outputs))
    known = np.zeros_like(stream)
    columns: list[Array] = []
    for layer in range(layers):
        own = order.heads == layer
        slope = slopes[:, own].sum(axis=1)
        known += np.einsum("ndk,nke,ne->nd", slope, into, stream)
        if layer or shallow.positions:
            columns.append(slope @ project(points, outputs))
        stream = stream + added[:, own].sum(axis=1)
        mine = order.neurons == layer
        bend = np.einsum("dm,nmk->ndk", outer[:, mine], bends[:, mine])
        known += np.einsum("ndk,nke,ne->nd", bend, into, stream)
        columns.append(bend @ project(points, outputs))
        stream = stream + hidden[:, mine] @ outer[:, mine].T
    seen = shallow.second_terms(alone, stream + network.offset)
    found = solve_shown(shallow, points, np.concatenate(columns, axis=2), seen - known)
    steps = np.diff(found.reshape(-1, width), axis=0, prepend=np.zeros((1, width)))
    inside = steps @ plane.T  # in the order (first place,) attention, network, attention, ...
    first, inside = np.split(inside, [1 if shallow.positions else 0])
    attention, networks = inside[0::2], np.zeros((layers, outputs))
    networks[:-1] = inside[1::2]
    networks[-1] = network.offset - inside.sum(axis=0) - first.sum(axis=0)
    return attention, networks, first.sum(axis=0)


def solve_shown(
    shallow: Shallow,
    points: Float[Array, "n k"],
    table: Float[Array, "n d unknowns"],
    right: Float[Array, "n d"],
) -> Float[Array, " unknowns"]:
    """Least squares with what a norm at the end shows of the equations at these points."""
    table = shallow.show(points, table).reshape(right.size, -1)
    found, *_ = np.linalg.lstsq(table, shallow.show(points, right).ravel(), rcond=None)
    return np.asarray(found)


def find_shared_offsets(
    shallow: Shallow, heads: tuple[WideHead, ...], order: Order, alone: Terms
) -> tuple[Float[Array, "1 d"], Float[Array, "1 d"]]:
    """Offsets of all passes together, of attention and of the network."""
    points, network, passes = alone.anchors, order.network, order.repeated
    plane = shallow.plane
    outer = outer_table(network)
    added, slopes = couple_heads(heads, alone.context, points)
    seen = project(points, len(plane))
    bend = np.einsum("dm,nmk->ndk", outer, slopes_of(network, points))
    before, after = (passes - 1) / (2 * passes), (passes + 1) / (2 * passes)
    attended, behind = added.sum(axis=1), network.hidden(points) @ outer.T + network.offset
    first = np.einsum("nkc,nc->nk", seen, before * (attended + behind) @ plane)
    second = np.einsum("nkc,nc->nk", seen, (after * attended + before * behind) @ plane)
    known = np.einsum("ndk,nk->nd", slopes.sum(axis=1), first)
    known += np.einsum("ndk,nk->nd", bend, second)
    told = shallow.second_terms(alone, attended + behind)
    found = solve_shown(shallow, points, bend @ seen / passes, told - known)
    attention = (plane @ found)[None]
    return attention, network.offset - attention
