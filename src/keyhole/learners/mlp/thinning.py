"""Neurons that leave on the way: candidates that lost, idle ones, those that nothing shows."""

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.learners.mlp.refinement import RefinedNetwork, RefinementOptions, refine
from keyhole.network.redundancy import Data, costs_of_leaving
from keyhole.network.weights import Weights, chosen, with_one


def decided(
    weights: Weights, which: Int[Array, " c"], points: Array, answers: Array, unit: float
) -> Weights:
    """Of several candidates for one neuron, the one that takes the larger part in a fit."""
    for _ in range(4):
        numbers, counts = np.unique(which, return_counts=True)
        if (counts == 1).all():
            break
        fitted = refine(
            weights,
            points,
            answers,
            unit,
            options=RefinementOptions(steps=4 if weights.inner.size < 60000 else 0),
            errors=False,
        ).weights
        part = np.linalg.norm(weights.inner if weights.gate is None else weights.gate, axis=1)
        part = part * np.linalg.norm(fitted.outer, axis=0)
        rivals = [np.flatnonzero(which == number) for number in numbers[counts > 1]]
        weakest = [rows[np.argmin(part[rows])] for rows in rivals]
        kept = np.setdiff1d(np.arange(len(which)), weakest)
        weights, which = chosen(weights, kept), which[kept]
    return weights


def refine_active(
    weights: Weights,
    points: Array,
    answers: Array,
    unit: float,
    idle: float,
    rng: np.random.Generator,
) -> RefinedNetwork:
    """The network refined until it has no idle neurons: those that change no answer leave."""
    while True:
        refined = refine(weights, points, answers, unit, rng=rng)
        fitted = refined.weights
        size = np.linalg.norm(fitted.outer, axis=0) * np.linalg.norm(rows_of(fitted), axis=1)
        kept = (size > idle * np.median(size)) & first_of_each(fitted)
        if kept.all():
            return refined
        weights = chosen(fitted, kept)


def without_unseen(
    refined: RefinedNetwork, points: Array, answers: Array, unit: float, rng: np.random.Generator
) -> RefinedNetwork:
    """The network without the neurons that explain no more of the answers than their numbers would
    explain of rounding, each within six standard errors."""
    while True:
        weights = refined.weights
        costs, left = costs_of_leaving(weights, Data(with_one(points), answers))
        own = points.shape[1] + 1 + answers.shape[1]
        if weights.gate is not None:
            own += points.shape[1] + 1
        surplus = max(answers.size - own * weights.neurons, 1)
        unseen = costs <= 36.0 * own * left / surplus
        if not unseen.any() or unseen.all():
            return refined
        refined = refine(chosen(weights, ~unseen), points, answers, unit, rng=rng)


def rows_of(weights: Weights) -> Float[Array, "m e"]:
    """The arguments of φ."""
    return weights.inner if weights.gate is None else weights.gate


def first_of_each(weights: Weights, same: float = 1e-10) -> Array:
    """Which neurons are not the same as an earlier one."""
    rows = rows_of(weights)
    lengths = np.maximum(np.linalg.norm(rows, axis=1), TINY)
    unit = rows / lengths[:, None]
    parallel = np.abs(unit @ unit.T) > 1.0 - same
    alike = np.abs(np.log(lengths[:, None] / lengths)) < np.sqrt(same)
    return ~np.tril(parallel & alike, -1).any(axis=1)
