"""A small network from random points alone: more neurons than it has, then fewer.

Statement.  A network of m neurons is found, activation and number included, from about 2.5 times
            as many numbers as it has parameters, wherever its answers tell it apart at all: on
            spheres too small for Hessians, with gates, at any precision. Work grows like the cube
            of the unknowns, so it is for small networks, and for the few neurons that another
            route has missed.
Queries.    None: points and answers are given.
Algebra.    (1) M > m neurons with random rows descend on all answers (refinement.py: the linear
            part eliminated, damped steps). With redundancy some neuron is near every true one and
            there is no bad valley; a ridge on outer, lowered hundredfold again and again, keeps
            neurons that do the same from working against each other. Of the activations, those
            that leave three times as much as the best are dropped after every round.
            (2) Leaving neuron j out costs |B_j|^2 / (Φ^t Φ)^-1_jj, B the linear part, which all
            others take up. The cheapest leave while that is little; what stays descends again, and
            is accepted if it explains the answers. (3) So until nobody can be spared.
Fails.      Where M is too small, or the activation is another one: the answers are not explained.
Source.     Variable projection (Golub and Pereyra 1973); that students with more neurons than the
            teacher find it is folklore (e.g. Safran and Shamir 2018).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import solve_triangular

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.refinement import (
    Weights,
    chosen,
    descend,
    hidden_layer,
    with_one,
)


@dataclass(frozen=True)
class RedundancyOptions:
    """ridges: on outer, per point, one round of steps with each. steps: in a round, at most.
    drop: what an activation may leave, relative to the best, to stay. progress: by which factor
    a round takes down what is left, at least: where the network is the right one, it is the root of
    the ridges' ratio, nearly ten. spare: what neurons that
    leave together may cost, relative to the answers, in the first round. explained: what the final
    network may leave, relative to the answers, in units of their rounding; at most `loose`.
    candidates: neurons tried one by one when none is cheap to spare any more."""

    ridges: tuple[float, ...] = (5e-6, 5e-8, 5e-10, 5e-12)
    steps: int = 100
    drop: float = 3.0
    progress: float = 2.5
    spare: float = 1e-3
    explained: float = 30.0
    loose: float = 1e-7
    candidates: int = 4


def fit_with_redundancy(
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    starts: Sequence[Weights],
    unit: float,
    options: RedundancyOptions | None = None,
) -> Weights | None:
    """The network that explains the answers with the fewest neurons, from starts that have more
    (one for each activation that it may have); None if none of them does."""
    options = RedundancyOptions() if options is None else options
    scale = float(np.sqrt(np.mean(answers**2)))
    explained = scale * max(options.loose, options.explained * unit)
    rivals = list(starts)
    best, least = rivals[0], np.inf
    for ridge in options.ridges:
        before = least
        done = [descend(one, points, answers, ridge=ridge, steps=options.steps) for one in rivals]
        best, least = min(done, key=lambda pair: pair[1])
        if least > max(before / options.progress, 0.1 * options.spare * scale):
            return None
        rivals = [found for found, left in done if left <= options.drop * least]
    if least > options.spare * scale:
        return None
    return thin_out(best, points, answers, explained, scale, options)


def repair(
    weights: Weights,
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    unit: float,
    rng: np.random.Generator,
) -> Weights | None:
    """A network of which a few neurons are missing or wrong: some random ones join it."""
    count = max(4, weights.neurons // 12)
    gated = weights.gate is not None
    more = random_start(count, points, len(weights.outer), weights.activation, gated, rng)
    gate = None
    if weights.gate is not None and more.gate is not None:
        gate = np.concatenate([weights.gate, more.gate])
    start = Weights(
        np.concatenate([weights.inner, more.inner]),
        np.concatenate([weights.outer, more.outer], axis=1),
        weights.affine,
        weights.activation,
        gate,
    )
    mild = RedundancyOptions(ridges=(5e-8, 5e-10, 5e-12))
    return fit_with_redundancy(points, answers, [start], unit, mild)


def thin_out(
    weights: Weights,
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    explained: float,
    scale: float,
    options: RedundancyOptions,
) -> Weights | None:
    """Neurons leave while those that stay explain the answers to `explained`."""
    best: Weights | None = None
    spare = options.spare * scale
    while True:
        fewer = without_cheap(weights, points, answers, spare)
        found, left = settle(fewer, points, answers, explained, options)
        if left <= explained:
            if best is not None and found.neurons == best.neurons:
                break
            best = weights = found
        elif spare > explained and fewer.neurons < weights.neurons:
            spare /= 10.0
        else:
            break
    while best is not None and best.neurons > 1:
        order = np.argsort(costs_of_leaving(best, points, answers)[0])[: options.candidates]
        for j in order:
            found, left = settle(
                chosen(best, np.delete(np.arange(best.neurons), j)),
                points, answers, explained, options,
            )  # fmt: skip
            if left <= explained:
                best = found
                break
        else:
            break
    return best


def settle(
    weights: Weights, points: Array, answers: Array, explained: float, options: RedundancyOptions
) -> tuple[Weights, float]:
    """Steps with next to no ridge."""
    return descend(
        weights, points, answers, ridge=1e-17, steps=options.steps, target=0.1 * explained
    )


def without_cheap(weights: Weights, points: Array, answers: Array, spare: float) -> Weights:
    """Neurons leave, the cheapest first, while the root mean square left stays below `spare`."""
    while weights.neurons > 1:
        costs, left = costs_of_leaving(weights, points, answers)
        j = int(np.argmin(costs))
        if costs[j] + left > spare**2 * answers.size:
            break
        weights = chosen(weights, np.delete(np.arange(weights.neurons), j))
    return weights


def costs_of_leaving(
    weights: Weights, points: Float[Array, "n d"], answers: Float[Array, "n k"]
) -> tuple[Float[Array, " m"], float]:
    """Squares that each neuron alone would leave if the others' linear parts took over, and the
    squares that are left as it is."""
    homogeneous = with_one(points)
    hidden, _ = hidden_layer(weights, homogeneous)
    columns = np.column_stack([hidden, homogeneous])
    columns = columns / np.maximum(np.linalg.norm(columns, axis=0), TINY)
    count = columns.shape[1]
    # neurons that are the same to rounding: a ridge makes either of them cheap
    head, triangle = np.linalg.qr(np.vstack([columns, 1e-7 * np.eye(count)]))
    inverse = solve_triangular(triangle, np.eye(count), check_finite=False)
    linear = inverse @ (head[: len(points)].T @ answers)
    costs = (linear**2).sum(axis=1) / (inverse**2).sum(axis=1)
    return costs[: weights.neurons], float(((answers - columns @ linear) ** 2).sum())


def random_start(
    neurons: int,
    points: Float[Array, "n d"],
    outputs: int,
    name: str,
    gated: bool,
    rng: np.random.Generator,
) -> Weights:
    """Rows whose arguments are of order one at the points."""
    width = points.shape[1]
    size = np.sqrt(np.mean((points**2).sum(axis=1)))

    def rows() -> Array:
        return np.column_stack(
            [rng.standard_normal((neurons, width)) / size, 0.5 * rng.standard_normal(neurons)]
        )

    empty = np.zeros((outputs, neurons)), np.zeros((outputs, width + 1))
    inner = rows()
    if gated:
        inner /= np.linalg.norm(inner, axis=1, keepdims=True)
    return Weights(inner, *empty, name, rows() if gated else None)
