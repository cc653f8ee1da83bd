"""A whole attention layer fitted to all answers at once: a forward model on its low-rank maps.

Each head has P = [W | c] and M, kept as left · diag(singular) · right with orthonormal factors. A
step is X right + left Y with Y orthogonal to right: as many unknowns as there are, and well scaled
whatever the singular values are. The linear problems are solved matrix-free (gauss_newton), rows
weighted by the answers' standard errors, through the factors alone and in single precision. Blocks
of unknowns are scaled by how much the answers react to them: those of a score by a Kronecker
product, those of all values together, since their heads share every answer.

Standard errors: what each answer moves the fit by (fitting/jackknife). Where unknowns are
too many to form the Jacobian, the last linear problem is solved again for noise of the misfit's
size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.bootstrap import smooth_errors
from keyhole.fitting.gauss_newton import (
    FitOptions,
    Linearization,
    fit_least_squares,
    form_jacobian,
    solve_linear,
)
from keyhole.fitting.jackknife import list_jackknife_steps
from keyhole.linalg.low_rank_fit import Factored
from keyhole.linalg.softmax import softmax, softmax_jvp

# From a start that is near, steps are plain Gauss-Newton. A solution cut short is continued by the
# next step; an excess of 0.3 per cent in the cost moves unknowns by a twentieth of their standard
# errors.
OPTIONS = FitOptions(
    steps=10, damping=0.0, dense_unknowns=0, accuracy=0.003, finest=0.003, inner_steps=60,
    tolerance=0.003, probes=0,
)  # fmt: skip
# Where few numbers, or tokens of very different sizes, tell the unknowns: solved to the end.
THOROUGH = replace(OPTIONS, steps=6, accuracy=1e-4, finest=0.0, inner_steps=400, tolerance=1e-3)
# Where the start may be off by a tenth, and unknowns are few.
PATIENT = replace(THOROUGH, steps=40, damping=1e-3, dense_unknowns=600, tolerance=1e-6)
# From a start off by a few per cent, before that.
APPROACH = replace(OPTIONS, steps=1, inner_steps=30)
DENSE_UNKNOWNS = 1500  # up to which the Jacobian is formed,
DENSE_NUMBERS = 20_000_000  # if it has no more entries than this


@dataclass(frozen=True, eq=False)
class LayerAnswers:
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

    def split(self) -> "list[LayerAnswers]":
        """The queries in pieces, whose products stay in the processor's caches."""
        rows = max(16, 4_000_000 // self.tokens[0].size)
        return [
            LayerAnswers(self.tokens[piece], self.answers[piece], self.errors[piece])
            for low in range(0, len(self.answers), rows)
            for piece in [slice(low, low + rows)]
        ]


@dataclass(frozen=True, eq=False)
class FactoredLayer:
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

    layer: FactoredLayer
    score_errors: list[Array]
    value_errors: list[Array]
    offset_errors: Array
    misfit: float  # root mean square residual in standard errors, corrected for the unknowns


def fit_layer(
    layer: FactoredLayer,
    data: Sequence[LayerAnswers],
    rng: np.random.Generator,
    options: FitOptions = OPTIONS,
    working: type = np.float32,
    back: Float[Array, "outputs outputs"] | None = None,
) -> Polished:
    """Least squares over all answers from a layer close to it; farther starts need `options`, or
    `fit_rough_layer`.
    `working`: precision of the linear problems. `back`: turns the answers into those that the
    result is for, where layer and data have combinations of them."""
    model = LayerModel(tuple(data), working)
    fit = fit_least_squares(model, layer, options, rng=rng)
    found, numbers = fit.point, len(fit.residual)
    misfit = float(np.sqrt(fit.cost / max(1, numbers - found.unknowns)))
    at = model.linearize(found)
    if found.unknowns <= DENSE_UNKNOWNS and len(fit.residual) * at.unknowns <= DENSE_NUMBERS:
        groups = [part.answers.shape[1] for part in data for _ in part.answers]
        steps = list_jackknife_steps(form_jacobian(at), at.residual, groups, found.unknowns)
        changes: Iterator[tuple[float, Array]] = ((1.0, step) for step in steps)
    else:
        changes = _draw_changes(at, found, misfit, options, rng)
    errors = _root_sum_squares(found, changes, back)
    return Polished(found if back is None else mix_outputs(found, back), *errors, misfit)


def _draw_changes(
    at: Linearization,
    layer: FactoredLayer,
    misfit: float,
    options: FitOptions,
    rng: np.random.Generator,
) -> Iterator[tuple[float, Array]]:
    """Steps that random noise of the size of the misfit makes, weighted to a mean; large blocks
    average by themselves."""
    repetitions = int(np.clip(200_000 // layer.unknowns, 1, 4))
    for _ in range(repetitions):
        noise = misfit * rng.standard_normal(len(at.residual))
        # weak directions come last, and have the largest errors
        solution = solve_linear(at, noise, options.accuracy**2, 4 * options.inner_steps)
        yield 1.0 / repetitions, solution.step


def _root_sum_squares(
    layer: FactoredLayer,
    changes: Iterator[tuple[float, Array]],
    back: Float[Array, "outputs outputs"] | None,
) -> tuple[list[Array], list[Array], Array]:
    """Of the changes of the dense blocks: their standard errors."""
    scores = [np.zeros((len(p.left), p.right.shape[1])) for p in layer.scores]
    values = [np.zeros((len(p.left), p.right.shape[1])) for p in layer.values]
    offset, few = np.zeros(len(layer.offset)), False
    for weight, step in changes:
        few = few or weight < 1.0
        by_score, by_value, by_offset = change_maps(layer, step)
        if back is not None:
            by_value, by_offset = [part @ back for part in by_value], by_offset @ back
        for total, part in zip((*scores, *values), (*by_score, *by_value), strict=True):
            total += weight * part**2
        offset += weight * by_offset**2
    found = [np.sqrt(part) for part in (*scores, *values, offset)]
    if few:  # single entries of a few draws look better than they are
        found = [smooth_errors(part[None])[0] for part in found]
    return found[: len(scores)], found[len(scores) : -1], found[-1]


def fit_rough_layer(
    layer: FactoredLayer,
    data: Sequence[LayerAnswers],
    rng: np.random.Generator,
    options: FitOptions = OPTIONS,
) -> Polished:
    """Least squares from a layer off by a few per cent. The outputs of a trained layer differ in
    size by thousands, and so do their roundings, less: combinations of outputs count by the roots
    of their sizes. Roundings are then about alike in all of them, and unknowns that only small
    ones show converge as the others do. The scores come before all else, since hard attention told
    the values better."""
    sizes, vectors = np.linalg.eigh(
        np.sum([(v.right.T * v.singular**2) @ v.right for v in layer.values], axis=0)
    )
    roots = (np.maximum(sizes, 1e-7 * sizes[-1]) / sizes[-1]) ** 0.25
    mixed, back = (vectors / roots) @ vectors.T, (vectors * roots) @ vectors.T
    parts = tuple(replace(part, answers=part.answers @ mixed) for part in data)
    layer = mix_outputs(layer, mixed)
    for scores_only in (True, False):
        model = LayerModel(parts, scores_only=scores_only)
        layer = fit_least_squares(model, layer, APPROACH).point
    return fit_layer(layer, parts, rng, options, back=back)


def mix_outputs(layer: FactoredLayer, matrix: Float[Array, "outputs outputs"]) -> FactoredLayer:
    """The layer whose answers are multiplied by a matrix."""
    values = tuple(
        Factored.of(value.left * value.singular, value.right @ matrix, value.rank)
        for value in layer.values
    )
    return replace(layer, values=values, offset=layer.offset @ matrix)


def multiply_out(part: Factored) -> Array:
    return np.asarray((part.left * part.singular) @ part.right)


# -- Steps -------------------------------------------------------------------------------------


def _shapes(layer: FactoredLayer) -> list[tuple[int, ...]]:
    return [shape for part in layer.maps for shape in (part.left.shape, part.right.T.shape)]


def _sizes(layer: FactoredLayer) -> list[int]:
    return [int(np.prod(shape)) for shape in _shapes(layer)]


def split_step(layer: FactoredLayer, step: Array) -> tuple[list[Array], Array]:
    """Steps (X, Y) of each map in turn, Y outside of the span of its right factor, and that of the
    offset."""
    parts = np.split(step, np.cumsum(_sizes(layer)))
    steps = [part.reshape(shape) for part, shape in zip(parts[:-1], _shapes(layer), strict=True)]
    for place, part in enumerate(layer.maps):
        steps[2 * place + 1] = _outside(part, steps[2 * place + 1])
    return steps, parts[-1]


def _outside(part: Factored, step: Array) -> Array:
    return np.asarray(step - part.right.T @ (part.right @ step))


def move_layer(layer: FactoredLayer, step: Array) -> FactoredLayer:
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


def change_maps(layer: FactoredLayer, step: Array) -> tuple[list[Array], list[Array], Array]:
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
    """Predicts answers of a layer. Residuals are computed in float64, products with the derivative
    in `working` precision: a step need not be more exact than its start is wrong. With
    `scores_only` the values and the offset stay."""

    data: tuple[LayerAnswers, ...]
    working: type = np.float32
    scores_only: bool = False

    def residual(self, layer: FactoredLayer) -> Array:
        found = []
        outs = np.concatenate([value.right for value in layer.values])
        for part in self.data:
            for piece in part.split():
                _, means = _attend(layer, piece)
                seen = [
                    (means[:, h] @ value.left) * value.singular
                    for h, value in enumerate(layer.values)
                ]
                guess = np.hstack(seen) @ outs + layer.offset
                found.append(((guess - piece.answers) / piece.errors[:, None]).ravel())
        return np.concatenate(found)

    def linearize(self, layer: FactoredLayer) -> Linearization:
        data = [piece for part in self.data for piece in part.split()]
        parts = [_Derivative(layer, part, self.working) for part in data]
        ends = np.cumsum([0, *(part.answers.size for part in data)])

        def push(step: Array) -> Array:
            steps = _Steps.of(layer, step, self.working)
            return np.concatenate([part.push(steps) for part in parts])

        def pull(vector: Array) -> Array:
            total = _Steps.zero(layer, self.working)
            for part, low, high in zip(parts, ends[:-1], ends[1:], strict=True):
                part.pull(vector[low:high], total)
            return total.join(layer)

        return Linearization(
            self.residual(layer),
            sum(_sizes(layer)) + len(layer.offset),
            push,
            pull,
            jacobian=lambda: np.concatenate([form_derivative(layer, piece) for piece in data]),
            scaling=_scale_units(layer, parts, self.scores_only),
            freedom=layer.unknowns,
        )

    def retract(self, layer: FactoredLayer, step: Array) -> FactoredLayer:
        return move_layer(layer, step)


def _attend(layer: FactoredLayer, part: LayerAnswers) -> tuple[Array, Array]:
    """Weights (n, heads, length), and the weighted means (n, heads, d) of the tokens."""
    anchors = part.anchors(layer.scores[0].right.shape[1])
    directed = np.empty((len(anchors), len(layer.scores), part.tokens.shape[2]))
    for h, keys in enumerate(layer.scores):
        np.matmul((anchors @ keys.right.T) * keys.singular, keys.left.T, out=directed[:, h])
    scores = np.matmul(directed, part.tokens.transpose(0, 2, 1))
    weights = softmax(scores, overwrite=True)
    return weights, np.matmul(weights, part.tokens)


@dataclass(frozen=True, eq=False)
class _Steps:
    """A step by kind: X and Y of the scores (`across`, `along`), those of the values (`up`,
    `down`), heads side by side in the second and fourth."""

    across: list[Array]  # (d, r)
    along: Array  # (p, sum of r)
    up: list[Array]  # (d, r')
    down: Array  # (outputs, sum of r')
    offset: Array

    @classmethod
    def of(cls, layer: FactoredLayer, step: Array, working: type = np.float64) -> "_Steps":
        steps, offset = split_step(layer, step)
        steps = [part.astype(working) for part in steps]
        return cls(
            steps[::4],
            np.hstack(steps[1::4]),
            steps[2::4],
            np.hstack(steps[3::4]),
            offset.astype(working),
        )

    @classmethod
    def zero(cls, layer: FactoredLayer, working: type) -> "_Steps":
        return cls.of(layer, np.zeros(sum(_sizes(layer)) + len(layer.offset)), working)

    def join(self, layer: FactoredLayer) -> Array:
        """The step as one vector, Y outside of the spans of the right factors."""
        along = np.split(self.along, np.cumsum([part.rank for part in layer.scores])[:-1], axis=1)
        down = np.split(self.down, np.cumsum([part.rank for part in layer.values])[:-1], axis=1)
        flat: list[Array] = []
        for h, (keys, value) in enumerate(zip(layer.scores, layer.values, strict=True)):
            flat += [self.across[h], _outside(keys, along[h])]
            flat += [self.up[h], _outside(value, down[h])]
        return np.concatenate([*(part.ravel() for part in flat), self.offset]).astype(np.float64)


class _Derivative:
    """Products with the derivative of the answers of one length, through the factors alone."""

    def __init__(self, layer: FactoredLayer, part: LayerAnswers, working: type) -> None:
        weights, means = _attend(layer, part)
        self.weights: Array = weights.astype(working)
        self.means: list[Array] = list(np.moveaxis(means.astype(working), 1, 0))
        self.tokens: Array = part.tokens.astype(working)
        self.precision: Array = (1.0 / part.errors[:, None]).astype(working)
        self.anchors: Array = part.anchors(layer.scores[0].right.shape[1]).astype(working)
        self.lefts: list[Array] = [keys.left.astype(working) for keys in layer.scores]
        self.queries = [self.anchors @ keys.right.T.astype(working) for keys in layer.scores]
        self.ins = [(v.left * v.singular).astype(working) for v in layer.values]
        self.outs: Array = np.concatenate([value.right for value in layer.values]).astype(working)
        self.seen = np.hstack(
            [m @ v.left.astype(working) for m, v in zip(self.means, layer.values, strict=True)]
        )
        self.score_cuts = np.cumsum([keys.rank for keys in layer.scores])[:-1]
        self.value_cuts = np.cumsum([value.rank for value in layer.values])[:-1]

    def _room(self) -> Array:
        """For one vector of the tokens' width per query and head."""
        return np.empty((len(self.tokens), len(self.ins), self.tokens.shape[2]), self.tokens.dtype)

    def push(self, steps: _Steps) -> Array:
        inner = np.split(self.anchors @ steps.along, self.score_cuts, axis=1)
        moved = self._room()
        for h, part in enumerate(inner):
            np.matmul(self.queries[h], steps.across[h].T, out=moved[:, h])
            moved[:, h] += part @ self.lefts[h].T
        change = np.matmul(moved, self.tokens.transpose(0, 2, 1))
        means = np.matmul(softmax_jvp(self.weights, change), self.tokens)
        inside = [
            means[:, h] @ self.ins[h] + self.means[h] @ steps.up[h] for h in range(len(self.ins))
        ]
        answer = np.hstack(inside) @ self.outs + self.seen @ steps.down.T + steps.offset
        return np.asarray((answer * self.precision).ravel(), dtype=np.float64)

    def pull(self, vector: Array, total: _Steps) -> None:
        """Adds the product with the transpose to `total`."""
        rest = vector.astype(self.precision.dtype).reshape(len(self.anchors), -1) * self.precision
        inside = np.split(rest @ self.outs.T, self.value_cuts, axis=1)
        pulled = self._room()
        for h, part in enumerate(inside):
            np.matmul(part, self.ins[h].T, out=pulled[:, h])
        change = np.matmul(pulled, self.tokens.transpose(0, 2, 1))
        keys = np.matmul(softmax_jvp(self.weights, change), self.tokens)
        for h in range(len(self.ins)):
            total.across[h][...] += keys[:, h].T @ self.queries[h]
            total.up[h][...] += self.means[h].T @ inside[h]
        inner = np.hstack([keys[:, h] @ left for h, left in enumerate(self.lefts)])
        total.along[...] += self.anchors.T @ inner
        total.down[...] += rest.T @ self.seen
        total.offset[...] += rest.sum(axis=0)


def form_derivative(layer: FactoredLayer, part: LayerAnswers) -> Float[Array, "numbers steps"]:
    """The derivative of the answers of one length by the entries of a step, all of it."""
    weights, means = _attend(layer, part)
    anchors = part.anchors(layer.scores[0].right.shape[1])
    count, outputs = part.answers.shape
    columns: list[Array] = []
    for h, (keys, value) in enumerate(zip(layer.scores, layer.values, strict=True)):
        seen = ((part.tokens @ value.left) * value.singular) @ value.right
        apart = part.tokens - means[:, h, None]
        # by the key of the query: how the values move as its weights do
        by_key = np.einsum("nl,nld,nlo->nod", weights[:, h], apart, seen, optimize=True)
        across = np.einsum("nod,nr->nodr", by_key, anchors @ keys.right.T)
        along = np.einsum("nor,np->nopr", by_key @ keys.left, anchors)
        along = along - np.einsum("noqr,sq,sp->nopr", along, keys.right, keys.right, optimize=True)
        up = np.einsum("nd,ro->nodr", means[:, h], value.right)
        down = np.einsum("nr,oq->noqr", means[:, h] @ value.left, np.eye(outputs))
        down = down - np.einsum("noqr,sq,sp->nopr", down, value.right, value.right, optimize=True)
        columns += [block.reshape(count, outputs, -1) for block in (across, along, up, down)]
    columns.append(np.broadcast_to(np.eye(outputs), (count, outputs, outputs)))
    whole = np.concatenate(columns, axis=2) / part.errors[:, None, None]
    return np.asarray(whole.reshape(count * outputs, -1))


# -- Units of the unknowns ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _KroneckerRoot:
    """(A x B + I x C)^(-1/2) for matrices (a, b): left @ (z * units) @ right."""

    left: Array
    units: Array
    right: Array

    @classmethod
    def of(cls, rows: Array, columns: Array, rest: Array) -> "_KroneckerRoot":
        """For the form tr(X' rows X columns) + tr(X' rest X)."""
        back = _inverse_root(rest)
        sizes, vectors = np.linalg.eigh(back @ rows @ back)
        spread, right = np.linalg.eigh(columns)
        units = 1.0 / np.sqrt(1.0 + np.outer(np.maximum(sizes, 0.0), np.maximum(spread, 0.0)))
        return cls(back @ vectors, units, right.T)

    def apply(self, z: Array) -> Array:
        return np.asarray(self.left @ (z * self.units) @ self.right)

    def adjoint(self, step: Array) -> Array:
        return np.asarray((self.left.T @ step @ self.right.T) * self.units)


@dataclass(frozen=True, eq=False)
class _Units:
    """Steps of scores are left Z right, symmetric matrices; those of values are scaled over all
    heads at once, which share the answers; the offset has one unit."""

    layer: FactoredLayer
    across: tuple[tuple[Array, Array], ...]
    along: tuple[tuple[Array, Array], ...]
    up: _KroneckerRoot
    down: Array
    offset: float

    def apply(self, z: Array) -> Array:
        return self._scale(z, self.up.apply)

    def adjoint(self, step: Array) -> Array:
        return self._scale(step, self.up.adjoint)

    def _scale(self, vector: Array, scale_up: Callable[[Array], Array]) -> Array:
        steps = _Steps.of(self.layer, vector)
        cuts = np.cumsum([keys.rank for keys in self.layer.scores])[:-1]
        along = np.split(steps.along, cuts, axis=1)
        cuts = np.cumsum([value.rank for value in self.layer.values])[:-1]
        return _Steps(
            [a @ part @ b for (a, b), part in zip(self.across, steps.across, strict=True)],
            np.hstack([a @ part @ b for (a, b), part in zip(self.along, along, strict=True)]),
            np.split(scale_up(np.hstack(steps.up)), cuts, axis=1),
            steps.down @ self.down,
            self.offset * steps.offset,
        ).join(self.layer)


def _scale_units(
    layer: FactoredLayer, parts: Sequence[_Derivative], scores_only: bool = False
) -> _Units:
    """Units in which steps of any block change the answers about alike: blocks of the normal
    matrix, approximated by Kronecker products, to the power -1/2."""
    heads, width = len(layer.scores), layer.scores[0].left.shape[0]
    rows = layer.scores[0].right.shape[1]
    keys, anchors = np.zeros((heads, width, width)), np.zeros((heads, rows, rows))
    common, apart, total = np.zeros((width, width)), np.zeros((width, width)), 0.0
    seen = np.zeros((parts[0].seen.shape[1],) * 2)
    rank = max(value.rank for value in layer.values)
    numbers = rank * sum(len(part.anchors) for part in parts)
    enough = 20 * width + 4000  # rows for a sum of as many squares as the width; a few cost nothing
    share = max(1, numbers // enough)
    for part in parts:
        apart_tokens = part.tokens - part.tokens.mean(axis=1, keepdims=True)
        products = apart_tokens @ apart_tokens.transpose(0, 2, 1)
        total += float((part.precision.astype(np.float64) ** 2).sum())
        mean = np.mean(part.means, axis=0)
        common += _gram(mean * part.precision)
        seen += _gram(part.seen * part.precision)
        for h in range(heads):
            apart += _gram((part.means[h] - mean) * part.precision) / heads
            power = _add_key_information(part, h, products, keys[h], share)
            anchors[h] += _gram(part.anchors * np.sqrt(power)[:, None])
    across, along = [], []
    for h, score in enumerate(layer.scores):
        size = max(float(np.trace(keys[h])), TINY)
        inner = score.right @ anchors[h] @ score.right.T / size
        across.append((_inverse_root(keys[h]), _inverse_root(inner)))
        inner = score.left.T @ keys[h] @ score.left
        along.append((_inverse_root(anchors[h] / size), _inverse_root(inner)))
    outs = parts[0].outs.astype(np.float64)
    # one head alone, or heads that attend alike, have means of their own no more than rounding has
    apart += 1e-6 * np.trace(common) / width * np.eye(width)
    up, down = _KroneckerRoot.of(common, outs @ outs.T, apart), _inverse_root(seen)
    if scores_only:
        up, down = replace(up, units=0.0 * up.units), 0.0 * down
    offset = 1.0 / np.sqrt(total) if layer.free_offset and not scores_only else 0.0
    return _Units(layer, tuple(across), tuple(along), up, down, offset)


def _add_key_information(
    part: _Derivative,
    head: int,
    products: Float[Array, "n length length"],
    total: Array,
    share: int,
) -> Array:
    """Adds sum of g g' to `total`, g = sum_i w_i (x_i - mean) (x_i - mean)' M in standard errors
    of each answer, from one query in `share`; returns the squared sizes of g. The coefficients of
    the x_i sum to zero: it does not matter from where tokens are counted, and `products` are those
    of tokens of mean zero."""
    values = part.tokens @ part.ins[head]
    weights = part.weights[:, head]
    values -= np.einsum("nl,nlr->nr", weights, values)[:, None]
    values *= weights[:, :, None] * part.precision[:, None]
    some = values[::share], part.tokens[::share]
    apart = some[1] - some[1].mean(axis=1, keepdims=True)
    scale = len(values) / len(apart)
    total += scale * _gram((some[0].transpose(0, 2, 1) @ apart).reshape(-1, apart.shape[2]))
    power = np.einsum("nij,nij->n", values @ values.transpose(0, 2, 1), products)
    return np.maximum(power, 0.0)


def _gram(rows: Array) -> Array:
    return np.asarray(rows.T @ rows, dtype=np.float64)


def _inverse_root(matrix: Array) -> Array:
    """The symmetric matrix to the power -1/2, directions of no weight as if of a small one."""
    if not matrix.size:
        return matrix
    sizes, vectors = np.linalg.eigh(matrix)
    sizes = np.maximum(sizes, 1e-12 * max(float(sizes[-1]), TINY))
    return np.asarray((vectors / np.sqrt(sizes)) @ vectors.T)
