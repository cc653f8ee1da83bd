"""A whole attention layer fitted to all answers at once: Gauss–Newton on its low-rank maps.

Each head has P = [W | c] and M, kept as left · diag(singular) · right with orthonormal factors. A
step is X right + left Y with Y orthogonal to right: as many unknowns as there are, and well scaled
whatever the singular values are. The linear problems are solved matrix-free (LSMR), rows weighted
by the answers' standard errors, blocks of unknowns by how much the answers react to them.

Standard errors: the last linear problem solved again for residuals with random signs (the wild
bootstrap), which needs no model of the noise, and with noise of the size of the misfit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.sparse.linalg import LinearOperator, lsmr

from keyhole.arrays import TINY, Array, Float
from keyhole.linalg.low_rank_fit import Factored
from keyhole.linalg.softmax import softmax

STEPS = 6  # Gauss–Newton steps
SETTLED = 0.999  # cost after over before a step, above which the fit has settled
SAMPLED = 200  # queries of each length that the units of the unknowns are judged from
LIGHTEST = 1e-12  # share of the largest eigenvalue below which a direction has no weight
STEP_LIMITS = (1e-7, 400)  # relative accuracy of a linear solve, and steps of LSMR at most
BAR_LIMITS = (1e-4, 300)  # the same for standard errors, of which few digits are needed
DEPENDENT = 1.5  # factor on standard errors: roundings of one box are not independent
REPLICATES = 4  # resamplings of the residuals


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


@dataclass(frozen=True, eq=False)
class Polished:
    """The fitted layer, standard errors of its dense blocks, and the misfit per number."""

    layer: Layer
    score_errors: list[Array]
    value_errors: list[Array]
    offset_errors: Array
    misfit: float  # root mean square residual in standard errors, corrected for the unknowns


def dense(part: Factored) -> Array:
    return np.asarray((part.left * part.singular) @ part.right)


class _Linear:
    """The layer's answers and their derivative at one point."""

    def __init__(self, layer: Layer, data: Sequence[Answered]) -> None:
        self.layer, self.data = layer, data
        self.maps = np.stack([dense(part) for part in layer.values])  # (h, d, D)
        self.flat = self.maps.reshape(-1, self.maps.shape[2])
        keys = [dense(part) for part in layer.scores]
        width = keys[0].shape[1]
        self.anchors = [part.anchors(width) for part in data]
        self.weights: list[Array] = []
        self.means: list[Array] = []
        for part, anchor in zip(data, self.anchors, strict=True):
            scores = part.tokens @ np.stack([anchor @ key.T for key in keys], axis=2)
            weights = softmax(scores, axis=1)
            self.weights.append(weights)
            self.means.append(weights.transpose(0, 2, 1) @ part.tokens)
        self.shapes = [
            shape
            for s, v in zip(layer.scores, layer.values, strict=True)
            for shape in (
                s.left.shape,
                s.right.T.shape,
                v.left.shape,
                v.right.T.shape,
            )
        ]
        self.sizes = [int(np.prod(shape)) for shape in self.shapes]
        self.whitening = [(np.eye(shape[0]), np.eye(shape[1])) for shape in self.shapes]
        self.unit = 1.0  # of the offset

    @property
    def unknowns(self) -> int:
        return sum(self.sizes) + len(self.layer.offset)

    def residuals(self) -> Array:
        found = []
        for part, mean in zip(self.data, self.means, strict=True):
            guess = mean.reshape(len(mean), -1) @ self.flat + self.layer.offset
            found.append(((part.answers - guess) / part.errors[:, None]).ravel())
        return np.concatenate(found)

    def blocks(self, vector: Array) -> tuple[list[Array], Array]:
        """Steps of the factors, those of right factors outside of their span, and the offset's."""
        parts = np.split(vector, np.cumsum(self.sizes))
        steps = [
            left @ part.reshape(shape) @ right
            for (left, right), part, shape in zip(
                self.whitening, parts[:-1], self.shapes, strict=True
            )
        ]
        for place, factor in self._rights():
            steps[place] = _outside(factor, steps[place])
        return steps, self.unit * parts[-1]

    def _rights(self) -> list[tuple[int, Factored]]:
        pairs = zip(self.layer.scores, self.layer.values, strict=True)
        return [
            (4 * h + 1 + 2 * k, part) for h, both in enumerate(pairs) for k, part in enumerate(both)
        ]

    def forward(self, vector: Array) -> Array:
        steps, offset = self.blocks(vector)
        found = []
        for place, part in enumerate(self.data):
            anchor, weights, means = self.anchors[place], self.weights[place], self.means[place]
            moved = np.zeros((len(anchor), part.tokens.shape[2], len(self.maps)))
            answer = np.broadcast_to(offset, part.answers.shape).copy()
            for h, (s, v) in enumerate(zip(self.layer.scores, self.layer.values, strict=True)):
                across, along, up, down = steps[4 * h : 4 * h + 4]
                moved[:, :, h] = (anchor @ s.right.T) @ across.T + (anchor @ along) @ s.left.T
                answer += (means[:, h] @ up) @ v.right + (means[:, h] @ v.left) @ down.T
            change = part.tokens @ moved
            change -= np.einsum("nlh,nlh->nh", weights, change)[:, None]
            means_change = (weights * change).transpose(0, 2, 1) @ part.tokens
            answer += means_change.reshape(len(answer), -1) @ self.flat
            found.append((answer / part.errors[:, None]).ravel())
        return np.concatenate(found)

    def backward(self, vector: Array) -> Array:
        steps = [np.zeros(shape) for shape in self.shapes]
        offset = np.zeros(len(self.layer.offset))
        start = 0
        for place, part in enumerate(self.data):
            anchor, weights, means = self.anchors[place], self.weights[place], self.means[place]
            stop = start + part.answers.size
            rest = vector[start:stop].reshape(part.answers.shape) / part.errors[:, None]
            start = stop
            offset += rest.sum(axis=0)
            pulled = (rest @ self.flat.T).reshape(means.shape)
            change = part.tokens @ pulled.transpose(0, 2, 1)
            change = weights * (change - np.einsum("nlh,nlh->nh", weights, change)[:, None])
            keys = change.transpose(0, 2, 1) @ part.tokens
            for h, (s, v) in enumerate(zip(self.layer.scores, self.layer.values, strict=True)):
                steps[4 * h] += keys[:, h].T @ (anchor @ s.right.T)
                steps[4 * h + 1] += anchor.T @ (keys[:, h] @ s.left)
                steps[4 * h + 2] += means[:, h].T @ (rest @ v.right.T)
                steps[4 * h + 3] += rest.T @ (means[:, h] @ v.left)
        for place, factor in self._rights():
            steps[place] = _outside(factor, steps[place])
        flat = [
            (left @ step @ right).ravel()
            for (left, right), step in zip(self.whitening, steps, strict=True)
        ]
        return np.concatenate([*flat, self.unit * offset])

    def whiten(self, rng: np.random.Generator) -> None:
        """Units in which steps of any block change the answers about alike: the blocks of the
        normal matrix, approximated by Kronecker products, to the power -1/2."""
        heads = len(self.maps)
        width, rows = self.data[0].tokens.shape[2], self.anchors[0].shape[1]
        keys, means = np.zeros((heads, width, width)), np.zeros((heads, width, width))
        anchors, total = np.zeros((heads, rows, rows)), 0.0
        for place, part in enumerate(self.data):
            chosen = rng.permutation(len(part.answers))[:SAMPLED]
            share = len(part.answers) / len(chosen)
            scaled = np.sqrt(share) / part.errors[chosen]
            total += share * float((1 / part.errors[chosen] ** 2).sum())
            tokens, anchor = part.tokens[chosen], self.anchors[place][chosen]
            for h in range(heads):
                weights, mean = self.weights[place][chosen, :, h], self.means[place][chosen, h]
                apart = tokens - mean[:, None]
                seen = np.einsum("nl,nld,nlo->ndo", weights, apart, apart @ self.maps[h])
                seen *= scaled[:, None, None]
                power = np.einsum("ndo,ndo->n", seen, seen)
                keys[h] += np.einsum("ndo,neo->de", seen, seen, optimize=True)
                anchors[h] += (anchor * power[:, None]).T @ anchor
                means[h] += (mean * scaled[:, None] ** 2).T @ mean
        for h, (s, v) in enumerate(zip(self.layer.scores, self.layer.values, strict=True)):
            power = max(float(np.trace(keys[h])), TINY)
            inner = s.right @ anchors[h] @ s.right.T / power
            self.whitening[4 * h] = (_inverse_root(keys[h]), _inverse_root(inner))
            inner = s.left.T @ keys[h] @ s.left
            self.whitening[4 * h + 1] = (_inverse_root(anchors[h] / power), _inverse_root(inner))
            self.whitening[4 * h + 2] = (_inverse_root(means[h]), np.eye(v.rank))
            inner = v.left.T @ means[h] @ v.left
            self.whitening[4 * h + 3] = (np.eye(v.right.shape[1]), _inverse_root(inner))
        self.unit = 1.0 / np.sqrt(total) if self.layer.free_offset else 0.0

    def solve(self, residuals: Array, accuracy: float, steps: int) -> Array:
        shape = (len(residuals), self.unknowns)
        operator: Any = LinearOperator(
            shape, matvec=self.forward, rmatvec=self.backward, dtype=np.float64
        )
        limits = {"atol": accuracy, "btol": accuracy, "conlim": 0, "maxiter": steps}
        return np.asarray(lsmr(operator, residuals, **limits)[0])

    def moved(self, vector: Array) -> Layer:
        """The layer after a step, each map brought back to its rank."""
        steps, offset = self.blocks(vector)
        parts = [
            Factored.of(
                np.hstack([part.left * part.singular + steps[place - 1], part.left]),
                np.vstack([part.right, steps[place].T]),
                part.rank,
            )
            if part.rank
            else part
            for place, part in self._rights()
        ]
        return replace(
            self.layer,
            scores=tuple(parts[::2]),
            values=tuple(parts[1::2]),
            offset=self.layer.offset + offset,
        )

    def changes(self, vector: Array) -> tuple[list[Array], list[Array], Array]:
        """A step as changes of the dense maps."""
        steps, offset = self.blocks(vector)
        maps = [
            steps[place - 1] @ part.right + part.left @ steps[place].T
            for place, part in self._rights()
        ]
        return maps[::2], maps[1::2], offset


