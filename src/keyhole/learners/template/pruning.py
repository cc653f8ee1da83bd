"""Surplus neurons are taken away, one after another, while the fit stays as good as it was.

Statement.  From weights that nearly explain the answers with too many neurons to weights that do
            with as many as wanted.
Queries.    None.
Algebra.    Optimal brain surgeon: without a neuron of outgoing weights w, at places q, the cost
            rises by w^t [(H^-1)_qq]^-1 w, H = J^t J, and all other weights move by
            -(H^-1)_:q [(H^-1)_qq]^-1 w. The neurons that cost least are tried in turn: a few steps
            of the fit without one, and it is gone if the loss is about what it was. Where none may
            go, the fit goes on for a while with all.
When it fails. The valley is a wrong one: then the loss stays up, which the caller sees.
Source.     Hassibi and Stork (1993), "Optimal brain surgeon".
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array
from keyhole.fitting.solver import factor_damped
from keyhole.learners.template.descent import Fitted
from keyhole.learners.template.forward import Residuals
from keyhole.learners.template.widening import Neuron, Pair

RIDGE = 1e-11  # of H, over its mean diagonal entry: symmetries leave H singular
TRIED = 3  # neurons, before the fit goes on with all of them
AS_GOOD = 2.0  # loss without a neuron over that with it, at most


@dataclass(frozen=True)
class Pruned:
    """A fit with the neurons that are left, and which weights still move."""

    fitted: Fitted
    free: Array
    neurons: Sequence[Neuron]


def prune(
    residuals: Residuals,
    fitted: Fitted,
    neurons: Sequence[Neuron],
    pairs: Sequence[Pair],
    refit: Callable[[Array, Array, bool], Fitted],
    out_of_time: Callable[[], bool],
    *,
    free: Array | None = None,
    force: bool = True,
    level: float = 0.0,
) -> Pruned:
    """Takes neurons away until each pair has as many as the template.

    Args:
        residuals: of the wider template.
        fitted: where they nearly vanish.
        neurons: that are there.
        pairs: how many of them are wanted.
        refit: a fit from weights, with those that move, short or long.
        out_of_time: then the cheapest go without a fit.
        free: which weights move; None for all.
        force: whether neurons go that cost something, where there are too many left.
        level: loss that is small enough as long as there are too many.
    """
    free = np.ones(len(fitted.weights), dtype=bool) if free is None else free
    state = Pruned(fitted, free, list(neurons))
    patience = 1
    while surplus := count_surplus(state.neurons, pairs):
        order, without = rank_neurons(residuals, state, surplus)
        best: Pruned | None = None
        for one in order[: 1 if out_of_time() else TRIED]:
            trial = without(one)
            ended = refit(trial.fitted.weights, trial.free, False)
            if best is None or ended.loss < best.fitted.loss:
                best = replace(trial, fitted=ended)
            if ended.loss <= max(AS_GOOD * state.fitted.loss, level):
                break
        assert best is not None
        good = best.fitted.loss <= max(AS_GOOD * state.fitted.loss, level)
        if good or (force and not patience):
            state = best
        elif patience:
            patience -= 1
            state = replace(state, fitted=refit(state.fitted.weights, state.free, True))
        else:
            break
    return state


def count_surplus(neurons: Sequence[Neuron], pairs: Sequence[Pair]) -> dict[int, int]:
    """By pair, how many neurons there are too many; pairs with none are left out."""
    have = [sum(one.pair == number for one in neurons) for number in range(len(pairs))]
    return {
        number: count - pair.neurons
        for number, (count, pair) in enumerate(zip(have, pairs, strict=True))
        if count > pair.neurons
    }


def rank_neurons(
    residuals: Residuals, state: Pruned, surplus: dict[int, int]
) -> tuple[list[int], Callable[[int], Pruned]]:
    """Neurons of pairs with a surplus, cheapest first, and the state without one of them."""
    moving, weights = np.flatnonzero(state.free), state.fitted.weights
    tall = residuals.jacobian(weights)[:, moving]
    normal = tall.T @ tall
    solve, _ = factor_damped(normal, RIDGE * float(np.mean(normal.diagonal())))
    inverse = solve(np.eye(len(moving)))
    place = np.full(len(weights), -1)
    place[moving] = np.arange(len(moving))
    costs, moves = {}, {}
    for number, neuron in enumerate(state.neurons):
        if neuron.pair in surplus:
            at = neuron.outgoing[state.free[neuron.outgoing]]
            pull = np.linalg.solve(inverse[np.ix_(place[at], place[at])], weights[at])
            costs[number] = float(weights[at] @ pull)
            moves[number] = inverse[:, place[at]] @ pull

    def without(number: int) -> Pruned:
        moved, free = weights.copy(), state.free.copy()
        moved[moving] -= moves[number]
        moved[state.neurons[number].all] = 0.0
        free[state.neurons[number].all] = False
        rest = [one for place, one in enumerate(state.neurons) if place != number]
        return Pruned(replace(state.fitted, weights=moved), free, rest)

    return sorted(costs, key=lambda number: costs[number]), without
