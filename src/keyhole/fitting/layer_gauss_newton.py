"""A whole attention layer fitted to all answers at once: a forward model on its low-rank maps.

Each head has P = [W | c] and M, kept as left · diag(singular) · right with orthonormal factors. A
step is X right + left Y with Y orthogonal to right: as many unknowns as there are, and well scaled
whatever the singular values are. The linear problems are solved matrix-free (gauss_newton), rows
weighted by the answers' standard errors, blocks of unknowns by how much the answers react to them.

Standard errors: the last linear problem solved again for residuals with random signs (the wild
bootstrap), which needs no model of the noise, and with noise of the size of the misfit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.bootstrap import bootstrap_errors
from keyhole.fitting.gauss_newton import FitOptions, Linearization, fit_least_squares, solve_linear
from keyhole.linalg.low_rank_fit import Factored
from keyhole.linalg.softmax import softmax, softmax_jvp

# The start is near, so steps are plain Gauss-Newton; a per cent of a per mille is not worth one.
OPTIONS = FitOptions(
    steps=6, damping=0.0, dense_unknowns=0, accuracy=1e-4, inner_steps=400, tolerance=1e-3, probes=0
)


@dataclass(frozen=True, eq=False)
class Answered:
    """Queries of one length with their answers and standard errors."""

    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n outputs"]
    errors: Float[Array, " n"]

    def anchors(self, rows: int) -> Float[Array, "n p"]:
        """What P is multiplied with: the last tokens, and a one where there are key biases."""
        last = self.tokens[:, -1]
        if rows == last.shape[1]:
            return last
        return np.concatenate([last, np.ones((len(last), 1))], axis=1)


@dataclass(frozen=True, eq=False)
class Layer:
    """Scores with key biases (d x d or d x (d + 1)) and values (d x outputs) in factors."""

    scores: tuple[Factored, ...]
    values: tuple[Factored, ...]
    offset: Float[Array, " outputs"]
    free_offset: bool = True  # whether the offset is an unknown

    @property
    def unknowns(self) -> int:
        total = len(self.offset) if self.free_offset else 0
        for part in (*self.scores, *self.values):
            total += part.rank * (len(part.left) + part.right.shape[1] - part.rank)
        return total

    @property
    def maps(self) -> list[Factored]:
        """Score and value of each head in turn: the order of their steps."""
        return [part for both in zip(self.scores, self.values, strict=True) for part in both]


@dataclass(frozen=True, eq=False)
class Polished:
    """The fitted layer, standard errors of its dense blocks, and the misfit per number."""

    layer: Layer
    score_errors: list[Array]
    value_errors: list[Array]
    offset_errors: Array
    misfit: float  # root mean square residual in standard errors, corrected for the unknowns


def fit_layer(
    layer: Layer,
    data: Sequence[Answered],
    rng: np.random.Generator,
    options: FitOptions = OPTIONS,
    dependent: float = 1.5,
) -> Polished:
    """Least squares over all answers from a layer close to it; farther starts need `options`.
    `dependent`: factor on standard errors, since roundings of one box are not independent."""
    model = LayerModel.of(data, rng)
    fit = fit_least_squares(model, layer, options, rng=rng)
    found, numbers = fit.point, len(fit.residual)
    at = model.linearize(found)
    freedom = max(1, numbers - found.unknowns)
    inflation, misfit = np.sqrt(numbers / freedom), float(np.sqrt(fit.cost / freedom))

    def change() -> tuple[Array, Array, Array]:
        signs = [
            np.repeat(rng.choice([-1.0, 1.0], len(part.answers)), part.answers.shape[1])
            for part in data
        ]
        wild = inflation * fit.residual * np.concatenate(signs)
        # Answers that the fit leans on leave no residual: what the misfit says about them is added.
        wild += misfit * rng.standard_normal(numbers)
        step = solve_linear(at, wild, accuracy=1e-4, inner_steps=300).step
        scores, values, offset = change_maps(found, step)
        return np.stack(scores), np.stack(values), offset[None]

    still = change_maps(found, np.zeros(at.unknowns))
    best = (np.stack(still[0]), np.stack(still[1]), still[2][None])
    scores, values, offset = bootstrap_errors(best, change, repetitions=4)
    return Polished(
        found,
        [dependent * part for part in scores],
        [dependent * part for part in values],
        dependent * offset[0],
        misfit,
    )


def multiply_out(part: Factored) -> Array:
    return np.asarray((part.left * part.singular) @ part.right)


# -- Steps -------------------------------------------------------------------------------------


def _shapes(layer: Layer) -> list[tuple[int, ...]]:
    return [shape for part in layer.maps for shape in (part.left.shape, part.right.T.shape)]


def split_step(layer: Layer, step: Array) -> tuple[list[Array], Array]:
    """Steps (X, Y) of each map in turn, Y outside of the span of its right factor, and that of the
    offset."""
    shapes = _shapes(layer)
    parts = np.split(step, np.cumsum([int(np.prod(shape)) for shape in shapes]))
    steps = [part.reshape(shape) for part, shape in zip(parts[:-1], shapes, strict=True)]
    for place, part in enumerate(layer.maps):
        steps[2 * place + 1] = _outside(part, steps[2 * place + 1])
    return steps, parts[-1]


def _outside(part: Factored, step: Array) -> Array:
    return np.asarray(step - part.right.T @ (part.right @ step))


def move_layer(layer: Layer, step: Array) -> Layer:
    """The layer after a step, each map brought back to its rank."""
    steps, offset = split_step(layer, step)
    moved = [
        Factored.of(
            np.hstack([part.left * part.singular + across, part.left]),
            np.vstack([part.right, along.T]),
            part.rank,
        )
        if part.rank
        else part
        for part, across, along in zip(layer.maps, steps[::2], steps[1::2], strict=True)
    ]
    return replace(
        layer,
        scores=tuple(moved[::2]),
        values=tuple(moved[1::2]),
        offset=layer.offset + offset,
    )


def change_maps(layer: Layer, step: Array) -> tuple[list[Array], list[Array], Array]:
    """A step as changes of the dense scores, the dense values and the offset."""
    steps, offset = split_step(layer, step)
    changes = [
        across @ part.right + part.left @ along.T
        for part, across, along in zip(layer.maps, steps[::2], steps[1::2], strict=True)
    ]
    return changes[::2], changes[1::2], offset


# -- The forward model -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LayerModel:
    """Predicts answers of a layer; `sampled` are queries that judge the units of the unknowns."""

    data: tuple[Answered, ...]
    sampled: tuple[Array, ...]

    @classmethod
    def of(cls, data: Sequence[Answered], rng: np.random.Generator) -> "LayerModel":
        most = 200  # queries of each length that the units of the unknowns are judged from
        sampled = tuple(rng.permutation(len(part.answers))[:most] for part in data)
        return cls(tuple(data), sampled)

    def residual(self, layer: Layer) -> Array:
        return _Evaluated(layer, self.data).residual()

    def linearize(self, layer: Layer) -> Linearization:
        at = _Evaluated(layer, self.data)
        unknowns = sum(int(np.prod(shape)) for shape in _shapes(layer)) + len(layer.offset)
        return Linearization(
            at.residual(),
            unknowns,
            at.push,
            at.pull,
            scaling=_scale_units(at, self.sampled),
            freedom=layer.unknowns,
        )

    def retract(self, layer: Layer, step: Array) -> Layer:
        return move_layer(layer, step)


class _Evaluated:
    """A layer's answers, and products with their derivative."""

    def __init__(self, layer: Layer, data: Sequence[Answered]) -> None:
        self.layer, self.data = layer, data
        self.maps = np.stack([multiply_out(part) for part in layer.values])  # (h, d, D)
        self.flat = self.maps.reshape(-1, self.maps.shape[2])
        keys = [multiply_out(part) for part in layer.scores]
        self.anchors = [part.anchors(keys[0].shape[1]) for part in data]
        self.weights: list[Array] = []
        self.means: list[Array] = []
        for part, anchor in zip(data, self.anchors, strict=True):
            scores = part.tokens @ np.stack([anchor @ key.T for key in keys], axis=2)
            weights = softmax(scores, axis=1, overwrite=True)
            self.weights.append(weights)
            self.means.append(weights.transpose(0, 2, 1) @ part.tokens)

    def residual(self) -> Array:
        found = []
        for part, mean in zip(self.data, self.means, strict=True):
            guess = mean.reshape(len(mean), -1) @ self.flat + self.layer.offset
            found.append(((guess - part.answers) / part.errors[:, None]).ravel())
        return np.concatenate(found)

    def push(self, step: Array) -> Array:
        steps, offset = split_step(self.layer, step)
        found = []
        for place, part in enumerate(self.data):
            anchor, weights, means = self.anchors[place], self.weights[place], self.means[place]
            moved = np.zeros((len(anchor), part.tokens.shape[2], len(self.maps)))
            answer = np.broadcast_to(offset, part.answers.shape).copy()
            for h, (s, v) in enumerate(zip(self.layer.scores, self.layer.values, strict=True)):
                across, along, up, down = steps[4 * h : 4 * h + 4]
                moved[:, :, h] = (anchor @ s.right.T) @ across.T + (anchor @ along) @ s.left.T
                answer += (means[:, h] @ up) @ v.right + (means[:, h] @ v.left) @ down.T
            change = softmax_jvp(weights, part.tokens @ moved, axis=1)
            means_change = change.transpose(0, 2, 1) @ part.tokens
            answer += means_change.reshape(len(answer), -1) @ self.flat
            found.append((answer / part.errors[:, None]).ravel())
        return np.concatenate(found)

    def pull(self, vector: Array) -> Array:
        steps = [np.zeros(shape) for shape in _shapes(self.layer)]
        offset = np.zeros(len(self.layer.offset))
        start = 0
        for place, part in enumerate(self.data):
            anchor, weights, means = self.anchors[place], self.weights[place], self.means[place]
            stop = start + part.answers.size
            rest = vector[start:stop].reshape(part.answers.shape) / part.errors[:, None]
            start = stop
            offset += rest.sum(axis=0)
            pulled = (rest @ self.flat.T).reshape(means.shape)
            change = softmax_jvp(weights, part.tokens @ pulled.transpose(0, 2, 1), axis=1)
            keys = change.transpose(0, 2, 1) @ part.tokens
            for h, (s, v) in enumerate(zip(self.layer.scores, self.layer.values, strict=True)):
                steps[4 * h] += keys[:, h].T @ (anchor @ s.right.T)
                steps[4 * h + 1] += anchor.T @ (keys[:, h] @ s.left)
                steps[4 * h + 2] += means[:, h].T @ (rest @ v.right.T)
                steps[4 * h + 3] += rest.T @ (means[:, h] @ v.left)
        for place, factor in enumerate(self.layer.maps):
            steps[2 * place + 1] = _outside(factor, steps[2 * place + 1])
        return np.concatenate([*(step.ravel() for step in steps), offset])