def _inverse_root(matrix: Array) -> Array:
    """The symmetric matrix to the power -1/2, directions of no weight left as the lightest."""
    if not matrix.size:
        return matrix
    sizes, vectors = np.linalg.eigh(matrix)
    sizes = np.maximum(sizes, LIGHTEST * max(float(sizes[-1]), TINY))
    return np.asarray((vectors / np.sqrt(sizes)) @ vectors.T)


def _outside(factor: Factored, step: Array) -> Array:
    return np.asarray(step - factor.right.T @ (factor.right @ step))


def fit_layer(layer: Layer, data: Sequence[Answered], rng: np.random.Generator) -> Polished:
    """Least squares over all answers from a layer close to it."""
    point = _Linear(layer, data)
    residuals = point.residuals()
    cost = float(residuals @ residuals)
    for _ in range(STEPS):
        point.whiten(rng)
        trial = _Linear(point.moved(point.solve(residuals, *STEP_LIMITS)), data)
        left = trial.residuals()
        found = float(left @ left)
        if not found < cost:
            break
        settled = found > SETTLED * cost
        point, residuals, cost = trial, left, found
        if settled:
            break
    point.whiten(rng)
    freedom = max(1, len(residuals) - point.layer.unknowns)
    inflation, misfit = np.sqrt(len(residuals) / freedom), float(np.sqrt(cost / freedom))
    spread: list[Array] = []
    for _ in range(REPLICATES):
        signs = [
            np.repeat(rng.choice([-1.0, 1.0], len(part.answers)), part.answers.shape[1])
            for part in data
        ]
        wild = inflation * residuals * np.concatenate(signs)
        # Answers that the fit leans on leave no residual: what the misfit says about them is added.
        wild += misfit * rng.standard_normal(len(residuals))
        step = point.solve(wild, *BAR_LIMITS)
        scores, values, offset = point.changes(step)
        squares = [part**2 for part in (*scores, *values, offset)]
        spread = [a + b for a, b in zip(spread, squares, strict=True)] if spread else squares
    bars = [DEPENDENT * np.sqrt(part / REPLICATES) for part in spread]
    bars = [np.maximum(part, np.sqrt(np.mean(part**2))) for part in bars]
    heads = len(layer.scores)
    return Polished(point.layer, bars[:heads], bars[heads:-1], bars[-1], misfit)
