"""Which head and which neuron belongs to which block.

Statement.  The second term of the series tells who reads whom: with f_b what head b adds, g_j what
            neuron j adds, Π = I - z zᵀ / d, and a context against its anchor alone,
              c_1(Z) - c_1([z]) = Σ ψ_jb D g_j [Π (f_b(Z) - f_b(z))] + Σ θ_ba Δ(D f_a [Π f_b])
                                  + Σ_a ΔD f_a [Π (Σ_j (1 - ψ_ja) g_j + β_a)],
            linear in ψ_jb (one if neuron j reads head b, zero if head b reads neuron j), θ_ba (one
            if head a reads head b) and β_a (constants in the stream that head a reads; what a place
            adds is one of them, and all contexts then have one length).
Queries.    Those of heads.py and scores.py, and contexts at random anchors until there are half as
            many numbers more than unknowns.
Algebra.    One linear least squares. A neuron that is turned the other way leaves outer_j inner_jᵀ
            in the linear part of the wide layer: fewer neurons than that has entries are turned
            first, Σ_j s_j outer_j inner_jᵀ, s_j one or zero. More of them add an unknown linear map
            per head, what the turned neurons among those that read it leave; the difference of two
            blocks' maps is that sum over the neurons of one block. Behind a norm at the end all
            equations lack their parts along z, and the linear part is known up to a multiple of
            the identity, which is one unknown more. The certificate: ψ, θ and s come
            out as zero or one, and are the order of blocks. All ψ = (L + 1) / 2L and all
            θ = (L - 1) / 2L: one block, passed L times.
Fails.      Where the certificate does: parts that are shared between some blocks, or parts that are
            none of these.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.learners.block import Unclear
from keyhole.learners.stack.heads import softmax_means
from keyhole.learners.stack.neurons import slopes_of
from keyhole.learners.stack.scores import Scores, WideHead
from keyhole.learners.stack.shallow import Shallow, Terms, repeat_terms
from keyhole.models.mlp import ACTIVATIONS, Mlp, outer_table, turned, with_parts


@dataclass(frozen=True)
class OrderOptions:
    """What a person might tune. redundant: numbers per unknown. contexts: at one anchor; tokens: of
    a context. certain: distance from zero or one at which an entry is decided."""

    redundant: float = 1.5
    contexts: int = 3
    tokens: int = 2
    certain: float = 0.1


@dataclass(frozen=True, eq=False)
class Order:
    """Numbers of the blocks of heads and neurons, from zero; the network with its neurons turned;
    how far the entries of the certificate were from zero and one; `repeated`: how often one block
    is passed, whose maps are then those of all passes together."""

    heads: Int[Array, " h"]
    neurons: Int[Array, " m"]
    network: Mlp
    certificate: float
    repeated: int = 1

    @property
    def layers(self) -> int:
        return int(self.heads.max()) + 1


def couple_heads(
    heads: tuple[WideHead, ...],
    context: Float[Array, "n m k"],
    anchors: Float[Array, "n k"],
) -> tuple[Float[Array, "n h d"], Float[Array, "n h d k"]]:
    """What the heads add, and how that changes with the anchor."""
    added, slopes = [], []
    for head in heads:
        keys = head.keys(anchors)
        weights, tokens = softmax_means(context, anchors, keys)
        means = np.einsum("nt,ntk->nk", weights, tokens)
        # a moved anchor changes all scores through the key, and its own by itself
        through = tokens @ head.left @ head.right  # (n, t, k): gradients of the scores
        through[:, -1] += keys
        slope = np.einsum("nt,ntk,ntc->nkc", weights, tokens, through, optimize=True)
        slope -= means[:, :, None] * np.einsum("nt,ntc->nc", weights, through)[:, None]
        slope += weights[:, -1, None, None] * np.eye(anchors.shape[1])
        added.append(means @ head.map.T)
        slopes.append(np.einsum("dk,nkc->ndc", head.map, slope))
    return np.stack(added, axis=1), np.stack(slopes, axis=1)


def project(anchors: Float[Array, "n k"], width: int) -> Float[Array, "n k k"]:
    """Π: what a norm of width d sees of a small change of its input."""
    return np.asarray(np.eye(anchors.shape[1]) - anchors[:, :, None] * anchors[:, None, :] / width)


def find_order(
    shallow: Shallow,
    scores: Scores,
    network: Mlp,
    rng: np.random.Generator,
    shift: Float[Array, " d"] | None = None,
    options: OrderOptions | None = None,
) -> tuple[Order, Terms]:
    """The order, and the anchors that were asked alone, or among copies; raises Unclear. `shift`:
    what the place behind a context adds to the answer, more than the first one."""
    options = OrderOptions() if options is None else options
    plane, heads = shallow.plane, scores.heads
    count, neurons, (outputs, width) = len(heads), network.neurons, plane.shape
    network, turnable = turn_by_themselves(network, shallow, options)
    unseen = None if shallow.final is None else plane
    maps = outputs * width if turnable else 0
    unknowns = count * (neurons + maps + count + width)
    pairs = [(scores.asked, scores.alone)]
    missing = int(options.redundant * unknowns / shallow.numbers) - len(scores.asked.anchors)
    # keys at one anchor say nothing of the neurons elsewhere: at least half is asked anew
    missing = max(missing, int(0.75 * unknowns / shallow.numbers))
    places = -(-missing // options.contexts)
    anchors = shallow.points(rng, places)
    repeated = np.repeat(anchors, options.contexts, axis=0)
    tokens = scores.asked.context.shape[1] if shallow.positions else options.tokens
    context = shallow.points(rng, len(repeated), tokens)
    alone = shallow.ask_bare(context[:: options.contexts], anchors, "order")
    asked = shallow.ask(context, repeated, "order")
    pairs.append((asked, repeat_terms(alone, options.contexts)))
    if shift is not None:
        network = with_parts(network, offset=network.offset + shift)
    tables, rights = zip(
        *(write_equations(shallow, heads, network, *pair, turnable) for pair in pairs), strict=True
    )
    table, right = np.concatenate(tables), np.concatenate(rights)
    sizes = np.linalg.norm(table, axis=0)
    sizes = np.where(sizes > 0, sizes, 1.0)
    solution, *_ = np.linalg.lstsq(table / sizes, right, rcond=None)
    solution = solution / sizes
    ends = np.cumsum([neurons * count, count * count, count * width])
    reads, before, _, linear = np.split(solution, ends)
    reads, before = reads.reshape(count, neurons).T, before.reshape(count, count)
    linear = linear.reshape(count, outputs, width) if turnable else np.zeros((count, 0, 0))
    if shift is not None:
        network = with_parts(network, offset=network.offset - shift)
    order = decide_order(reads, before, linear, network, options, unseen)
    if unseen is not None:
        network = with_parts(order.network, linear=np.zeros_like(network.linear))
        order = replace(order, network=network)
    return order, alone


def turn_by_themselves(network: Mlp, shallow: Shallow, options: OrderOptions) -> tuple[Mlp, bool]:
    """The network with its neurons turned where their own linear part shows it, and whether that is
    left to the heads."""
    outputs, width = shallow.plane.shape
    unseen = None if shallow.final is None else shallow.plane
    entries = outputs * width if unseen is None else width**2 - 1
    turnable = ACTIVATIONS[network.activation].slope != 0.0 and network.gate is None
    if turnable and network.neurons < entries:
        everybody = np.ones(network.neurons, dtype=bool)
        try:
            back, _ = decide_sides(network, everybody, network.linear, options, unseen)
        except Unclear:
            pass  # heads tell more of it
        else:
            network, turnable = turned(network, back), False
    if not turnable and unseen is not None:  # all that is left are multiples of the identity
        network = with_parts(network, linear=np.zeros_like(network.linear))
    return network, turnable


def write_equations(
    shallow: Shallow,
    heads: tuple[WideHead, ...],
    network: Mlp,
    asked: Terms,
    alone: Terms,
    turnable: bool,
) -> tuple[Float[Array, "equations unknowns"], Float[Array, " equations"]]:
    """Columns: ψ by head, θ (row a reads column b), β by head, and the linear maps by head."""
    points, plane = asked.anchors, shallow.plane
    outputs, count, total = len(plane), len(heads), len(points)
    seen = project(points, outputs)
    added, slopes = couple_heads(heads, asked.context, points)
    lone, lone_slopes = couple_heads(heads, alone.context, points)
    into = np.einsum("nkc,dc->nkd", seen, plane)  # Π Eᵀ
    read, lone_read = (np.einsum("nkd,nhd->nhk", into, part) for part in (added, lone))
    change = slopes - lone_slopes
    outer = outer_table(network)
    hidden = network.hidden(points)
    bends = slopes_of(network, points)  # (n, m, k)
    pushed = np.einsum("nhdk,nkc->nhdc", change, seen)  # ΔD f_a Π
    single = hidden @ outer.T + points @ network.linear.T + network.offset
    right = shallow.second_terms(asked, single + added.sum(axis=1))
    right = right - shallow.second_terms(alone, single + lone.sum(axis=1))
    columns = []
    for b in range(count):
        forward = np.einsum("nmk,nk->nm", bends, read[:, b] - lone_read[:, b])
        reading = outer[None] * forward[:, None]  # (n, d, m)
        moved = pushed[:, b] @ plane.T  # (n, d, d)
        back = np.einsum("nde,em->ndm", moved, outer) * hidden[:, None]
        columns.append(reading - back)
        right = right - back.sum(axis=2)
        if turnable:
            right = right - np.einsum("nde,ek,nk->nd", moved, network.linear, points)
    for a in range(count):
        for b in range(count):
            one = np.einsum("ndk,nk->nd", slopes[:, a], read[:, b])
            other = np.einsum("ndk,nk->nd", lone_slopes[:, a], lone_read[:, b])
            columns.append((one - other)[:, :, None])
    columns += [pushed[:, a] for a in range(count)]
    if turnable:
        for b in range(count):
            own = np.einsum("de,nk->ndek", np.eye(outputs), read[:, b] - lone_read[:, b])
            moved = pushed[:, b] @ plane.T
            own = own - moved[:, :, :, None] * points[:, None, None, :]
            columns.append(own.reshape(total, outputs, -1))
    table = shallow.show(points, np.concatenate(columns, axis=2))
    return table.reshape(total * outputs, -1), shallow.show(points, right).ravel()


def decide_order(
    reads: Float[Array, "m h"],
    before: Float[Array, "h h"],
    linear: Float[Array, "h d k"],
    network: Mlp,
    options: OrderOptions,
    unseen: Float[Array, "outputs width"] | None = None,
) -> Order:
    """The certificate, read: ψ (neuron, head), θ (row a reads column b), linear maps by head, known
    up to multiples of `unseen`."""
    mean = float(reads.mean())
    passes = round(1.0 / max(2.0 * mean - 1.0, 1e-3))
    shared = max(
        np.abs(reads - (passes + 1) / (2 * passes)).max(),
        np.abs(before - (passes - 1) / (2 * passes)).max(),
    )
    if passes > 1 and shared < min(options.certain, 0.25 / passes**2):
        heads, neurons = (np.zeros(size, dtype=int) for size in reads.shape[::-1])
        everybody = np.ones(len(neurons), bool)
        back, doubt = decide_sides(network, everybody, network.linear, options, unseen)
        return Order(heads, neurons, turned(network, back), max(shared, doubt), passes)
    off = before[~np.eye(len(before), dtype=bool)]
    decided = np.concatenate([reads.ravel(), off])
    doubt = undecided(decided)
    if doubt > options.certain:
        raise Unclear(
            f"heads and neurons have no order: an entry of the certificate is {doubt:.1e} away "
            "from zero and one (parts may be shared between blocks)"
        )
    ahead = np.round(before).clip(0, 1).astype(int) * (1 - np.eye(len(before), dtype=int))
    earlier = ahead.sum(axis=1)
    levels, heads = np.unique(earlier, return_inverse=True)
    if (ahead != (heads[None, :] < heads[:, None])).any():
        raise Unclear("heads have no order: who reads whom is no order of blocks")
    seen = np.round(reads).clip(0, 1).astype(int)
    neurons = np.array([int(heads[row == 1].max(initial=-1)) for row in seen])
    if (neurons < 0).any() or (seen != (heads[None, :] <= neurons[:, None])).any():
        raise Unclear("neurons have no order: some of them read heads of later blocks only")
    if linear.size:
        back = np.zeros(len(neurons), dtype=bool)
        layers = len(levels)
        # the neurons that read the heads of a block are its own and those of later blocks
        behind = [linear[heads == layer].mean(axis=0) for layer in range(layers)]
        behind[0] = network.linear
        behind.append(np.zeros_like(behind[0]))
        for layer in range(layers):
            own = neurons == layer
            part = behind[layer] - behind[layer + 1]
            turn, far = decide_sides(network, own, part, options, unseen)
            back |= turn
            doubt = max(doubt, far)
        network = turned(network, back)
    return Order(heads, neurons, network, doubt)


def undecided(entries: Float[Array, " n"]) -> float:
    """How far the entries are from zero and one."""
    return float(np.abs(entries - np.clip(np.round(entries), 0.0, 1.0)).max())


def decide_sides(
    network: Mlp,
    own: Array,
    linear: Float[Array, "d k"],
    options: OrderOptions,
    unseen: Float[Array, "d k"] | None = None,
) -> tuple[Array, float]:
    """Which of these neurons are turned: linear = -Σ s_j outer_j inner_jᵀ, s_j zero or one, and
    perhaps a multiple of `unseen`."""
    back = np.zeros(len(own), dtype=bool)
    if not ACTIVATIONS[network.activation].slope or network.gate is not None or not own.any():
        return back, 0.0
    outer, inner = outer_table(network)[:, own], network.inner[own]
    table = np.einsum("dj,jk->dkj", outer, inner).reshape(-1, int(own.sum()))
    if unseen is not None:
        table = np.column_stack([table, unseen.ravel()])
    if table.shape[1] > table.shape[0]:
        raise Unclear("a block has more neurons than its linear part tells the sides of")
    share = np.linalg.lstsq(table, -linear.ravel(), rcond=None)[0][: int(own.sum())]
    far = undecided(share)
    if far > options.certain:
        raise Unclear(f"which way neurons are turned was not seen (one is {far:.1e} off)")
    back[np.flatnonzero(own)[np.round(share) == 1.0]] = True
    return back, far