@dataclass(frozen=True, eq=False)
class _Units:
    """Each step X of shape (a, b) is left Z right, symmetric matrices; the offset has one unit."""

    pairs: tuple[tuple[Array, Array], ...]
    offset: float

    def apply(self, z: Array) -> Array:
        sizes = [len(left) * len(right) for left, right in self.pairs]
        parts = np.split(z, np.cumsum(sizes))
        steps = [
            (left @ part.reshape(len(left), len(right)) @ right).ravel()
            for (left, right), part in zip(self.pairs, parts[:-1], strict=True)
        ]
        return np.concatenate([*steps, self.offset * parts[-1]])

    adjoint = apply


def _scale_units(at: _Evaluated, sampled: Sequence[Array]) -> _Units:
    """Units in which steps of any block change the answers about alike: the blocks of the normal
    matrix, approximated by Kronecker products, to the power -1/2."""
    heads = len(at.maps)
    width, rows = at.data[0].tokens.shape[2], at.anchors[0].shape[1]
    keys, means = np.zeros((heads, width, width)), np.zeros((heads, width, width))
    anchors, total = np.zeros((heads, rows, rows)), 0.0
    for place, (part, chosen) in enumerate(zip(at.data, sampled, strict=True)):
        share = len(part.answers) / len(chosen)
        scaled = np.sqrt(share) / part.errors[chosen]
        total += share * float((1 / part.errors[chosen] ** 2).sum())
        tokens, anchor = part.tokens[chosen], at.anchors[place][chosen]
        for h in range(heads):
            weights, mean = at.weights[place][chosen, :, h], at.means[place][chosen, h]
            apart = tokens - mean[:, None]
            seen = np.einsum("nl,nld,nlo->ndo", weights, apart, apart @ at.maps[h])
            seen *= scaled[:, None, None]
            power = np.einsum("ndo,ndo->n", seen, seen)
            keys[h] += np.einsum("ndo,neo->de", seen, seen, optimize=True)
            anchors[h] += (anchor * power[:, None]).T @ anchor
            means[h] += (mean * scaled[:, None] ** 2).T @ mean
    pairs = []
    for h, (s, v) in enumerate(zip(at.layer.scores, at.layer.values, strict=True)):
        power = max(float(np.trace(keys[h])), TINY)
        inner = s.right @ anchors[h] @ s.right.T / power
        pairs.append((_inverse_root(keys[h]), _inverse_root(inner)))
        inner = s.left.T @ keys[h] @ s.left
        pairs.append((_inverse_root(anchors[h] / power), _inverse_root(inner)))
        pairs.append((_inverse_root(means[h]), np.eye(v.rank)))
        inner = v.left.T @ means[h] @ v.left
        pairs.append((np.eye(v.right.shape[1]), _inverse_root(inner)))
    return _Units(tuple(pairs), 1.0 / np.sqrt(total) if at.layer.free_offset else 0.0)


def _inverse_root(matrix: Array) -> Array:
    """The symmetric matrix to the power -1/2, directions of no weight as if of a small one."""
    if not matrix.size:
        return matrix
    sizes, vectors = np.linalg.eigh(matrix)
    sizes = np.maximum(sizes, 1e-12 * max(float(sizes[-1]), TINY))
    return np.asarray((vectors / np.sqrt(sizes)) @ vectors.T)
