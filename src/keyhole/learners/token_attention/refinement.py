"""All answers at once: Gauss-Newton on the maps of every head, of low rank.

Statement.  Unknowns are A_h and W_h (`algebra`), each of a rank; the residual is the answer of the
            model less that of the box, in coordinates, in standard errors.
Algebra.    A map is left diag(singular) right. A step is X right + left Y' with Y orthogonal to
            right: as many unknowns as there are. With a the weights of a prompt, m = sum a_j d_j
            the mean step from the anchor and C its covariance, the answer moves by
            dA m + A C dW' e_t. Ranks are read off the maps of the start: the largest fall of their
            singular values, if it is a clear one.
            Standard errors: the same linear problem for answers and tokens that are disturbed by
            as much as they may be off.
When it fails. From a start too far away the fit settles above the noise; `level` tells.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.linalg import lstsq

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.gauss_newton import FitOptions, Linearization, fit_least_squares
from keyhole.learners.token_attention.algebra import Maps
from keyhole.learners.token_attention.contexts import Contexts
from keyhole.linalg.rank import find_fall
from keyhole.linalg.softmax import softmax


@dataclass(frozen=True, eq=False)
class LowRankMap:
    """left diag(singular) right, `rest` an orthonormal complement of the rows of right."""

    left: Float[Array, "d r"]
    singular: Float[Array, " r"]
    right: Float[Array, "r d"]
    rest: Float[Array, "q d"]

    @classmethod
    def of(cls, matrix: Float[Array, "d d"], rank: int) -> "LowRankMap":
        left, singular, right = np.linalg.svd(matrix)
        return cls(left[:, :rank], singular[:rank], right[:rank], right[rank:])

    @property
    def matrix(self) -> Float[Array, "d d"]:
        return np.asarray((self.left * self.singular) @ self.right)

    @property
    def rank(self) -> int:
        return len(self.singular)

    @property
    def unknowns(self) -> int:
        return self.left.size + self.rest.shape[0] * self.rank

    def split(self, step: Array) -> tuple[Array, Array]:
        """X (d, r) and Y' (r, d) of a step."""
        first = step[: self.left.size].reshape(self.left.shape)
        return first, step[self.left.size :].reshape(self.rank, -1) @ self.rest

    def change(self, step: Array) -> Float[Array, "d d"]:
        return self.change_of(*self.split(step))

    def change_of(self, first: Array, second: Array) -> Float[Array, "d d"]:
        """X right + left Y'."""
        return np.asarray(first @ self.right + self.left @ second)


Point = tuple[LowRankMap, ...]  # value and score of each head in turn


