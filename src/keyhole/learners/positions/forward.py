"""A layer with positions as a forward model: its answers and their derivative, as products.

Algebra.    y = offset + sum_h xbar_h A_h B_h, xbar_h = sum_i w_hi x_i; the weights are a softmax of
            scores that are bilinear in keys K_h [x; 1] and queries Q_h [a; 1], turned in pairs by
            the distance, with what places add. `push` is the derivative, `pull` and `gather` its
            adjoint: each costs about as much as the answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.linalg.softmax import softmax
from keyhole.models.attention import Attention, Head
from keyhole.models.position import Position

Parts = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Answered:
    """Sequences of which tokens stand at the same distances before their anchors, the last of the
    tokens; other places hold what no head attends to.

    errors: standard error of the numbers in each answer. last: the place of the anchors. liked: the
    token that each head attends to, where attention was seen to be hard: such answers tell values
    alone.
    """

    tokens: Float[Array, "n m d"]
    distances: Int[Array, " m"]
    answers: Float[Array, "n D"]
    errors: Float[Array, " n"]
    last: int
    liked: Int[Array, " heads"] | None = None

    @property
    def places(self) -> Int[Array, " m"]:
        return np.asarray(self.last - self.distances)


def join_alike(groups: Sequence[Answered]) -> list[Answered]:
    """The same queries, those of the same distances in one group."""
    alike: dict[tuple[int, bytes, bytes], list[Answered]] = {}
    for group in groups:
        liked = b"" if group.liked is None else np.asarray(group.liked).tobytes()
        key = group.last, np.asarray(group.distances, dtype=np.int64).tobytes(), liked
        alike.setdefault(key, []).append(group)
    return [
        Answered(
            np.concatenate([group.tokens for group in some]),
            some[0].distances,
            np.concatenate([group.answers for group in some]),
            np.concatenate([group.errors for group in some]),
            some[0].last,
            some[0].liked,
        )
        for some in alike.values()
    ]


@dataclass(frozen=True, eq=False)
class PlacedLayer:
    """The unknowns of a layer as arrays by name, and what is known of it.

    parts: `keys` and `queries` (heads, p, d + 1), of which the first 2n rows turn in pairs and the
    others do not; `ins` (heads, d, r), `outs` (heads, r, D), `offset` (D,); and of these as many as
    there are: `table` (heads, distances), `slopes` (heads,), `vectors` (places, d), of which the
    first is zero. frequencies: of the pairs that turn. held: names of parts that are known.
    """

    parts: Parts
    frequencies: Float[Array, " n"]
    held: frozenset[str] = frozenset()

    @property
    def turning(self) -> int:
        """Rows of the keys that turn."""
        return 2 * len(self.frequencies)

    @property
    def free(self) -> Parts:
        return {name: part for name, part in self.parts.items() if name not in self.held}

    def with_parts(self, parts: Mapping[str, Array]) -> "PlacedLayer":
        return replace(self, parts={**self.parts, **parts})


@dataclass(frozen=True, eq=False)
class Seen:
    """What a layer computes on its way to the answers of one group."""

    group: Answered
    placed: Float[Array, "n m d"]
    with_one: Float[Array, "n m e"]
    keys: Float[Array, "n m h p"]
    turned: Float[Array, "n m h p"]  # queries turned by the distances, as keys meet them
    weights: Float[Array, "n m h"]
    means: Float[Array, "n h d"]
    inner: Float[Array, "n h r"]
    answers: Float[Array, "n D"]
    cos: Float[Array, "m k"]
    sin: Float[Array, "m k"]

    @property
    def is_hard(self) -> bool:
        """Whether every head attends to one token."""
        return self.group.liked is not None


def turn_queries(queries: Float[Array, "n h p"], cos: Array, sin: Array) -> Float[Array, "n m h p"]:
    """Queries as the keys at every distance meet them: scores are sums over the products."""
    pairs = 2 * cos.shape[1]
    turned = np.empty((len(queries), len(cos), *queries.shape[1:]), queries.dtype)
    real, imaginary = queries[:, None, :, 0:pairs:2], queries[:, None, :, 1:pairs:2]
    c, s = cos[:, None], sin[:, None]
    turned[..., 0:pairs:2] = c * real - s * imaginary
    turned[..., 1:pairs:2] = -(s * real + c * imaginary)
    turned[..., pairs:] = queries[:, None, :, pairs:]
    return turned


def turn_back(
    turned: Float[Array, "n m h p"], cos: Array, sin: Array, pairs: int
) -> Float[Array, "n h p"]:
    """The adjoint of `turn_queries`."""
    back = np.empty((len(turned), *turned.shape[2:]), turned.dtype)
    real, imaginary = turned[..., 0:pairs:2], turned[..., 1:pairs:2]
    back[..., 0:pairs:2] = np.einsum("nmhk,mk->nhk", real, cos)
    back[..., 0:pairs:2] -= np.einsum("nmhk,mk->nhk", imaginary, sin)
    back[..., 1:pairs:2] = -np.einsum("nmhk,mk->nhk", real, sin)
    back[..., 1:pairs:2] -= np.einsum("nmhk,mk->nhk", imaginary, cos)
    back[..., pairs:] = turned[..., pairs:].sum(axis=1)
    return back


def compute(layer: PlacedLayer, group: Answered) -> Seen:
    """The answers of a layer, and everything that its derivative needs."""
    parts, placed = layer.parts, group.tokens
    if "vectors" in parts:
        placed = placed + parts["vectors"][group.places]
    with_one = np.concatenate([placed, np.ones((*placed.shape[:2], 1))], axis=2)
    angles = np.outer(group.distances, layer.frequencies)
    cos, sin = np.cos(angles), np.sin(angles)
    keys = np.tensordot(with_one, parts["keys"], axes=(2, 2))
    queries = np.tensordot(with_one[:, -1], parts["queries"], axes=(1, 2))
    turned = turn_queries(queries, cos, sin)
    scores = np.einsum("nmhp,nmhp->nmh", keys, turned)
    if "table" in parts:
        table = parts["table"]
        scores += table[:, np.minimum(group.distances, table.shape[1] - 1)].T
    if "slopes" in parts:
        scores -= np.outer(group.distances, parts["slopes"])
    weights = np.moveaxis(softmax(np.moveaxis(scores, 1, 2)), 2, 1)
    if group.liked is not None:
        weights = np.zeros_like(scores)
        weights[:, group.liked, np.arange(scores.shape[2])] = 1.0
    means = np.matmul(np.swapaxes(weights, 1, 2), placed)
    inner = np.einsum("nhd,hdr->nhr", means, parts["ins"], optimize=True)
    answers = np.tensordot(inner, parts["outs"], axes=((1, 2), (0, 1))) + parts["offset"]
    return Seen(group, placed, with_one, keys, turned, weights, means, inner, answers, cos, sin)


def push(layer: PlacedLayer, seen: Seen, change: Parts) -> Float[Array, "n D"]:
    """How the answers of a group change with the parts."""
    parts, group = layer.parts, seen.group
    scores = np.zeros_like(seen.weights)
    if "keys" in change:
        keys = np.tensordot(seen.with_one, change["keys"], axes=(2, 2))
        scores += np.einsum("nmhp,nmhp->nmh", keys, seen.turned)
    queries = np.zeros((len(scores), *parts["queries"].shape[:2]))
    if "queries" in change:
        queries += np.tensordot(seen.with_one[:, -1], change["queries"], axes=(1, 2))
    moved = np.zeros((1, 1, seen.placed.shape[2]))
    if "vectors" in change:
        moved = np.broadcast_to(change["vectors"][group.places], seen.placed.shape)
        keys = np.tensordot(moved, parts["keys"][..., :-1], axes=(2, 2))
        scores += np.einsum("nmhp,nmhp->nmh", keys, seen.turned)
        queries += np.tensordot(moved[:, -1], parts["queries"][..., :-1], axes=(1, 2))
    turned = turn_queries(queries, seen.cos, seen.sin)
    scores += np.einsum("nmhp,nmhp->nmh", seen.keys, turned)
    if "table" in change:
        table = change["table"]
        scores += table[:, np.minimum(group.distances, table.shape[1] - 1)].T
    if "slopes" in change:
        scores -= np.outer(group.distances, change["slopes"])
    weights = seen.weights * scores
    weights -= seen.weights * weights.sum(axis=1, keepdims=True)
    means = np.matmul(np.swapaxes(weights, 1, 2), seen.placed)
    if "vectors" in change:
        means += np.matmul(np.swapaxes(seen.weights, 1, 2), moved)
    inner = np.einsum("nhd,hdr->nhr", means, parts["ins"], optimize=True)
    if "ins" in change:
        inner += np.einsum("nhd,hdr->nhr", seen.means, change["ins"], optimize=True)
    answers = np.tensordot(inner, parts["outs"], axes=((1, 2), (0, 1)))
    if "outs" in change:
        answers += np.tensordot(seen.inner, change["outs"], axes=((1, 2), (0, 1)))
    if "offset" in change:
        answers += change["offset"]
    return np.asarray(answers)


@dataclass(frozen=True, eq=False)
class Pulled:
    """What reaches each part from a change of the answers of one group."""

    inner: Float[Array, "n h r"]
    scores: Float[Array, "n m h"]
    keys: Float[Array, "n m h p"]
    queries: Float[Array, "n h p"]
    answers: Float[Array, "n D"]


def pull(layer: PlacedLayer, seen: Seen, answers: Float[Array, "n D"]) -> Pulled:
    parts = layer.parts
    inner = np.tensordot(answers, parts["outs"], axes=(1, 2))
    means = np.einsum("nhr,hdr->nhd", inner, parts["ins"], optimize=True)
    weights = np.matmul(seen.placed, np.swapaxes(means, 1, 2))
    scores = seen.weights * weights
    scores -= seen.weights * scores.sum(axis=1, keepdims=True)
    keys = scores[..., None] * seen.turned
    turned = scores[..., None] * seen.keys
    queries = turn_back(turned, seen.cos, seen.sin, layer.turning)
    return Pulled(inner, scores, keys, queries, answers)


def gather(layer: PlacedLayer, seen: Seen, pulled: Pulled, names: Sequence[str]) -> Parts:
    """The adjoint of `push`."""
    parts, group, found = layer.parts, seen.group, Parts()
    if "keys" in names:
        found["keys"] = np.tensordot(pulled.keys, seen.with_one, axes=((0, 1), (0, 1)))
    if "queries" in names:
        found["queries"] = np.tensordot(pulled.queries, seen.with_one[:, -1], axes=(0, 0))
    if "table" in names:
        table = np.zeros_like(parts["table"])
        columns = np.minimum(group.distances, table.shape[1] - 1)
        np.add.at(table.T, columns, pulled.scores.sum(axis=0))
        found["table"] = table
    if "slopes" in names:
        found["slopes"] = -np.einsum("nmh,m->h", pulled.scores, group.distances)
    if "vectors" in names:
        means = np.einsum("nhr,hdr->nhd", pulled.inner, parts["ins"], optimize=True)
        moved = np.matmul(seen.weights, means)
        moved += np.tensordot(pulled.keys, parts["keys"][..., :-1], axes=((2, 3), (0, 1)))
        moved[:, -1] += np.tensordot(
            pulled.queries, parts["queries"][..., :-1], axes=((1, 2), (0, 1))
        )
        vectors = np.zeros_like(parts["vectors"])
        np.add.at(vectors, group.places, moved.sum(axis=0))
        vectors[0] = 0.0  # the first vector belongs to the biases
        found["vectors"] = vectors
    if "ins" in names:
        found["ins"] = np.einsum("nhd,nhr->hdr", seen.means, pulled.inner, optimize=True)
    if "outs" in names:
        found["outs"] = np.tensordot(seen.inner, pulled.answers, axes=(0, 0))
    if "offset" in names:
        found["offset"] = pulled.answers.sum(axis=0)
    return found


def count_freedom(layer: PlacedLayer) -> int:
    """Unknowns less those that no answer can show."""
    parts, heads = layer.parts, len(layer.parts["keys"])
    free = sum(part.size for part in layer.free.values())
    if "keys" in layer.free:
        still = parts["keys"].shape[1] - layer.turning
        free -= heads * (
            layer.turning + still**2 + still
        )  # and the biases of keys that do not turn
    if "ins" in layer.free:
        free -= heads * parts["ins"].shape[2] ** 2
    if "vectors" in layer.free:
        free -= parts["vectors"].shape[1]
    if "table" in layer.free:
        free -= heads
    return free


def differentiate_scores(layer: PlacedLayer, seen: Seen, head: int) -> Float[Array, "k u"]:
    """The derivative of the answers by keys and queries of a head, in an orthonormal basis of what
    the head adds."""
    parts = layer.parts
    root = np.linalg.qr(parts["outs"][head].T)[1]  # (r, r)
    inner = seen.placed @ parts["ins"][head]  # (n, m, r)
    off = inner - seen.inner[:, None, head]
    errors = seen.group.errors[:, None, None]
    mixed = np.swapaxes(seen.weights[:, :, head, None] * (off @ root.T) / errors, 1, 2)  # (n, r, m)
    turned, keys = seen.turned[:, :, head], seen.keys[:, :, head]
    by_key = turned[..., None] * seen.with_one[:, :, None]
    count, length = turned.shape[:2]
    rows = mixed @ by_key.reshape(count, length, -1)
    back = np.empty((count, mixed.shape[1], turned.shape[2]))
    for row in range(mixed.shape[1]):
        pulled = mixed[:, row, :, None] * keys
        back[:, row] = turn_back(pulled[:, :, None], seen.cos, seen.sin, layer.turning)[:, 0]
    by_query = back[..., None] * seen.with_one[:, -1][:, None, None]
    both = np.concatenate([rows, by_query.reshape(count, mixed.shape[1], -1)], axis=2)
    return np.asarray(both.reshape(-1, both.shape[2]))


# -- From and to models ------------------------------------------------------------------------


def to_layer(model: Attention, ins: Sequence[Array], outs: Sequence[Array]) -> PlacedLayer:
    """The unknowns of a layer whose value maps are products ins @ outs."""
    position, width = model.position or Position(), model.width
    rank = ins[0].shape[1]
    turning = 0 if position.keys is None else position.keys.shape[1]
    keys = np.zeros((len(model.heads), rank, width + 1))
    queries = np.zeros_like(keys)
    if position.keys is not None and position.queries is not None:
        keys[:, :turning], queries[:, :turning] = position.keys, position.queries
    for number, head in enumerate(model.heads):
        u, s, vt = np.linalg.svd(np.column_stack([head.score, head.key_bias]))
        root = np.sqrt(s[: rank - turning])
        keys[number, turning:, :-1] = (u[:, : rank - turning] * root).T
        queries[number, turning:] = root[:, None] * vt[: rank - turning]
    parts = {
        "keys": keys,
        "queries": queries,
        "ins": np.array(ins),
        "outs": np.array(outs),
        "offset": np.array(model.offset),
    }
    added = {"table": position.bias, "slopes": position.slopes, "vectors": position.vectors}
    parts.update({name: np.array(part) for name, part in added.items() if part is not None})
    frequencies = np.zeros(0) if position.frequencies is None else position.frequencies
    return PlacedLayer(parts, np.asarray(frequencies))


def multiply_scores(layer: PlacedLayer) -> Float[Array, "h d e"]:
    """[W | c] of what does not turn."""
    keys = layer.parts["keys"][:, layer.turning :, :-1]
    return np.asarray(np.swapaxes(keys, 1, 2) @ layer.parts["queries"][:, layer.turning :])


def multiply_values(layer: PlacedLayer) -> Float[Array, "h d D"]:
    return np.asarray(layer.parts["ins"] @ layer.parts["outs"])


def center_table(layer: PlacedLayer) -> Float[Array, "h m"]:
    """What distances add to a score, more than the distance zero does."""
    table = layer.parts["table"]
    return np.asarray(table - table[:, :1])


def to_model(layer: PlacedLayer, like: Attention) -> Attention:
    """The layer as a model, with what else is known of its positions."""
    parts, turning = layer.parts, layer.turning
    scores, values = multiply_scores(layer), multiply_values(layer)
    heads = []
    for number, value in enumerate(values):
        left = parts["keys"][number, turning:, :-1].T
        right = parts["queries"][number, turning:, :-1]
        score = (left, right) if left.shape[1] else np.zeros((model_width(layer),) * 2)
        heads.append(Head(score, scores[number, :, -1], value))
    return Attention(heads, parts["offset"], None, place(layer, like.position))


def model_width(layer: PlacedLayer) -> int:
    return int(layer.parts["ins"].shape[1])


def place(layer: PlacedLayer, like: Position | None) -> Position | None:
    if like is None:
        return None
    parts, turning = layer.parts, layer.turning
    found = like
    if turning:
        keys, queries = parts["keys"][:, :turning], parts["queries"][:, :turning]
        found = replace(found, frequencies=layer.frequencies, keys=keys, queries=queries)
    if "table" in parts:
        found = replace(found, bias=center_table(layer))
    if "slopes" in parts:
        found = replace(found, slopes=parts["slopes"])
    if "vectors" in parts:
        found = replace(found, vectors=parts["vectors"] - parts["vectors"][:1])
    return found
