"""The exact block as a forward model of all its parameters, with its derivatives in factors.

Statement.  The derivative of an answer by a matrix that is applied to something is an outer
            product: of what a change of the result does to the answer (left) and of what is read
            (right).
            All parameters of a block are such matrices, the two epsilons apart, which are pushed
            forwards. Products with the Jacobian and the Jacobian itself are built from these
            factors.
Queries.    None.
Algebra.    The chain rule, backwards from the answer: the last norm, the network, the first norm,
            then values and, by the covariance of the tokens under the weights, scores.
Fails.      Nowhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.gauss_newton import Blocks, Linearization
from keyhole.linalg.softmax import softmax
from keyhole.models.mlp import ACTIVATIONS
from keyhole.models.norm import kept_plane


@dataclass(frozen=True)
class Form:
    """What is not fitted. No heads: a network alone, behind its norm. No activation: attention
    alone."""

    norm: str
    kind: str
    width: int
    heads: int
    activation: str | None
    parallel: bool = False

    @property
    def whole(self) -> bool:
        """Attention and a network."""
        return self.heads > 0 and self.activation is not None

    @property
    def plane(self) -> Float[Array, "d k"]:
        return kept_plane(self.width, self.kind)


@dataclass(frozen=True, eq=False)
class Batch:
    """Queries of one length, their answers, and the answers' standard errors."""

    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n d"]
    errors: Float[Array, " n"]