@dataclass(frozen=True, eq=False)
class AnsweredPrompts:
    """Prompts with their answers (less that of the anchor alone), the coordinates of all tokens,
    and the standard errors of both."""

    contexts: Contexts
    answers: Float[Array, "n d"]
    tokens: Float[Array, "V d"]
    sigma: float
    token_errors: Float[Array, " V"]

    @cached_property
    def anchors(self) -> Float[Array, "n d"]:
        return np.asarray(self.tokens[self.contexts.anchors])

    @cached_property
    def steps(self) -> Float[Array, "n m d"]:
        """From the anchor to every token."""
        return np.asarray(self.tokens[self.contexts.tokens] - self.anchors[:, None])

    @cached_property
    def log_counts(self) -> Float[Array, "n m"]:
        """Minus infinity for a token that is absent."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.contexts.counts))

    def disturbed(self, rng: np.random.Generator) -> "AnsweredPrompts":
        """As it might have been: other errors of the answers and of the tokens, which all prompts
        share, and which the answers of anchors alone are taken off with."""
        moved = self.token_errors[:, None] * rng.standard_normal(self.tokens.shape)
        noise = self.sigma * rng.standard_normal(self.answers.shape)
        answers = self.answers + noise - moved[self.contexts.anchors]
        return replace(self, answers=answers, tokens=self.tokens + moved)


class AttentionModel:
    """The forward model of `AnsweredPrompts` on points."""

    def __init__(self, data: AnsweredPrompts) -> None:
        self.data = data

    def look(self, score: Array) -> tuple[Array, Array]:
        """Weights of one head on every prompt, and its mean step."""
        scores = np.einsum("nd,nmd->nm", self.data.anchors @ score, self.data.steps)
        weights = softmax(scores + self.data.log_counts)
        return weights, np.einsum("nm,nmd->nd", weights, self.data.steps)

    def predict(self, point: Point) -> Float[Array, "n d"]:
        total = np.zeros_like(self.data.answers)
        for value, score in zip(point[::2], point[1::2], strict=True):
            total += self.look(score.matrix)[1] @ value.matrix.T
        return total

    def residual(self, point: Point) -> Array:
        return np.asarray((self.predict(point) - self.data.answers).ravel() / self.data.sigma)

    def linearize(self, point: Point) -> Linearization:
        matrix = self.jacobian(point)
        return Linearization(
            self.residual(point),
            matrix.shape[1],
            lambda step: matrix @ step,
            lambda vector: matrix.T @ vector,
            lambda: matrix,
        )

    def jacobian(self, point: Point) -> Float[Array, "numbers unknowns"]:
        n, d = self.data.answers.shape
        parts = []
        for value, score in zip(point[::2], point[1::2], strict=True):
            weights, mean = self.look(score.matrix)
            # X of the value acts on entry i alone; Y' on the mean step outside `right`
            first = np.einsum("ij,nk->nijk", np.eye(d), mean @ value.right.T)
            second = np.einsum("ik,nq->nikq", value.left, mean @ value.rest.T)
            parts += [first.reshape(n, d, -1), second.reshape(n, d, -1)]
            spread = np.einsum("nm,nmd,nme->nde", weights, self.data.steps, self.data.steps)
            spread -= mean[:, :, None] * mean[:, None, :]
            reach = np.einsum("ij,njk->nik", value.matrix, spread)  # by a change of W' e_t
            # W = left . right: e_t X right moves along the rows of right, and so on
            first = np.einsum("nl,nik->nilk", self.data.anchors, reach @ score.right.T)
            second = np.einsum("nk,niq->nikq", self.data.anchors @ score.left, reach @ score.rest.T)
            parts += [first.reshape(n, d, -1), second.reshape(n, d, -1)]
        return np.asarray(np.concatenate(parts, axis=2).reshape(n * d, -1) / self.data.sigma)

    def retract(self, point: Point, step: Array) -> Point:
        return tuple(
            LowRankMap.of(part.matrix + change, part.rank)
            for part, change in zip(point, changes_of(point, step), strict=True)
        )


def changes_of(point: Point, step: Array) -> list[Float[Array, "d d"]]:
    """The change of every map by a step."""
    ends = np.cumsum([0, *(part.unknowns for part in point)])
    return [part.change(step[a:b]) for part, a, b in zip(point, ends[:-1], ends[1:], strict=True)]


@dataclass(frozen=True, eq=False)
class RefinedMaps:
    """The fitted maps, steps as large as their standard errors, and the misfit in units of what
    errors of answers and tokens leave."""

    point: Point
    draws: list[Array]  # steps
    level: float


def choose_rank(matrix: Float[Array, "d d"], precise: bool) -> int:
    """Where the singular values fall most, if they fall to what noise leaves of zeros. Those of a
    matrix that is known precisely may fall far and not be zero yet."""
    singular = np.linalg.svd(matrix, compute_uv=False)
    fall = find_fall(singular, fall=1e5 if precise else 30.0, small=1.0)
    return len(singular) if fall is None else fall


def refine(
    maps: Maps,
    ranks: list[tuple[int, int]],
    data: AnsweredPrompts,
    rng: np.random.Generator,
    steps: int,
) -> RefinedMaps:
    """Least squares over all answers, from maps near enough, of given ranks (value, score)."""
    start: list[LowRankMap] = []
    for value, score, (one, other) in zip(maps.values, maps.scores, ranks, strict=True):
        start += [LowRankMap.of(value, one), LowRankMap.of(score, other)]
    model = AttentionModel(data)
    options = FitOptions(steps=steps, dense_unknowns=4096, probes=0, tolerance=1e-6, damping=1e-6)
    point = fit_least_squares(model, tuple(start), options, rng=rng).point
    point, residual, jacobian, sizes = settle(model, point)
    others = [AttentionModel(data.disturbed(rng)).residual(point) - residual for _ in range(4)]
    noise = np.stack(others, axis=1)
    draws = lstsq(jacobian, noise, lapack_driver="gelsy", cond=1e-15)[0]
    expected = float(np.sqrt(np.mean((noise - jacobian @ draws) ** 2)))
    level = float(np.sqrt(np.mean(residual**2))) / max(expected, TINY)
    return RefinedMaps(point, list(max(level, 1.0) * draws.T / sizes), level)


def settle(model: AttentionModel, point: Point) -> tuple[Point, Array, Array, Array]:
    """Plain Gauss-Newton steps by orthogonal factors, which keep directions that normal equations
    lose; the point, its residual, its Jacobian in units of its columns, and these units."""
    residual, best = model.residual(point), np.inf
    while True:
        jacobian = model.jacobian(point)
        sizes = np.maximum(np.linalg.norm(jacobian, axis=0), TINY)
        cost = float(residual @ residual)
        if not cost < 0.5 * best:  # a step that gains less is rounding
            return point, residual, jacobian / sizes, sizes
        best = cost
        step = lstsq(jacobian / sizes, -residual, lapack_driver="gelsy", cond=1e-15)[0] / sizes
        other = model.retract(point, step)
        trial = model.residual(other)
        if float(trial @ trial) < cost:
            point, residual = other, trial
