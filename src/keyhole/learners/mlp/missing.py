"""Neurons that another route has missed, from what the others leave of random answers.

Statement.  Where all neurons but a few are known to some digits, those that hardly ever fire, or
            whose part of the Hessians drowned, are found one by one.
Queries.    1.3 per entry of the input and missing neuron, where it is alive; before that none:
            the random points of the refinement tell roughly where that is.
Algebra.    The known neurons are taken off the answers, then what is affine: with Q an orthonormal
            basis of [x, 1], a missing neuron leaves (1 - QQᵀ) φ(w.x + b) vᵀ. v is the first right
            singular vector, h = (what is left) v the neuron's part at every point. Its second
            moment Σ h x xᵀ has w among its extreme eigenvectors (Stein's identity); scale and
            bias come from a grid, all of w and b from damped steps. Points turned towards this w
            lie on both sides of the bend, most where the neuron is a line: on them the steps
            have one valley. A neuron joins the network if that halves what is left, and so on
            until none does.
Fails.      Neurons so weak that the errors of the known ones leave more than they do; several that
            are missing at once and are about equally strong.
Source.     Principal Hessian directions (Li 1992) for the start.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.solver import JacobianSystem, Problem, Stopping, descend
from keyhole.models.mlp import ACTIVATIONS
from keyhole.network.weights import Weights, hidden_layer, with_one


@dataclass(frozen=True, eq=False)
class CompletedNetwork:
    """The network, and the points and answers with those that were asked for it."""

    weights: Weights
    points: Float[Array, "n d"]
    answers: Float[Array, "n k"]


@dataclass(frozen=True)
class MissingOptions:
    """most: neurons that may be missing. faint: part in the answers, relative to that of a usual
    neuron, below which none is looked for. likely: share of its rough part that a neuron must not
    leave to be asked for; halved: share of all that is left that it must not leave to join. beside:
    points asked, per entry of the input."""

    most: int = 4
    faint: float = 0.01
    likely: float = 0.5
    halved: float = 0.5
    beside: float = 1.3


def add_missing(
    weights: Weights,
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    ask: Callable[[Array], Array],
    rng: np.random.Generator,
    options: MissingOptions | None = None,
) -> CompletedNetwork:
    """The network with further neurons, each of which takes at least half of what was left without
    it. Gated networks stay as they are."""
    options = MissingOptions() if options is None else options
    usual = float(np.linalg.norm(answers - answers.mean(axis=0))) / np.sqrt(weights.neurons)
    for _ in range(options.most if weights.gate is None else 0):
        homogeneous = with_one(points)
        if len(points) < 2 * homogeneous.shape[1] + 2:
            break
        known, left = _left(weights, homogeneous, answers)
        if np.linalg.norm(left) <= options.faint * usual:
            break
        part = _strongest(left)
        start, rest = fit_one(part, known, homogeneous, weights.activation)
        if rest > options.likely * np.linalg.norm(part):
            break
        fresh = turned_towards(points[: int(options.beside * len(start)) + 1], start[:-1], rng)
        points, answers = np.vstack([points, fresh]), np.vstack([answers, ask(fresh)])
        homogeneous = with_one(points)
        known, left = _left(weights, homogeneous, answers)
        found, _ = _descended(start, _strongest(left), known, homogeneous, weights.activation)
        column = ACTIVATIONS[weights.activation].value(homogeneous @ found[:-1])
        column = column - known @ (known.T @ column)
        outer = column @ left / max(float(column @ column), TINY)
        after = float(np.linalg.norm(left - np.outer(column, outer)))
        if not after <= options.halved * np.linalg.norm(left):
            break
        weights = Weights(
            np.vstack([weights.inner, found[:-1]]),
            np.column_stack([weights.outer, outer]),
            weights.affine,
            weights.activation,
        )
    return CompletedNetwork(weights, points, answers)


def awakened(
    points: Float[Array, "n d"],
    rows: Float[Array, "m e"],
    rng: np.random.Generator,
    share: float = 0.2,
    most: int = 24,
) -> Float[Array, "n d"]:
    """Points of the same norms as these, turned so that about this share of them lies on either
    side of every neuron's bend: each is turned towards the bends of a few neurons that seldom fire
    (or seldom rest), at most so many, and stays random otherwise."""
    arguments = with_one(points) @ rows.T
    either = np.minimum((arguments > -0.5).mean(axis=0), (arguments < 0.5).mean(axis=0))
    lacking = np.maximum(share - either, 0.0)
    lacking *= min(1.0, most / max(float(lacking.sum()), TINY))
    turned = points.copy()
    for i in range(len(points) if lacking.any() else 0):
        some = rng.permutation(np.flatnonzero(rng.random(len(rows)) < lacking))
        norm = np.linalg.norm(points[i])
        while len(some):
            head, triangle = np.linalg.qr(rows[some, :-1].T)
            wanted = rng.uniform(-1.0, 2.0, len(some)) * np.where(rows[some, -1] < 0, 1.0, -1.0)
            along, *_ = np.linalg.lstsq(triangle.T, wanted - rows[some, -1], rcond=1e-6)
            length = np.linalg.norm(along)
            if length < 0.8 * norm:
                across = points[i] - head @ (head.T @ points[i])
                across *= np.sqrt(norm**2 - length**2) / max(float(np.linalg.norm(across)), TINY)
                turned[i] = across + head @ along
                break
            some = some[: len(some) // 2]  # bends that are too far apart for one point
    return turned


def turned_towards(
    points: Float[Array, "n d"], row: Float[Array, " e"], rng: np.random.Generator
) -> Float[Array, "n d"]:
    """Points of the same norms as these, evenly from where w.x = 0 to where the bend lies and
    beyond."""
    way = row[:-1] / max(float(np.linalg.norm(row[:-1])), TINY)
    along = rng.uniform(0.0, 1.0, len(points)) * (1.0 if row[-1] <= 0 else -1.0)
    across = rng.standard_normal(points.shape)
    across -= np.outer(across @ way, way)
    across /= np.linalg.norm(across, axis=1, keepdims=True)
    unit = along[:, None] * way + np.sqrt(1.0 - along**2)[:, None] * across
    return np.asarray(np.linalg.norm(points, axis=1, keepdims=True) * unit)


def _strongest(left: Float[Array, "n k"]) -> Float[Array, " n"]:
    """What is left of the answers along the direction in which most is."""
    _, vectors = np.linalg.eigh(left.T @ left)
    return np.asarray(left @ vectors[:, -1])


def _left(weights: Weights, homogeneous: Array, answers: Array) -> tuple[Array, Array]:
    """A basis of what is affine, and what that and the neurons leave of the answers."""
    hidden, _ = hidden_layer(weights, homogeneous)
    known, rest = orthonormal(homogeneous), answers - hidden @ weights.outer.T
    return known, rest - known @ (known.T @ rest)


def orthonormal(columns: Float[Array, "n c"]) -> Float[Array, "n c"]:
    """A basis of their span."""
    sizes = np.maximum(np.linalg.norm(columns, axis=0), TINY)
    return np.asarray(np.linalg.qr(columns / sizes)[0])


def fit_one(
    part: Float[Array, " n"],
    basis: Float[Array, "n c"],
    homogeneous: Float[Array, "n e"],
    name: str,
) -> tuple[Float[Array, " p"], float]:
    """(w, b) and size of the neuron whose values, less what the basis explains, are `part`: the
    best of a few starts, or the first that explains nearly all; and the norm of what it leaves."""
    points = homogeneous[:, :-1]
    values, vectors = np.linalg.eigh((points * part[:, None]).T @ points)
    likely = np.argsort(np.abs(values - np.median(values)))[::-1][:8]
    starts = [_scanned(vectors[:, i], part, homogeneous, name) for i in likely]
    best, least = starts[0][0], np.inf
    for start, _ in sorted(starts, key=lambda scanned: -scanned[1]):
        found, left = _descended(start, part, basis, homogeneous, name)
        if left < least:
            best, least = found, left
        if least < 0.1 * np.linalg.norm(part):
            break
    return best, least


def _scanned(
    way: Float[Array, " d"],
    part: Float[Array, " n"],
    homogeneous: Float[Array, "n e"],
    name: str,
) -> tuple[Float[Array, " p"], float]:
    """Row and size of the neuron along ±`way` whose values are most alike `part`; and how much of
    its square that explains."""
    phi, times = ACTIVATIONS[name], homogeneous[:, :-1] @ way
    spread = max(float(times.std()), TINY)
    best, start = -np.inf, np.zeros(homogeneous.shape[1] + 1)
    lines = orthonormal(np.column_stack([np.ones(len(times)), times]))
    for scale in np.concatenate([side * np.logspace(-0.8, 0.8, 17) for side in (1.0, -1.0)]):
        biases = np.linspace(-6.0, 6.0, 41)
        table = phi.value((scale / spread) * times[:, None] + biases)
        table = table - lines @ (lines.T @ table)
        size = np.maximum((table**2).sum(axis=0), TINY)
        alike = part @ table
        i = int(np.argmax(alike**2 / size))
        if alike[i] ** 2 / size[i] > best:
            best = float(alike[i] ** 2 / size[i])
            start = np.concatenate([scale / spread * way, [biases[i], alike[i] / size[i]]])
    return start, best


def _descended(
    start: Float[Array, " p"],
    part: Float[Array, " n"],
    basis: Float[Array, "n c"],
    homogeneous: Float[Array, "n e"],
    name: str,
    steps: int = 40,
) -> tuple[Float[Array, " p"], float]:
    """Damped Gauss-Newton steps in row and size; and the norm of what is left."""
    phi = ACTIVATIONS[name]

    def move(at: Array) -> tuple[Array, Array]:
        column = at[-1] * phi.value(homogeneous @ at[:-1])
        return at, np.asarray(column - basis @ (basis.T @ column) - part)

    def linearize(state: tuple[Array, Array]) -> JacobianSystem:
        at, residual = state
        argument = homogeneous @ at[:-1]
        slopes = at[-1] * phi.first(argument)[:, None] * homogeneous
        tall = np.column_stack([slopes, phi.value(argument)])
        return JacobianSystem(residual, tall - basis @ (basis.T @ tall))

    problem = Problem(
        lambda state: float(state[1] @ state[1]),
        linearize,
        lambda state, step: move(state[0] + step),
    )
    end = descend(problem, move(start), Stopping(steps=steps, tolerance=1e-3))
    return end.state[0], float(np.sqrt(end.cost))