@dataclass(frozen=True, eq=False)
class Factor:
    """The derivative of answers by a matrix: left[n, :, a] right[n, b]. By a vector: no right."""

    left: Float[Array, "n d a"]
    right: Float[Array, "n b"] | None = None

    @property
    def reads(self) -> Float[Array, "n b"]:
        return np.ones((len(self.left), 1)) if self.right is None else self.right

    def jvp(self, step: Array) -> Float[Array, "n d"]:
        step = step.reshape(self.left.shape[2], -1)
        return np.asarray((self.left @ (self.reads @ step.T)[:, :, None])[:, :, 0])

    def vjp(self, vector: Float[Array, "n d"]) -> Array:
        pulled = (vector[:, None] @ self.left)[:, 0]
        return np.asarray(pulled.T @ self.reads)

    def dense(self) -> Float[Array, "n d ab"]:
        found = self.left[:, :, :, None] * self.reads[:, None, None]
        return np.asarray(found.reshape(*self.left.shape[:2], -1))

    def gram(self, other: "Factor", most: int = 2**23) -> Float[Array, "ab AB"]:
        """The sum over answers of the products of both derivatives, from products of the factors;
        so many numbers of these are kept at a time."""
        (count, _, a), (_, _, c) = self.left.shape, other.left.shape
        b, e = self.reads.shape[1], other.reads.shape[1]
        part = max(1, most // max(a * c, b * e))
        total = np.zeros((a * c, b * e))
        for start in range(0, count, part):
            some = slice(start, start + part)
            lefts = self.left[some].transpose(0, 2, 1) @ other.left[some]
            reads = self.reads[some, :, None] * other.reads[some, None]
            total += lefts.reshape(-1, a * c).T @ reads.reshape(-1, b * e)
        return np.asarray(total.reshape(a, c, b, e).transpose(0, 2, 1, 3).reshape(a * b, c * e))


Parts = dict[str, Array]
Factors = dict[str, Factor]


@dataclass(frozen=True, eq=False)
class Normed:
    """n = x / sqrt(mean x^2 + epsilon) and what a change of x does to it."""

    value: Float[Array, "*n k"]
    scale: Float[Array, "*n 1"]
    width: int

    @classmethod
    def of(cls, x: Float[Array, "*n k"], log_epsilon: float, width: int) -> "Normed":
        square = np.sum(x * x, axis=-1, keepdims=True) / width
        scale = 1.0 / np.sqrt(square + np.exp(log_epsilon))
        return cls(x * scale, scale, width)

    def push(self, move: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """What a change of x does to n; this matrix is symmetric."""
        along = np.sum(self.value * move, axis=1, keepdims=True) * self.value / self.width
        return np.asarray((move - along) * self.scale)

    def pull(self, left: Float[Array, "n d k"]) -> Float[Array, "n d k"]:
        """Derivatives by n become derivatives by x."""
        along = (left @ self.value[:, :, None]) * self.value[:, None] / self.width
        return np.asarray((left - along) * self.scale[:, :, None])

    def slope(self, log_epsilon: float) -> Float[Array, "*n k"]:
        """The derivative of n by the logarithm of epsilon; exact for one so small that no
        difference of answers would show it."""
        return np.asarray(-0.5 * np.exp(log_epsilon) * self.scale**2 * self.value)


def run_block(form: Form, parts: Parts, tokens: Float[Array, "n length d"]) -> Float[Array, "n d"]:
    """Answers."""
    return _Pass(form, parts, tokens).answers


def differentiate_block(
    form: Form, parts: Parts, tokens: Float[Array, "n length d"]
) -> tuple[Float[Array, "n d"], Factors]:
    """Answers and their derivatives by all parameters."""
    done = _Pass(form, parts, tokens)
    factors = done.factors()
    return done.answers, factors


class _Pass:
    """One pass through a block; everything that the derivatives need again is kept."""

    def __init__(self, form: Form, parts: Parts, tokens: Float[Array, "n length d"]) -> None:
        self.form, self.parts, self.plane = form, parts, form.plane
        self.last = tokens[:, -1]
        epsilons = parts["epsilons"]
        if form.norm == "pre":
            normed = Normed.of(tokens @ self.plane, epsilons[0], form.width)
            self.seen, self.moved = normed.value, normed.slope(epsilons[0])
        else:
            self.seen, self.moved = tokens, np.zeros(0)
        self.heads = [self._attend(h) for h in range(form.heads)]
        added = sum((head[3] for head in self.heads), np.zeros(1))
        x, stream = self.last, added + (self.last if form.norm == "pre" else self.last @ self.plane)
        if form.whole and form.norm == "pre":
            stream = stream + self.plane @ parts["offset"]
            read = self.last if form.parallel else stream
            self.read = Normed.of(read @ self.plane, epsilons[1], form.width)
            x = self.read.value
        elif form.whole:
            self.read = Normed.of(stream + parts["offset"], epsilons[0], form.width)
            x = self.read.value
            stream = (parts["gain"] * (x @ self.plane.T)) @ self.plane
        stream = stream + parts["added"]
        if form.activation is not None:
            self.phi = ACTIVATIONS[form.activation]
            self.arguments = x @ parts["inner"].T + parts["inner_bias"]
            self.hidden = self.phi.value(self.arguments)
            stream = stream + self.hidden @ parts["outer"].T
        if form.norm == "pre":
            self.answers = stream
            return
        self.end = Normed.of(stream, epsilons[-1], form.width)
        self.answers = parts["last_gain"] * (self.end.value @ self.plane.T) + parts["last_bias"]

    def _attend(self, h: int) -> tuple[Array, Array, Array, Array]:
        """Weights, the reduced anchor, the mean token and what it adds, of one head."""
        parts, anchor = self.parts, self.seen[:, -1]
        reduced = anchor @ parts[f"right{h}"].T + parts[f"key{h}"]
        key = reduced @ parts[f"left{h}"].T
        weight = softmax((self.seen @ key[:, :, None])[:, :, 0])
        mean = (weight[:, None] @ self.seen)[:, 0]
        return weight, reduced, mean, mean @ parts[f"value{h}"].T @ parts[f"out{h}"].T

    def _move(self, h: int) -> Float[Array, "n d"]:
        """What one head adds, differentiated by the logarithm of the epsilon before it."""
        parts, (weight, reduced, mean, _) = self.parts, self.heads[h]
        key = reduced @ parts[f"left{h}"].T
        turned = self.moved[:, -1] @ parts[f"right{h}"].T @ parts[f"left{h}"].T
        scores = np.einsum("ntk,nk->nt", self.moved, key) + np.einsum(
            "ntk,nk->nt", self.seen - mean[:, None], turned
        )
        scores = weight * (scores - (weight * scores).sum(axis=1, keepdims=True))
        change = np.einsum("nt,ntk->nk", weight, self.moved)
        change += np.einsum("nt,ntk->nk", scores, self.seen)
        return np.asarray(change @ parts[f"value{h}"].T @ parts[f"out{h}"].T)

    def by_epsilons(self) -> Float[Array, "n d e"]:
        """Derivatives by the logarithms of the epsilons, pushed forwards through the pass."""
        form, epsilons = self.form, self.parts["epsilons"]
        columns = []
        if form.norm == "pre":
            added = sum((self._move(h) for h in range(form.heads)), np.zeros(1))
            if not form.whole:
                return np.asarray(added[:, :, None])
            blind = np.zeros_like(self.read.value)
            turn = blind if form.parallel else self.read.push(added @ self.plane)
            columns = [added + self._push_network(turn)]
            columns.append(self._push_network(self.read.slope(epsilons[1])))
            return np.stack(columns, axis=2)
        if form.whole:
            turn = self.read.slope(epsilons[0])
            stream = (self.parts["gain"] * (turn @ self.plane.T)) @ self.plane
            columns.append(self.end.push(stream + self._push_network(turn)))
        columns.append(self.end.slope(epsilons[-1]))
        ends = [self.parts["last_gain"] * (column @ self.plane.T) for column in columns]
        return np.stack(ends, axis=2)

    def _push_network(self, turn: Array) -> Array:
        """What the network adds, differentiated along a change of what it reads."""
        bent = self.phi.first(self.arguments) * (turn @ self.parts["inner"].T)
        return np.asarray(bent @ self.parts["outer"].T)

    def factors(self) -> Factors:
        """By all parameters."""
        form, parts, plane = self.form, self.parts, self.plane
        count, d = self.answers.shape
        eye = np.broadcast_to(np.eye(d), (count, d, d))
        found: Factors = {}
        if form.norm == "pre":
            behind = eye
        else:
            behind = self.end.pull(
                np.broadcast_to(parts["last_gain"][:, None] * plane, (count, *plane.shape))
            )
            found["last_gain"] = Factor(eye * (self.end.value @ plane.T)[:, None])
            found["last_bias"] = Factor(eye)
        found["added"] = Factor(behind)
        found["epsilons"] = Factor(self.by_epsilons())
        stream = behind
        if form.activation is not None:
            x = self.read.value if form.heads else self.last
            bent = (behind @ parts["outer"]) * self.phi.first(self.arguments)[:, None]
            found["outer"] = Factor(behind, self.hidden)
            found["inner"] = Factor(bent, x)
            found["inner_bias"] = Factor(bent)
            through = bent @ parts["inner"]
        if form.whole and form.norm == "pre":
            stream = eye if form.parallel else eye + self.read.pull(through) @ plane.T
            found["offset"] = Factor(stream @ plane)
        elif form.whole:
            wide = behind @ plane.T
            found["gain"] = Factor(wide * (x @ plane.T)[:, None])
            onward = through + (wide * parts["gain"]) @ plane
            stream = self.read.pull(onward)
            found["offset"] = Factor(stream)
        for h, (weight, reduced, mean, _) in enumerate(self.heads):
            value, out, left = parts[f"value{h}"], parts[f"out{h}"], parts[f"left{h}"]
            inside = stream @ out
            moved = inside @ value  # by the mean token
            spread = self.seen - mean[:, None]
            keys = ((moved @ spread.transpose(0, 2, 1)) * weight[:, None]) @ self.seen
            # the weights sum to one: the mean of the tokens drops out of the keys' side, too
            reached = keys @ left
            found[f"out{h}"] = Factor(stream, mean @ value.T)
            found[f"value{h}"] = Factor(inside, mean)
            found[f"left{h}"] = Factor(keys, reduced)
            found[f"right{h}"] = Factor(reached, self.seen[:, -1])
            found[f"key{h}"] = Factor(reached)
        return found


@dataclass(frozen=True, eq=False)
class Products:
    """Products with the Jacobian of a block at one pass, forwards and backwards through it."""

    at: _Pass
    epsilons: Float[Array, "n d e"]  # derivatives by their logarithms

    def jvp(self, moves: Parts) -> Float[Array, "n d"]:
        at, form, parts, plane = self.at, self.at.form, self.at.parts, self.at.plane
        stream: Array = np.zeros(1)
        for h, (weight, reduced, mean, _) in enumerate(at.heads):
            left, value, out = parts[f"left{h}"], parts[f"value{h}"], parts[f"out{h}"]
            read = at.seen[:, -1] @ moves[f"right{h}"].T + moves[f"key{h}"]
            key = read @ left.T + reduced @ moves[f"left{h}"].T
            score = (at.seen @ key[:, :, None])[:, :, 0]
            turned = weight * (score - np.sum(weight * score, axis=1, keepdims=True))
            inside = (turned[:, None] @ at.seen)[:, 0] @ value.T + mean @ moves[f"value{h}"].T
            stream = stream + inside @ out.T + mean @ value.T @ moves[f"out{h}"].T
        x, turn = at.last, np.zeros_like(at.last)
        if form.whole:
            pre = form.norm == "pre"
            stream = stream + (plane @ moves["offset"] if pre else moves["offset"])
            x, blind = at.read.value, pre and form.parallel
            turn = np.zeros_like(x) if blind else at.read.push(stream @ plane if pre else stream)
            if not pre:
                stream = (moves["gain"] * (x @ plane.T) + parts["gain"] * (turn @ plane.T)) @ plane
        stream = stream + moves["added"]
        if form.activation is not None:
            argument = x @ moves["inner"].T + moves["inner_bias"] + turn @ parts["inner"].T
            stream = stream + (at.phi.first(at.arguments) * argument) @ parts["outer"].T
            stream = stream + at.hidden @ moves["outer"].T
        if form.norm != "pre":
            stream = parts["last_gain"] * (at.end.push(stream) @ plane.T) + moves["last_bias"]
            stream = stream + moves["last_gain"] * (at.end.value @ plane.T)
        return np.asarray(stream + self.epsilons @ moves["epsilons"])

    def vjp(self, vector: Float[Array, "n d"]) -> Parts:
        at, form, parts, plane = self.at, self.at.form, self.at.parts, self.at.plane
        found: Parts = {"epsilons": np.einsum("nd,nde->e", vector, self.epsilons)}
        pre, stream = form.norm == "pre", vector
        if not pre:
            found["last_bias"] = vector.sum(axis=0)
            found["last_gain"] = np.sum(vector * (at.end.value @ plane.T), axis=0)
            stream = at.end.push((parts["last_gain"] * vector) @ plane)
        found["added"] = stream.sum(axis=0)
        if form.activation is not None:
            x = at.read.value if form.heads else at.last
            argument = at.phi.first(at.arguments) * (stream @ parts["outer"])
            found["outer"] = stream.T @ at.hidden
            found["inner"], found["inner_bias"] = argument.T @ x, argument.sum(axis=0)
            turn = argument @ parts["inner"]
        if form.whole and pre:
            stream = stream if form.parallel else stream + at.read.push(turn) @ plane.T
            found["offset"] = plane.T @ stream.sum(axis=0)
        elif form.whole:
            wide = stream @ plane.T
            found["gain"] = np.sum(wide * (x @ plane.T), axis=0)
            stream = at.read.push(turn + (parts["gain"] * wide) @ plane)
            found["offset"] = stream.sum(axis=0)
        for h, (weight, reduced, mean, _) in enumerate(at.heads):
            left, value, out = parts[f"left{h}"], parts[f"value{h}"], parts[f"out{h}"]
            inside = stream @ out
            turned = (at.seen @ (inside @ value)[:, :, None])[:, :, 0]
            score = weight * (turned - np.sum(weight * turned, axis=1, keepdims=True))
            key = (score[:, None] @ at.seen)[:, 0]
            read = key @ left
            found[f"out{h}"], found[f"value{h}"] = stream.T @ (mean @ value.T), inside.T @ mean
            found[f"left{h}"], found[f"key{h}"] = key.T @ reduced, read.sum(axis=0)
            found[f"right{h}"] = read.T @ at.seen[:, -1]
        return found


@dataclass(frozen=True, eq=False)
class TriangleScaling:
    """Unknowns in which the columns of one Jacobian are orthonormal, by its normal equations; those
    of a Jacobian nearby nearly are, so that a few products with it solve for a step."""

    sizes: Float[Array, " unknowns"]  # of the columns
    triangle: Float[Array, "unknowns unknowns"]  # upper; its transpose times it is the Gram matrix

    @classmethod
    def of(cls, gram: Float[Array, "unknowns unknowns"], ridge: float = 0.0) -> "TriangleScaling":
        """`gram`: of the columns. `ridge`: relative square below which no combination of columns is
        taken to be weak, so that none makes long steps."""
        sizes = np.sqrt(np.diag(gram))
        sizes = np.where(sizes > 0, sizes, 1.0)
        gram = gram / sizes / sizes[:, None]
        ridge = max(ridge, 4.0 * UNIT_ROUNDOFF * len(gram))
        gram[np.diag_indices(len(gram))] += np.where(np.diag(gram) > 0, 0.0, 1.0)
        while True:
            gram[np.diag_indices(len(gram))] += ridge
            try:
                return cls(sizes, cholesky(gram, check_finite=False))
            except LinAlgError:
                ridge *= 16.0

    def times(self, factor: float) -> "TriangleScaling":
        return replace(self, sizes=self.sizes / factor)

    def apply(self, z: Array) -> Array:
        return np.asarray(solve_triangular(self.triangle, z, check_finite=False) / self.sizes)

    def adjoint(self, step: Array) -> Array:
        return np.asarray(
            solve_triangular(self.triangle, step / self.sizes, trans="T", check_finite=False)
        )


def neuron_grams(data: Sequence[Factors], most: int = 2**24) -> Float[Array, "m k k"]:
    """The Gram matrix of every neuron's own columns: outer weights, row, bias; so many numbers of
    products are kept at a time."""
    total: Array | None = None
    for one in data:
        behind, hidden = one["outer"].left, one["outer"].reads
        bent, read = one["inner"].left, one["inner"].reads
        count, _, p = behind.shape
        neurons, part = bent.shape[2], max(1, most // (p * max(p, bent.shape[2])))
        k = p + read.shape[1] + 1
        total = np.zeros((neurons, k, k)) if total is None else total
        for start in range(0, count, part):
            some = slice(start, start + part)
            x = np.column_stack([read[some], np.ones(len(read[some]))])
            h, back = hidden[some], behind[some].transpose(0, 2, 1)
            square = (back @ behind[some]).reshape(len(h), -1)
            total[:, :p, :p] += ((h**2).T @ square).reshape(neurons, p, p)
            mixed = (back @ bent[some]) * h[:, None]  # (n, p, m)
            total[:, :p, p:] += mixed.transpose(2, 1, 0) @ x
            strength = np.sum(bent[some] ** 2, axis=1)
            total[:, p:, p:] += (x.T * strength.T[:, None]) @ x
    assert total is not None
    p = data[0]["outer"].left.shape[2]
    total[:, p:, :p] = total[:, :p, p:].transpose(0, 2, 1)
    return total


@dataclass(frozen=True, eq=False)
class GroupScaling:
    """Unknowns in which the columns of each group are orthonormal."""

    groups: tuple[Array, ...]  # of places
    units: tuple[TriangleScaling, ...]

    def apply(self, z: Array) -> Array:
        found = np.empty_like(z)
        for group, unit in zip(self.groups, self.units, strict=True):
            found[group] = unit.apply(z[group])
        return found

    def adjoint(self, step: Array) -> Array:
        found = np.empty_like(step)
        for group, unit in zip(self.groups, self.units, strict=True):
            found[group] = unit.adjoint(step[group])
        return found

    def times(self, factor: float) -> "GroupScaling":
        return GroupScaling(self.groups, tuple(unit.times(factor) for unit in self.units))


@dataclass(frozen=True, eq=False)
class BlockModel:
    """Answers against those of a block, in standard errors. Unknowns that are held stay as they
    are: some rows of a factor, say, whose product with another is all that is seen."""

    form: Form
    blocks: Blocks
    data: Sequence[Batch]
    held: Array  # booleans
    scaling: TriangleScaling | GroupScaling | None = None

    def residual(self, point: Float[Array, " unknowns"]) -> Float[Array, " numbers"]:
        parts = self.blocks.split(point)
        found = [
            (run_block(self.form, parts, one.tokens) - one.answers) / one.errors[:, None]
            for one in self.data
        ]
        return np.concatenate([part.ravel() for part in found])

    def differentiate(
        self, point: Float[Array, " unknowns"]
    ) -> tuple[list[Float[Array, "n d"]], list[Factors]]:
        """Residuals and their derivatives, batch by batch."""
        parts = self.blocks.split(point)
        residuals, data = list[Array](), list[Factors]()
        for one in self.data:
            answers, factors = differentiate_block(self.form, parts, one.tokens)
            weight = 1.0 / one.errors
            residuals.append((answers - one.answers) * weight[:, None])
            data.append(
                {
                    name: Factor(part.left * weight[:, None, None], part.right)
                    for name, part in factors.items()
                }
            )
        return residuals, data

    def gram(self, point: Float[Array, " unknowns"]) -> Float[Array, "unknowns unknowns"]:
        """Of the columns of the Jacobian, without forming it."""
        _, data = self.differentiate(point)
        names = [name for name, _ in self.blocks.shapes]
        return self.gram_of(names, data, self.held)

    def gram_of(self, names: Sequence[str], data: Sequence[Factors], held: Array) -> Array:
        """Of the columns of these parameters, one behind the other."""
        sizes = [int(np.prod(shape)) for name, shape in self.blocks.shapes if name in names]
        ends = np.cumsum([0, *sizes])
        places = [slice(*pair) for pair in pairwise(ends)]
        whole = np.zeros((ends[-1], ends[-1]))
        for i, name in enumerate(names):
            for j, other in enumerate(names[i:], i):
                block = sum(one[name].gram(one[other]) for one in data)
                whole[places[i], places[j]] = block
                whole[places[j], places[i]] = np.transpose(block)
        whole[held] = 0.0
        whole[:, held] = 0.0
        return whole

    def group_units(self, point: Float[Array, " unknowns"], ridge: float = 1e-2) -> GroupScaling:
        """Units of the unknowns of each head, of each neuron, and of the rest. `ridge`: of heads,
        whose two factors may make long steps that nearly cancel."""
        _, data = self.differentiate(point)
        every, slices = np.arange(self.blocks.size), self.blocks.slices
        places = {name: every[part] for name, part in slices.items()}
        network = ("inner", "inner_bias", "outer")
        kinds = ("left", "right", "key", "out", "value")
        heads = [[f"{kind}{h}" for kind in kinds] for h in range(self.form.heads)]
        within = {name for head in heads for name in head}
        rest = [name for name in places if name not in within and name not in network]
        groups, units = list[Array](), list[TriangleScaling]()
        for names in (*heads, rest):
            ordered = [name for name in places if name in names]
            group = np.concatenate([places[name] for name in ordered])
            groups.append(group)
            gram = self.gram_of(ordered, data, self.held[group])
            units.append(TriangleScaling.of(gram, ridge if names is not rest else 0.0))
        if self.form.activation is None:
            return GroupScaling(tuple(groups), tuple(units))
        shape = dict(self.blocks.shapes)
        inner = places["inner"].reshape(shape["inner"])
        outer = places["outer"].reshape(shape["outer"])
        for j, gram in enumerate(neuron_grams(data)):
            group = np.concatenate([outer[:, j], inner[j], places["inner_bias"][j : j + 1]])
            gram[self.held[group]] = 0.0
            gram[:, self.held[group]] = 0.0
            groups.append(group)
            units.append(TriangleScaling.of(gram))
        return GroupScaling(tuple(groups), tuple(units))

    def linearize(self, point: Float[Array, " unknowns"]) -> Linearization:
        parts = self.blocks.split(point)
        passes, residuals = list[Products](), list[Array]()
        for one in self.data:
            done = _Pass(self.form, parts, one.tokens)
            passes.append(Products(done, done.by_epsilons()))
            residuals.append((done.answers - one.answers) / one.errors[:, None])
        ends = np.cumsum([part.size for part in residuals])[:-1]

        def jvp(step: Array) -> Array:
            moves = self.blocks.split(np.where(self.held, 0.0, step))
            rows = [
                done.jvp(moves) / one.errors[:, None]
                for done, one in zip(passes, self.data, strict=True)
            ]
            return np.concatenate([np.ravel(row) for row in rows])

        def vjp(vector: Array) -> Array:
            total = {name: np.zeros(shape) for name, shape in self.blocks.shapes}
            split = np.split(vector, ends)
            for done, one, part in zip(passes, self.data, split, strict=True):
                pulled = done.vjp(part.reshape(one.answers.shape) / one.errors[:, None])
                for name, found in pulled.items():
                    total[name] += found
            return np.where(self.held, 0.0, self.blocks.join(total))

        def jacobian() -> Array:
            _, data = self.differentiate(point)
            numbers = sum(part.size for part in residuals)
            whole = np.empty((numbers, self.blocks.size))
            places, start = self.blocks.slices, 0
            for one, like in zip(data, residuals, strict=True):
                for name, factor in one.items():
                    whole[start : start + like.size, places[name]] = factor.dense().reshape(
                        like.size, -1
                    )
                start += like.size
            whole[:, self.held] = 0.0
            return whole

        flat = np.concatenate([part.ravel() for part in residuals])
        return Linearization(flat, len(point), jvp, vjp, jacobian, self.scaling)

    def retract(self, point: Array, step: Array) -> Array:
        # a step that follows errors of other unknowns would lose a tiny epsilon, which few answers
        # show, for good: its logarithm moves by one at most
        place = self.blocks.slices["epsilons"]
        moved = point + step
        moved[place] = point[place] + np.clip(step[place], -1.0, 1.0)
        return moved
