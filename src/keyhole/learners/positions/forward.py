"""A layer with positions as a forward model: its answers and their derivative, as products.

Algebra.    y = offset + sum_h xbar_h A_h B_h, xbar_h = sum_i w_hi x_i; the weights are a softmax of
            scores that are bilinear in keys K_h [x; 1] and queries Q_h [a; 1], with e^(A_h D) of
            the distance D between them and what places add. `push` is the derivative, `pull` and
            `gather` its adjoint: each costs about as much as the answers. Pairs that turn are a
            choice of coordinates in which A_h consists of turns (`find_pairs`, `turn_pairs`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.linalg import block_diag

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float, Int
from keyhole.linalg.softmax import softmax
from keyhole.models.attention import Attention, Head
from keyhole.models.position import Position

Parts = dict[str, Array]


@dataclass(frozen=True, eq=False)
class Answered:
    """Sequences of which tokens stand at the same distances before their anchors, the last of the
    tokens; other places hold what no head attends to.

    errors: standard error of the numbers in each answer. lasts: the places of the anchors. liked:
    the token that each head attends to, where attention was seen to be hard: such answers tell
    values, and vectors of places, alone.
    """

    tokens: Float[Array, "n m d"]
    distances: Int[Array, " m"]
    answers: Float[Array, "n D"]
    errors: Float[Array, " n"]
    lasts: Int[Array, " n"]
    liked: Int[Array, " heads"] | None = None

    @property
    def places(self) -> Int[Array, "n m"]:
        return np.asarray(self.lasts[:, None] - self.distances)

    def take(self, rows: Int[Array, " k"]) -> "Answered":
        """Some of the queries."""
        return replace(
            self,
            tokens=self.tokens[rows],
            answers=self.answers[rows],
            errors=self.errors[rows],
            lasts=self.lasts[rows],
        )


def join_alike(groups: Sequence[Answered]) -> list[Answered]:
    """The same queries, those of the same distances in one group."""
    alike: dict[tuple[bytes, bytes], list[Answered]] = {}
    for group in groups:
        liked = b"" if group.liked is None else np.asarray(group.liked).tobytes()
        key = np.asarray(group.distances, dtype=np.int64).tobytes(), liked
        alike.setdefault(key, []).append(group)
    return [
        Answered(
            np.concatenate([group.tokens for group in some]),
            some[0].distances,
            np.concatenate([group.answers for group in some]),
            np.concatenate([group.errors for group in some]),
            np.concatenate([group.lasts for group in some]),
            some[0].liked,
        )
        for some in alike.values()
    ]


@dataclass(frozen=True, eq=False)
class PlacedLayer:
    """The unknowns of a layer as arrays by name, and what is known of it.

    parts: `keys` and `queries` (heads, p, d + 1), `ins` (heads, d, r), `outs` (heads, r, D),
    `offset` (D,); and of these as many as there are: `turns` (heads, t, t), the generators of what
    turns the first t rows of the keys by one place; `table` (heads, distances), `slopes` (heads,),
    `vectors` (places, d). held: names of parts that are known.

    Of what turns, the last row is the constant key of one, and queries have nothing there: the last
    row of the turns is how what the biases of the keys add to scores grows with the distance. That
    is what answers show of biases: in slow pairs not these, nor what they add at no distance.
    """

    parts: Parts
    held: frozenset[str] = frozenset()

    @property
    def turning(self) -> int:
        """Rows of the keys that turn, the constant one among them."""
        return self.parts["turns"].shape[1] if "turns" in self.parts else 0

    @property
    def free(self) -> Parts:
        return {
            name: part
            for name, part in self.parts.items()
            if name not in self.held or name == "turns"
        }

    @property
    def masks(self) -> Parts:
        """Which entries are unknown (one, else zero), of parts in which some are known."""
        if "turns" not in self.parts:
            return {}
        masks = {name: np.ones_like(self.parts[name]) for name in ("keys", "queries", "turns")}
        last = self.turning - 1
        masks["keys"][:, :last, -1] = masks["keys"][:, last] = masks["queries"][:, last] = 0.0
        masks["turns"][:, :, last] = 0.0
        if "turns" in self.held:
            masks["turns"][:, :last] = 0.0
        return {name: mask for name, mask in masks.items() if name in self.free}

    def with_parts(self, parts: Mapping[str, Array]) -> "PlacedLayer":
        return replace(self, parts={**self.parts, **parts})


@dataclass(frozen=True, eq=False)
class Turns:
    """e^(A D) of the generators of all heads, at the distances of a group.

    values, vectors, inverse: of the generators. quotients: of the exponentials' differences by
    those of the values, with which the derivative is a product of entries.
    """

    powers: Float[Array, "h m t t"]
    vectors: Array
    inverse: Array
    quotients: Array

    @classmethod
    def of(cls, generators: Float[Array, "h t t"], distances: Int[Array, " m"]) -> "Turns":
        values, vectors = np.linalg.eig(generators)
        values, vectors = values.astype(complex), vectors.astype(complex)
        inverse = np.linalg.inv(vectors)
        far = distances.astype(float)[:, None]
        grown = np.exp(values[:, None] * far)  # (h, m, t)
        gaps = values[:, :, None] - values[:, None]
        equal = np.abs(gaps) <= UNIT_ROUNDOFF * np.abs(values).max(initial=TINY)
        ratio = np.expm1(gaps[:, None] * far[..., None]) / np.where(equal, 1.0, gaps)[:, None]
        ratio = np.where(equal[:, None], far[..., None], ratio)
        powers = (vectors[:, None] * grown[:, :, None]) @ inverse[:, None]
        return cls(powers.real, vectors, inverse, ratio * grown[:, :, None])

    def push(self, change: Float[Array, "h t t"]) -> Float[Array, "h m t t"]:
        """The change of the powers with the generators."""
        inner = self.inverse @ change @ self.vectors
        found = self.vectors[:, None] @ (self.quotients * inner[:, None]) @ self.inverse[:, None]
        return np.asarray(found.real)

    def pull(self, change: Float[Array, "h m t t"]) -> Float[Array, "h t t"]:
        """The adjoint."""
        left, right = np.swapaxes(self.vectors, 1, 2), np.swapaxes(self.inverse, 1, 2)
        inner = (self.quotients * (left[:, None] @ change @ right[:, None])).sum(axis=1)
        return np.asarray((right @ inner @ left).real)

    def astype(self, dtype: type) -> "Turns":
        """Powers in another precision; slow turns have vectors that need all digits."""
        return replace(self, powers=self.powers.astype(dtype))


@dataclass(frozen=True, eq=False)
class Seen:
    """What a layer computes on its way to the answers of one group."""

    group: Answered
    placed: Float[Array, "n m d"]
    with_one: Float[Array, "n m e"]
    keys: Float[Array, "n m h p"]
    queries: Float[Array, "n h p"]
    turned: Float[Array, "n m h p"]  # queries turned by the distances, as keys meet them
    weights: Float[Array, "n m h"]
    means: Float[Array, "n h d"]
    inner: Float[Array, "n h r"]
    answers: Float[Array, "n D"]
    turns: Turns | None

    @property
    def is_hard(self) -> bool:
        """Whether every head attends to one token."""
        return self.group.liked is not None

    @property
    def powers(self) -> Sequence[Array]:
        """The turns of every head at all distances; none where nothing turns."""
        return () if self.turns is None else tuple(self.turns.powers)

    def astype(self, dtype: type) -> "Seen":
        """The same in another precision, for products."""
        cast: dict[str, Any] = {
            name: getattr(self, name).astype(dtype)
            for name in (
                "placed",
                "with_one",
                "keys",
                "queries",
                "turned",
                "weights",
                "means",
                "inner",
                "answers",
            )
        }
        return replace(self, **cast, turns=None if self.turns is None else self.turns.astype(dtype))


def turn(
    queries: Float[Array, "n h p"], powers: Sequence[Array], length: int
) -> Float[Array, "n m h p"]:
    """Queries as the keys at every distance meet them: scores are sums over the products."""
    turned = np.repeat(queries[:, None], length, axis=1)
    for h, own in enumerate(powers):
        size = own.shape[2]
        flat = queries[:, h, :size] @ own.reshape(-1, size).T
        turned[:, :, h, :size] = flat.reshape(len(queries), -1, size)
    return turned


def turn_back(turned: Float[Array, "n m h p"], powers: Sequence[Array]) -> Float[Array, "n h p"]:
    """The adjoint of `turn`, by the queries."""
    back = turned.sum(axis=1)
    for h, own in enumerate(powers):
        size = own.shape[2]
        flat = turned[:, :, h, :size].reshape(len(turned), -1)
        back[:, h, :size] = flat @ own.reshape(-1, size)
    return np.asarray(back)


def compute(layer: PlacedLayer, group: Answered) -> Seen:
    """The answers of a layer, and everything that its derivative needs."""
    parts, placed = layer.parts, group.tokens
    if "vectors" in parts:
        placed = placed + parts["vectors"][group.places]
    with_one = np.concatenate([placed, np.ones((*placed.shape[:2], 1))], axis=2)
    keys = apply_heads(with_one, parts["keys"])
    queries = apply_heads(with_one[:, -1], parts["queries"])
    turns = Turns.of(parts["turns"], group.distances) if "turns" in parts else None
    turned = turn(queries, () if turns is None else tuple(turns.powers), placed.shape[1])
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
    return Seen(
        group, placed, with_one, keys, queries, turned, weights, means, inner, answers, turns
    )


def apply_heads(
    tokens: Float[Array, "*n e"], rows: Float[Array, "h p e"]
) -> Float[Array, "*n h p"]:
    flat = tokens.reshape(-1, tokens.shape[-1]) @ rows.reshape(-1, rows.shape[2]).T
    return flat.reshape(*tokens.shape[:-1], *rows.shape[:2])


def push(layer: PlacedLayer, seen: Seen, change: Parts) -> Float[Array, "n D"]:
    """How the answers of a group change with the parts."""
    parts, group = layer.parts, seen.group
    scores = np.zeros_like(seen.weights)
    if "keys" in change:
        keys = apply_heads(seen.with_one, change["keys"])
        scores += np.einsum("nmhp,nmhp->nmh", keys, seen.turned)
    queries = np.zeros_like(seen.queries)
    if "queries" in change:
        queries += apply_heads(seen.with_one[:, -1], change["queries"])
    if "vectors" in change:
        vectors, places = change["vectors"], group.places
        keys = apply_heads(vectors, parts["keys"][..., :-1])[places]
        scores += np.einsum("nmhp,nmhp->nmh", keys, seen.turned)
        queries += apply_heads(vectors, parts["queries"][..., :-1])[group.lasts]
    length = seen.keys.shape[1]
    turned = turn(queries, seen.powers, length)
    if "turns" in change and seen.turns is not None:
        powers = tuple(seen.turns.push(change["turns"]).astype(seen.keys.dtype))
        turned[..., : layer.turning] += turn(seen.queries[..., : layer.turning], powers, length)
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
        means += np.matmul(np.swapaxes(seen.weights, 1, 2), vectors[places])
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
    turned: Float[Array, "n m h p"]
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
    return Pulled(inner, scores, keys, turn_back(turned, seen.powers), turned, answers)


def gather(layer: PlacedLayer, seen: Seen, pulled: Pulled, names: Sequence[str]) -> Parts:
    """The adjoint of `push`."""
    parts, group, found = layer.parts, seen.group, Parts()
    if "keys" in names:
        found["keys"] = np.tensordot(pulled.keys, seen.with_one, axes=((0, 1), (0, 1)))
    if "queries" in names:
        found["queries"] = np.tensordot(pulled.queries, seen.with_one[:, -1], axes=(0, 0))
    if "turns" in names and seen.turns is not None:
        size = layer.turning
        met = [
            (
                pulled.turned[:, :, h, :size].reshape(len(group.tokens), -1).T
                @ seen.queries[:, h, :size]
            )
            for h in range(len(parts["keys"]))
        ]
        powers = np.array(met).reshape(len(met), -1, size, size)
        found["turns"] = seen.turns.pull(powers).astype(powers.dtype)
    if "table" in names:
        table = np.zeros_like(parts["table"])
        columns = np.minimum(group.distances, table.shape[1] - 1)
        np.add.at(table.T, columns, pulled.scores.sum(axis=0))
        found["table"] = table
    if "slopes" in names:
        found["slopes"] = -np.einsum("nmh,m->h", pulled.scores, group.distances)
    if "vectors" in names:
        vectors = np.zeros_like(parts["vectors"])
        reached = pull_tokens(layer, seen, pulled)
        lasts, which = np.unique(group.lasts, return_inverse=True)
        for number, last in enumerate(lasts):  # places of one sequence differ
            vectors[last - group.distances] += reached[which == number].sum(axis=0)
        found["vectors"] = vectors
    if "ins" in names:
        found["ins"] = np.einsum("nhd,nhr->hdr", seen.means, pulled.inner, optimize=True)
    if "outs" in names:
        found["outs"] = np.tensordot(seen.inner, pulled.answers, axes=(0, 0))
    if "offset" in names:
        found["offset"] = pulled.answers.sum(axis=0)
    return found


def pull_tokens(layer: PlacedLayer, seen: Seen, pulled: Pulled) -> Float[Array, "n m d"]:
    """What reaches the tokens, and so the vectors of their places."""
    parts = layer.parts
    means = np.einsum("nhr,hdr->nhd", pulled.inner, parts["ins"], optimize=True)
    moved = np.matmul(seen.weights, means)
    moved += np.tensordot(pulled.keys, parts["keys"][..., :-1], axes=((2, 3), (0, 1)))
    moved[:, -1] += np.tensordot(pulled.queries, parts["queries"][..., :-1], axes=((1, 2), (0, 1)))
    return np.asarray(moved)


def count_freedom(layer: PlacedLayer) -> int:
    """Unknowns less those that no answer can show."""
    parts, heads = layer.parts, len(layer.parts["keys"])
    free = sum(part.size for part in layer.free.values())
    free -= int(sum((1.0 - mask).sum() for mask in layer.masks.values()))
    if "keys" in layer.free:
        still, turning = parts["keys"].shape[1] - layer.turning, max(0, layer.turning - 1)
        gauge = turning if "turns" in layer.held else turning**2
        free -= heads * (gauge + still**2 + still)  # and the biases of keys that do not turn
    if "ins" in layer.free:
        free -= heads * parts["ins"].shape[2] ** 2
    if "vectors" in layer.free:
        free -= parts["vectors"].shape[1]
    if "table" in layer.free:
        free -= heads
    return free


def differentiate_scores(layer: PlacedLayer, seen: Seen, head: int) -> Float[Array, "k u"]:
    """The derivative of the answers by keys, queries and turns of a head, in an orthonormal basis
    of what the head adds."""
    parts, size = layer.parts, layer.turning
    root = np.linalg.qr(parts["outs"][head].T)[1]  # (r, r)
    inner = seen.placed @ parts["ins"][head]  # (n, m, r)
    off = inner - seen.inner[:, None, head]
    errors = seen.group.errors[:, None, None]
    mixed = np.swapaxes(seen.weights[:, :, head, None] * (off @ root.T) / errors, 1, 2)  # (n, r, m)
    turned, keys = seen.turned[:, :, head], seen.keys[:, :, head]
    count, length = turned.shape[:2]
    met = keys.copy()
    if seen.turns is not None:
        powers = seen.turns.powers[head]
        met[..., :size] = np.einsum("nmp,mpq->nmq", keys[..., :size], powers)
    by_key = (mixed[:, :, None] * np.swapaxes(turned, 1, 2)[:, None]).reshape(count, -1, length)
    by_query = (mixed @ met)[..., None] * seen.with_one[:, -1][:, None, None]
    shape = *mixed.shape[:2], -1
    blocks = [(by_key @ seen.with_one).reshape(shape), by_query.reshape(shape)]
    if seen.turns is not None and "turns" in layer.free:
        left, right = seen.turns.vectors[head], seen.turns.inverse[head]
        outer = (keys[..., :size] @ left)[..., None] * (seen.queries[:, head, :size] @ right.T)[
            :, None, None
        ]
        outer = outer * seen.turns.quotients[head]
        found = (mixed @ outer.reshape(count, length, -1)).reshape(*mixed.shape[:2], size, size)
        blocks.append((right.T @ found @ left.T).real.reshape(shape).astype(mixed.dtype))
    both = np.concatenate(blocks, axis=2)
    return np.asarray(both.reshape(-1, both.shape[2]))


# -- From and to models ------------------------------------------------------------------------


def to_layer(model: Attention, ins: Sequence[Array], outs: Sequence[Array]) -> PlacedLayer:
    """The unknowns of a layer whose value maps are products ins @ outs."""
    position, width = model.position or Position(), model.width
    size = 0 if position.keys is None else position.keys.shape[1]
    still, turning = ins[0].shape[1] - size, 0 if position.keys is None else size + 1
    keys = np.zeros((len(model.heads), turning + still, width + 1))
    queries = np.zeros_like(keys)
    parts = {
        "keys": keys,
        "queries": queries,
        "ins": np.array(ins),
        "outs": np.array(outs),
        "offset": np.array(model.offset),
    }
    if position.keys is not None:
        assert position.queries is not None
        assert position.frequencies is not None
        keys[:, :size, :-1], queries[:, :size] = position.keys[..., :-1], position.queries
        queries[:, 1:size:2] *= -1.0
        keys[:, size, -1] = 1.0
        turns = np.zeros((len(keys), turning, turning))
        turns[:, :size, :size] = generate(position.frequencies)
        turns[:, size, :size] = position.keys[..., -1] @ generate(position.frequencies)
        parts["turns"] = turns
    for number, head in enumerate(model.heads):
        u, s, vt = np.linalg.svd(np.column_stack([head.score, head.key_bias]))
        root = np.sqrt(s[:still])
        keys[number, turning:, :-1] = (u[:, :still] * root).T
        queries[number, turning:] = root[:, None] * vt[:still]
    added = {"table": position.bias, "slopes": position.slopes, "vectors": position.vectors}
    parts.update({name: np.array(part) for name, part in added.items() if part is not None})
    return PlacedLayer(parts)


def generate(frequencies: Float[Array, " n"]) -> Float[Array, "t t"]:
    """The generator of pairs that turn by these frequencies."""
    return np.asarray(block_diag(*([[0.0, f], [-f, 0.0]] for f in frequencies)))


def find_pairs(layer: PlacedLayer) -> tuple[PlacedLayer, Array]:
    """The layer in coordinates in which the turns are those of pairs, the fastest first, and their
    rates (heads, pairs), growth + i frequency."""
    parts, size = layer.parts, layer.turning - 1
    keys, queries, turns = parts["keys"].copy(), parts["queries"].copy(), parts["turns"].copy()
    rates = np.zeros((len(turns), size // 2), complex)
    for h, own in enumerate(turns):
        basis, rates[h] = find_basis(own[:size, :size])
        keys[h, :size] = basis.T @ keys[h, :size]
        queries[h, :size] = np.linalg.solve(basis, queries[h, :size])
        own[size, :size] = own[size, :size] @ basis
        own[:size, :size] = np.linalg.solve(basis, own[:size, :size] @ basis)
    return layer.with_parts({"keys": keys, "queries": queries, "turns": turns}), rates


def find_basis(turns: Float[Array, "t t"]) -> tuple[Float[Array, "t t"], Array]:
    """Two columns for each pair, the fastest first, and the rates of the pairs. Of those so slow
    that answers do not show how they turn any columns will do: keys and queries follow."""
    values, vectors = np.linalg.eig(turns)
    order = [k for k in np.argsort(-values.imag) if values[k].imag > 0.0]
    still = np.flatnonzero(values.imag == 0.0)
    basis = np.empty(turns.shape)
    seen = 2 * len(order)
    basis[:, :seen:2], basis[:, 1:seen:2] = vectors[:, order].real, vectors[:, order].imag
    basis[:, seen:] = np.linalg.qr(vectors[:, still].real)[0]
    slow = values[still].real.reshape(-1, 2)[:, :1].ravel()
    return basis, np.concatenate([values[order], slow])


def turn_pairs(layer: PlacedLayer, frequencies: Float[Array, " n"]) -> PlacedLayer:
    """The layer with pairs that turn by these frequencies in all heads, and only turn; its
    coordinates stay."""
    turns, size = layer.parts["turns"].copy(), layer.turning - 1
    for own in turns:
        basis = find_basis(own[:size, :size])[0]
        own[:size, :size] = np.linalg.solve(basis.T, (basis @ generate(frequencies)).T).T
    return replace(layer.with_parts({"turns": turns}), held=layer.held | {"turns"})


def name_pairs(layer: PlacedLayer) -> PlacedLayer:
    """A layer whose turns are held, in coordinates of its pairs; any other as it is."""
    if "turns" not in layer.held:
        return layer
    paired, rates = find_pairs(layer)
    turns, size = paired.parts["turns"].copy(), layer.turning - 1
    turns[:, :size, :size] = [generate(own.imag) for own in rates]
    return paired.with_parts({"turns": turns})


def name_keys(layer: PlacedLayer) -> Float[Array, "h p e"]:
    """Keys of pairs with their biases."""
    turns, size = layer.parts["turns"], layer.turning - 1
    keys = layer.parts["keys"][:, :size].copy()
    grown = np.swapaxes(turns[:, size:, :size], 1, 2)
    keys[..., -1] = np.linalg.solve(np.swapaxes(turns[:, :size, :size], 1, 2), grown)[..., 0]
    return keys


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


def anchor_vectors(layer: PlacedLayer) -> PlacedLayer:
    """The same layer with a first vector of zero: what all vectors share belongs to the biases."""
    parts = layer.parts
    if "vectors" not in parts:
        return layer
    first, queries = parts["vectors"][0], parts["queries"].copy()
    queries[..., -1] += queries[..., :-1] @ first
    return layer.with_parts(
        {
            "vectors": parts["vectors"] - first,
            "queries": queries,
            "offset": parts["offset"] + first @ multiply_values(layer).sum(axis=0),
        }
    )


def to_model(layer: PlacedLayer, like: Position | None) -> Attention:
    """The layer as a model, with what else is known of its positions."""
    layer = anchor_vectors(layer)
    parts, turning = layer.parts, layer.turning
    scores, values = multiply_scores(layer), multiply_values(layer)
    heads = []
    for number, value in enumerate(values):
        left = parts["keys"][number, turning:, :-1].T
        right = parts["queries"][number, turning:, :-1]
        score = (left, right) if left.shape[1] else np.zeros((model_width(layer),) * 2)
        heads.append(Head(score, scores[number, :, -1], value))
    return Attention(heads, parts["offset"], None, place(layer, like))


def model_width(layer: PlacedLayer) -> int:
    return int(layer.parts["ins"].shape[1])


def place(layer: PlacedLayer, like: Position | None) -> Position | None:
    if like is None:
        return None
    parts, turning = layer.parts, layer.turning
    found = like
    if turning:
        queries = parts["queries"][:, : turning - 1].copy()
        queries[:, 1::2] *= -1.0
        frequencies = parts["turns"][0].diagonal(1)[: turning - 1 : 2]
        found = replace(found, frequencies=frequencies, keys=name_keys(layer), queries=queries)
    if "table" in parts:
        found = replace(found, bias=center_table(layer))
    if "slopes" in parts:
        found = replace(found, slopes=parts["slopes"])
    if "vectors" in parts:
        found = replace(found, vectors=parts["vectors"])
    return found
