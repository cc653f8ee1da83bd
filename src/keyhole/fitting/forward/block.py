"""A block, or a sublayer of one, as matrices applied to vectors, and its products with steps.

Statement.  Every parameter of a block but gains, a last bias and the epsilons sits in a matrix W
            that is applied to something, W [x, 1], the last column being the bias. The derivative
            of an answer by W is an outer product: of what a change of the result does to the
            answer, and of what W reads.
Queries.    None.
Algebra.    One pass in double precision keeps what both products need (`Tape`); these may then be
            taken in single precision. Forwards (`push`) a step of all parameters becomes a change
            of the answers. Backwards (`pull`) a change of the answers becomes, per query, what
            reaches the result of every matrix; the transpose of the Jacobian sums the outer
            products of that with what the matrix reads. All heads share one matrix on the query's
            side and one behind the values, whatever their ranks.
            Coordinates are those of what the norms keep. The matrices:
              read     (R, k+1)  queries of all heads      left{h}   (k, r)    keys of one head
              value{h} (v, k)    values of one head        out       (o, V+1)  of all heads
              inner, gate (m, k+1), outer (o, m+1)         the network
              skip (o, k+1)                                its linear part, where it has its own
            and the vectors epsilons (their logarithms), gain, last_gain, last_bias.
When it fails. Nowhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.linalg.softmax import softmax
from keyhole.models.mlp import ACTIVATIONS
from keyhole.models.norm import kept_plane

Parts = dict[str, Array]


@dataclass(frozen=True)
class Form:
    """What is not fitted: the ranks of the scores and values of every head (none: a network alone)
    and the activation (None: attention alone).

    apart: the network's linear part is a matrix of its own, `skip`, and its neurons bend without
    one, φ(a) - slope a / 2. The functions are the same, and where neurons hardly bend, what they
    add to the linear part does not hide how they bend.
    """

    norm: str
    kind: str
    width: int
    score_ranks: tuple[int, ...]
    value_ranks: tuple[int, ...]
    activation: str | None
    gated: bool = False
    parallel: bool = False
    apart: bool = False

    @property
    def heads(self) -> int:
        return len(self.score_ranks)

    @property
    def whole(self) -> bool:
        """Attention and a network."""
        return self.heads > 0 and self.activation is not None

    @property
    def plane(self) -> Float[Array, "d k"]:
        return kept_plane(self.width, self.kind)

    def slices(self, ranks: Sequence[int]) -> list[slice]:
        """Of every head among all of them."""
        return [slice(int(low), int(high)) for low, high in pairwise(np.cumsum([0, *ranks]))]


@dataclass(frozen=True, eq=False)
class Norming:
    """n = x / sqrt(mean x^2 + epsilon), and what a change of x does to it."""

    value: Float[Array, "*n k"]
    scale: Float[Array, "*n 1"]
    width: int

    @classmethod
    def of(cls, x: Float[Array, "*n k"], log_epsilon: float, width: int) -> "Norming":
        square = np.sum(x * x, axis=-1, keepdims=True) / width
        # nothing at all, and no epsilon that shows: the direction is zero, as it is with epsilon
        scale = 1.0 / np.sqrt(np.maximum(square + np.exp(log_epsilon), 1e-300))
        return cls(x * scale, scale, width)

    def push(self, move: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """What a change of x does to n; this matrix is symmetric."""
        along = np.sum(self.value * move, axis=1, keepdims=True) / self.width
        return np.asarray((move - along * self.value) * self.scale)

    def slope(self, log_epsilon: float) -> Float[Array, "*n k"]:
        """The derivative of n by the logarithm of epsilon; exact for one so small that no
        difference of answers would show it."""
        return np.asarray(-0.5 * np.exp(log_epsilon) * self.scale**2 * self.value)


def with_one(x: Float[Array, "n k"]) -> Float[Array, "n k+1"]:
    return np.concatenate([x, np.ones((len(x), 1), x.dtype)], axis=1)


@dataclass(frozen=True, eq=False)
class Tape:
    """One pass through a block for queries of one length; everything that products need again.

    Tokens that only fill a query up have no weight. Gates: of every matrix before the activation,
    what its result does to the hidden numbers.
    """

    form: Form
    parts: Parts
    plane: Float[Array, "d k"]
    seen: Float[Array, "n length e"]
    weights: Float[Array, "n length heads"]
    read: Float[Array, "n ranks"]
    means: Float[Array, "heads rows numbers"]
    reads: dict[str, Array]
    gates: dict[str, Array]
    first: Norming | None
    last: Norming | None
    answers: Float[Array, "n d"]
    epsilons: Float[Array, "n d norms"]

    @property
    def alone(self) -> bool:
        """Single tokens: no score shows."""
        return self.seen.shape[1] == 1

    def astype(self, dtype: Any) -> "Tape":
        """The same pass in another precision."""
        return replace(self, **{part.name: _cast(getattr(self, part.name), dtype)
                                for part in fields(self)})  # fmt: skip

    # -- forwards ----------------------------------------------------------------------------

    def push(self, moves: Parts) -> Float[Array, "n d"]:
        """The change of the answers for a step of all parameters."""
        form, parts, pre = self.form, self.parts, self.form.norm == "pre"
        stream = self._push_heads(moves) if form.heads else None
        turn = None
        if form.whole:
            assert self.first is not None
            assert stream is not None
            if pre:
                turn = None if form.parallel else self.first.push(stream @ self.plane)
            else:
                turn = self.first.push(stream)
                x = self.reads["inner"][:, :-1]
                stream = moves["gain"] * (x @ self.plane.T) + parts["gain"] * (turn @ self.plane.T)
                stream = stream @ self.plane
        if form.activation is not None:
            added = self._push_network(moves, turn)
            stream = added if stream is None else stream + added
        assert stream is not None
        if not pre:
            assert self.last is not None
            stream = parts["last_gain"] * (self.last.push(stream) @ self.plane.T)
            stream = stream + moves["last_gain"] * (self.last.value @ self.plane.T)
            stream = stream + moves["last_bias"]
        return np.asarray(stream + self.epsilons @ moves["epsilons"])

    def _push_heads(self, moves: Parts) -> Float[Array, "n o"]:
        form, parts = self.form, self.parts
        inside = np.empty((len(self.answers), sum(form.value_ranks)), self.answers.dtype)
        change: Array | None = None
        if not self.alone:
            read, keys = self.reads["read"] @ moves["read"].T, []
            for h, some in enumerate(form.slices(form.score_ranks)):
                moved = self.read[:, some] @ moves[f"left{h}"].T
                keys.append(moved + read[:, some] @ parts[f"left{h}"].T)
            scores = self.seen @ np.stack(keys, axis=2)
            scores -= np.sum(self.weights * scores, axis=1, keepdims=True)
            change = (self.weights * scores).transpose(0, 2, 1) @ self.seen
        for h, some in enumerate(form.slices(form.value_ranks)):
            inside[:, some] = self.means[h] @ moves[f"value{h}"].T
            if change is not None:
                inside[:, some] += change[:, h] @ parts[f"value{h}"].T
        return np.asarray(inside @ parts["out"][:, :-1].T + self.reads["out"] @ moves["out"].T)

    def _push_network(self, moves: Parts, turn: Array | None) -> Float[Array, "n o"]:
        hidden: Array | None = None
        for name, gate in self.gates.items():
            move = self.reads["inner"] @ moves[name].T
            if turn is not None:
                move += turn @ self.parts[name][:, :-1].T
            move *= gate
            hidden = move if hidden is None else hidden + move
        assert hidden is not None
        stream = hidden @ self.parts["outer"][:, :-1].T
        if self.form.apart:
            stream += self.reads["skip"] @ moves["skip"].T
            if turn is not None:
                stream += turn @ self.parts["skip"][:, :-1].T
        return np.asarray(stream + self.reads["outer"] @ moves["outer"].T)

    # -- backwards ---------------------------------------------------------------------------

    def pull(self, vector: Float[Array, "n d"]) -> Parts:
        """What reaches the result of every matrix, per query; of vectors their own derivatives."""
        form, parts, pre = self.form, self.parts, self.form.norm == "pre"
        found: Parts = {"epsilons": (vector[:, None] @ self.epsilons)[:, 0]}
        stream = vector
        if not pre:
            assert self.last is not None
            found["last_bias"] = vector
            found["last_gain"] = vector * (self.last.value @ self.plane.T)
            stream = self.last.push((parts["last_gain"] * vector) @ self.plane)
        turn = None
        if form.activation is not None:
            found["outer"] = stream
            hidden = stream @ parts["outer"][:, :-1]
            for name, gate in self.gates.items():
                found[name] = hidden * gate
                if form.heads:
                    moved = found[name] @ parts[name][:, :-1]
                    turn = moved if turn is None else turn + moved
            if form.apart:
                found["skip"] = stream
                turn = None if turn is None else turn + stream @ parts["skip"][:, :-1]
        if form.whole:
            assert self.first is not None
            assert turn is not None
            if pre:
                if not form.parallel:
                    stream = stream + self.first.push(turn) @ self.plane.T
            else:
                wide = stream @ self.plane.T
                found["gain"] = wide * (self.reads["inner"][:, :-1] @ self.plane.T)
                stream = self.first.push(turn + (parts["gain"] * wide) @ self.plane)
        if form.heads:
            found |= self._pull_heads(stream)
        return found

    def _pull_heads(self, stream: Float[Array, "n o"]) -> Parts:
        form, parts = self.form, self.parts
        found: Parts = {"out": stream}
        inside = stream @ parts["out"][:, :-1]
        moved = []
        for h, some in enumerate(form.slices(form.value_ranks)):
            found[f"value{h}"] = inside[:, some]
            if not self.alone:
                moved.append(inside[:, some] @ parts[f"value{h}"])
        if self.alone:
            return found
        scores = self.seen @ np.stack(moved, axis=2)
        scores -= np.sum(self.weights * scores, axis=1, keepdims=True)
        keys = (self.weights * scores).transpose(0, 2, 1) @ self.seen
        read = np.empty_like(self.read)
        for h, some in enumerate(form.slices(form.score_ranks)):
            found[f"left{h}"] = np.ascontiguousarray(keys[:, h])
            read[:, some] = keys[:, h] @ parts[f"left{h}"]
        found["read"] = read
        return found


def _cast(part: Any, dtype: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part.astype(dtype)
    if isinstance(part, dict):
        return {name: _cast(one, dtype) for name, one in part.items()}
    if isinstance(part, Norming):
        return Norming(part.value.astype(dtype), part.scale.astype(dtype), part.width)
    return part


def run_block(
    form: Form, parts: Parts, tokens: Float[Array, "n length d"], real: Array | None = None
) -> Tape:
    """One pass. `real`: which tokens are any (n, length); None for all of them."""
    plane, epsilons, pre = form.plane, parts["epsilons"], form.norm == "pre"
    seen, moved = tokens, None
    if pre and form.heads:
        normed = Norming.of(tokens @ plane, epsilons[0], form.width)
        seen, moved = normed.value, normed.slope(epsilons[0])
    end = tokens[:, -1]
    stream, columns = (end if pre else end @ plane), list[Array]()
    reads: Parts = {}
    weights, read, means = np.zeros((len(end), 1, 0)), np.zeros((len(end), 0)), np.zeros((0, 1, 1))
    if form.heads:
        reads["read"] = with_one(seen[:, -1])
        read = reads["read"] @ parts["read"].T
        weights, means = _attend(form, parts, seen, read, real)
        inside = [means[h] @ parts[f"value{h}"].T for h in range(form.heads)]
        reads["out"] = with_one(np.concatenate(inside, axis=1))
        for h, some in enumerate(form.slices(form.score_ranks)):
            reads[f"left{h}"], reads[f"value{h}"] = read[:, some], means[h]
        stream = stream + reads["out"] @ parts["out"].T
        if moved is not None:
            columns.append(_move_heads(form, parts, seen, moved, weights, means, read))
    first, gates = None, dict[str, Array]()
    if form.activation is not None:
        x, first = _network_reads(form, parts, end, stream)
        if form.whole and not pre:
            stream = (parts["gain"] * (x @ plane.T)) @ plane
        reads["inner"] = reads["gate"] = with_one(x)
        hidden, gates = _bend(form, parts, reads["inner"])
        reads["outer"] = with_one(hidden)
        stream = stream + reads["outer"] @ parts["outer"].T
        if form.apart:
            reads["skip"] = reads["inner"]
            stream = stream + reads["skip"] @ parts["skip"].T
    last = None if pre else Norming.of(stream, epsilons[-1], form.width)
    answers = stream
    if last is not None:
        answers = parts["last_gain"] * (last.value @ plane.T) + parts["last_bias"]
    if not form.gated:
        reads.pop("gate", None)
    tape = Tape(form, parts, plane, seen, weights, read, means, reads, gates, first, last,
                answers, np.zeros((*answers.shape, len(epsilons))))  # fmt: skip
    return replace(tape, epsilons=_by_epsilons(tape, columns))


def _attend(
    form: Form, parts: Parts, seen: Array, read: Array, real: Array | None
) -> tuple[Float[Array, "n length heads"], Float[Array, "heads n k"]]:
    """Attention weights of all heads, and their mean tokens."""
    if seen.shape[1] == 1:
        means = np.broadcast_to(seen[:, 0], (form.heads, len(seen), seen.shape[2]))
        return np.ones((len(seen), 1, form.heads)), means
    keys = [read[:, some] @ parts[f"left{h}"].T
            for h, some in enumerate(form.slices(form.score_ranks))]  # fmt: skip
    scores = seen @ np.stack(keys, axis=2)
    if real is not None:
        scores = np.where(real[:, :, None], scores, -np.inf)
    weights = softmax(scores, axis=1)
    means = weights.transpose(0, 2, 1) @ seen
    return weights, np.ascontiguousarray(means.transpose(1, 0, 2))


def _network_reads(
    form: Form, parts: Parts, end: Array, stream: Array
) -> tuple[Float[Array, "n k"], Norming | None]:
    """What the network reads, and the norm in front of it where there is one."""
    if not form.heads and form.norm == "post":
        return end, None
    if form.norm == "post":
        first = Norming.of(stream, parts["epsilons"][0], form.width)
    else:
        read = end if form.parallel else stream
        first = Norming.of(read @ form.plane, parts["epsilons"][-1], form.width)
    return first.value, first


def _bend(form: Form, parts: Parts, x: Float[Array, "n k"]) -> tuple[Array, dict[str, Array]]:
    """The hidden numbers, and their derivatives by what the matrices before them give."""
    assert form.activation is not None
    phi, linear = ACTIVATIONS[form.activation], x @ parts["inner"].T
    if not form.gated:
        half = 0.5 * phi.slope if form.apart else 0.0
        return phi.value(linear) - half * linear, {"inner": phi.first(linear) - half}
    bent = x @ parts["gate"].T
    value = phi.value(bent)
    return value * linear, {"inner": value, "gate": phi.first(bent) * linear}


def _move_heads(
    form: Form, parts: Parts, seen: Array, moved: Array, weights: Array, means: Array, read: Array
) -> Float[Array, "n o"]:
    """What the heads add, differentiated by the logarithm of the epsilon in front of them."""
    total: Array = np.zeros(1)
    turned = moved[:, -1] @ parts["read"][:, :-1].T
    places = zip(form.slices(form.score_ranks), form.slices(form.value_ranks), strict=True)
    for h, (some, inside) in enumerate(places):
        left, weight = parts[f"left{h}"], weights[:, :, h]
        key, pushed = read[:, some] @ left.T, turned[:, some] @ left.T
        scores = (moved @ key[:, :, None] + seen @ pushed[:, :, None])[:, :, 0]
        scores = weight * (scores - np.sum(weight * scores, axis=1, keepdims=True))
        change = ((weight[:, None] @ moved) + (scores[:, None] @ seen))[:, 0]
        total = total + change @ parts[f"value{h}"].T @ parts["out"][:, :-1][:, inside].T
    return np.asarray(total)


def _by_epsilons(tape: Tape, columns: list[Array]) -> Float[Array, "n d e"]:
    """Derivatives by the logarithms of the epsilons; `columns`: what the heads add for the one in
    front of them."""
    form, parts, plane, epsilons = tape.form, tape.parts, tape.plane, tape.parts["epsilons"]
    still = {name: np.zeros_like(part) for name, part in parts.items()}
    found = []
    if form.norm == "pre":
        if form.heads:
            (added,) = columns
            turn = None
            if form.whole and not form.parallel:
                assert tape.first is not None
                turn = tape.first.push(added @ plane)
            found.append(added if turn is None else added + tape._push_network(still, turn))
        if tape.first is not None:
            found.append(tape._push_network(still, tape.first.slope(epsilons[-1])))
        return np.stack(found, axis=2)
    assert tape.last is not None
    if form.whole:
        assert tape.first is not None
        turn = tape.first.slope(epsilons[0])
        stream = (parts["gain"] * (turn @ plane.T)) @ plane + tape._push_network(still, turn)
        found.append(tape.last.push(stream))
    found.append(tape.last.slope(epsilons[-1]))
    return np.stack([parts["last_gain"] * (one @ plane.T) for one in found], axis=2)


# -- Queries of many lengths -------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """Queries filled up in front to one length, which of their tokens are real, and answers."""

    tokens: Float[Array, "n length k"]
    real: Array | None
    answers: Float[Array, "n d"]


def pad_queries(pairs: Sequence[tuple[Array, Array]], most: int = 256) -> Iterator[Batch]:
    """All queries, those of lengths within a factor of two filled up to one, so many at a time:
    what a product needs then stays near the processor."""
    groups: dict[int, list[tuple[Array, Array]]] = {}
    for tokens, answers in pairs:
        if len(tokens):
            groups.setdefault((tokens.shape[1] - 1).bit_length(), []).append((tokens, answers))
    for _, members in sorted(groups.items()):
        length = max(tokens.shape[1] for tokens, _ in members)
        filled = [np.pad(tokens, ((0, 0), (length - tokens.shape[1], 0), (0, 0)))
                  for tokens, _ in members]  # fmt: skip
        there = [np.broadcast_to(np.arange(length) >= length - tokens.shape[1],
                                 (len(tokens), length)) for tokens, _ in members]  # fmt: skip
        tokens, real = np.concatenate(filled), np.concatenate(there)
        answers = np.concatenate([answer for _, answer in members])
        for start in range(0, len(tokens), most):
            some = slice(start, start + most)
            whole = bool(real[some].all())
            yield Batch(tokens[some], None if whole else real[some], answers[some])
