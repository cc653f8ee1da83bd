"""A small network from random points alone: more neurons than it has, then fewer.

Statement.  A network of m neurons is found, activation and number included, from about 2.5 times
            as many numbers as it has parameters, wherever its answers show it at all: on spheres
            too small for Hessians, with gates, at any precision. Work grows like the cube of the
            unknowns, so it is for small networks, and for the few neurons that another route has
            missed.
Queries.    None: points and answers are given.
Algebra.    `network.redundancy`, for one class of activations after the other.
Fails.      Where there are too few neurons, or the activation is another one: the answers are not
            explained.
Source.     That of `network.redundancy`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.network.redundancy import (
    Data,
    PruningOptions,
    costs_of_leaving,
    descend,
    eliminate,
    fit_network,
    without_cheap,
)
from keyhole.network.weights import Weights, chosen, with_one

ALIKE = (("gelu", "gelu_tanh"), ("silu",), ("tanh",))  # activations that are alike from afar


@dataclass(frozen=True)
class RedundancyOptions:
    """steps: of a descent, at most. spare: what neurons that leave together may cost, relative to
    the answers, in the first round. explained: what the network may leave, relative to the answers,
    in units of their rounding; at least `loose`. candidates: neurons tried one by one when none is
    cheap to spare any more. more: neurons that join a network of which some are wrong: at least so
    many, and one for so many of its own (`share`)."""

    steps: int = 100
    spare: float = 1e-3
    explained: float = 30.0
    loose: float = 1e-7
    candidates: int = 4
    more: int = 4
    share: int = 12

    def accept(self, answers: Array, unit: float) -> float:
        """Root mean square that a network may leave of answers with this rounding."""
        scale = float(np.sqrt(np.mean(answers**2)))
        return scale * max(self.loose, self.explained * unit)


def fit_with_redundancy(
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    neurons: int,
    names: Sequence[str],
    gated: bool,
    unit: float,
    rng: np.random.Generator,
) -> Weights | None:
    """The network that explains the answers with the fewest neurons, from starts with so many; None
    if none of the activations does."""
    accepted = RedundancyOptions().accept(answers, unit)
    for group in ALIKE:
        alike = tuple(name for name in group if name in names)
        if alike:
            tried = fit_network(points, answers, neurons, alike, gated, accepted, rng)
            if tried.network is not None:
                return tried.network
    return None


def repair(
    weights: Weights,
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    unit: float,
    rng: np.random.Generator,
) -> Weights | None:
    """A network of which a few neurons are missing or wrong: some random ones join it."""
    options = RedundancyOptions()
    return fit_network(
        points,
        answers,
        weights.neurons + max(options.more, weights.neurons // options.share),
        (weights.activation,),
        weights.gate is not None,
        options.accept(answers, unit),
        rng,
        options=PruningOptions(ridges=PruningOptions.ridges[-1:], rounds=1),
        known=weights,
    ).network


def thin_out(
    weights: Weights,
    points: Float[Array, "n d"],
    answers: Float[Array, "n k"],
    explained: float,
    scale: float,
    options: RedundancyOptions,
) -> Weights | None:
    """Neurons leave while those that stay explain the answers to `explained`."""
    data = Data(with_one(points), answers)
    best: Weights | None = None
    spare = options.spare * scale

    def settle(fewer: Weights) -> tuple[Weights, float]:
        state = descend(fewer, data, 0.0, options.steps, 0.1 * explained)
        return state.weights, state.left

    while True:
        fewer = without_cheap(eliminate(weights, data, 0.0), data, spare)
        settled, left = settle(fewer)
        if left <= explained:
            if best is not None and settled.neurons == best.neurons:
                break
            best = weights = settled
        elif spare > explained and fewer.neurons < weights.neurons:
            spare /= 10.0
        else:
            break
    while best is not None and best.neurons > 1:
        order = np.argsort(costs_of_leaving(best, data)[0])[: options.candidates]
        for j in order:
            settled, left = settle(chosen(best, np.delete(np.arange(best.neurons), j)))
            if left <= explained:
                best = settled
                break
        else:
            break
    return best
