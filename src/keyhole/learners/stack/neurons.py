"""The neurons of all blocks, as one network on the norm's sphere.

Statement.  For single tokens the wide layer is c_0([z]) = Σ_h M_h z + Σ_j outer_j φ(inner_j . z +
            b_j) + constant: one network with the neurons of all blocks, up to which way each neuron
            is turned (gelu(-u) = gelu(u) - u leaves a linear part, which order.py reads).
Queries.    Random points of the sphere, two numbers per unknown of a network with half as many
            neurons again as there may be: the number is doubled until the answers are explained.
Algebra.    Redundant neurons, thinned out (learners/mlp), then Gauss-Newton to the error of the
            limits.
Fails.      More neurons than fit into the largest attempt; an activation that is not in the table.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.block import Unclear
from keyhole.learners.mlp import (
    RedundancyOptions,
    Weights,
    descend,
    random_start,
    refine,
    thin_out,
    without_cheap,
)
from keyhole.learners.stack.shallow import Shallow, Terms
from keyhole.models.mlp import ACTIVATIONS, Mlp


@dataclass(frozen=True)
class NeuronOptions:
    """What a person might tune. first: neurons of the first attempt, per number of a point;
    growth: of the next; most: unknown entries of rows in the largest one. redundant: numbers per
    unknown. activations: classes of plain ones that are tried, gates: of gated ones; those in a
    class are alike from afar, and are told apart at the end. ridges, steps: of the descents from
    random rows. hopeless: residual, relative, at which more neurons are needed; near: at which the
    neurons are in place. explained: residual in units of the limits' error."""

    first: float = 1.5
    growth: float = 1.6
    most: int = 3200
    redundant: float = 2.5
    activations: tuple[tuple[str, ...], ...] = (("gelu", "gelu_tanh"), ("silu",), ("tanh",))
    gates: tuple[tuple[str, ...], ...] = (("silu",), ("gelu", "gelu_tanh"))
    ridges: tuple[float, ...] = (5e-6, 5e-8, 5e-10)
    steps: int = 60
    hopeless: float = 0.01
    near: float = 1e-7
    explained: float = 30.0


@dataclass(frozen=True, eq=False)
class Union:
    """The network, its linear part what the heads do not explain; and what was asked."""

    network: Mlp
    asked: Terms = field(repr=False)


def find_neurons(
    shallow: Shallow,
    whole: Float[Array, "d k"],
    doubt: float,
    rng: np.random.Generator,
    options: NeuronOptions | None = None,
) -> Union:
    """`whole`: the sum of the value maps. Raises Unclear."""
    options = NeuronOptions() if options is None else options
    outputs, width = whole.shape
    asked = shallow.ask_alone(shallow.points(rng, 2 * width), "neurons")
    if is_affine(asked, doubt):
        raise Unclear("single tokens show no neurons: stacks of attention alone are not solved")
    for gated in (False, True):
        count = int(options.first * (width + 1))
        while count * (width + 1) * (1 + gated) <= options.most:
            unknowns = count * ((width + 1) * (1 + gated) + outputs) / outputs + width + 1
            more = int(options.redundant * unknowns) - len(asked.anchors)
            if more > 0:
                asked = asked + shallow.ask_alone(shallow.points(rng, more), "neurons")
            found = fit_union(asked, whole, count, gated, doubt, options, rng)
            if found is not None:
                return Union(found, asked)
            count = int(options.growth * count)
    raise Unclear("no network of the sizes tried explains single tokens")


def is_affine(asked: Terms, doubt: float) -> bool:
    table = np.column_stack([asked.anchors, np.ones(len(asked.anchors))])
    rest = asked.limit - table @ np.linalg.lstsq(table, asked.limit, rcond=None)[0]
    return bool(np.abs(rest).max() < 1e3 * doubt)


def fit_union(
    asked: Terms,
    whole: Float[Array, "d k"],
    neurons: int,
    gated: bool,
    doubt: float,
    options: NeuronOptions,
    rng: np.random.Generator,
) -> Mlp | None:
    """The network from starts with so many neurons, if it explains the limits."""
    points, answers = asked.anchors, asked.limit - asked.anchors @ whole.T
    scale = float(np.sqrt(np.mean(answers**2)))
    near = max(options.near * scale, options.explained * doubt)
    classes = options.gates if gated else options.activations
    rivals = [
        (names, random_start(neurons, points, len(whole), names[0], gated, rng))
        for names in classes
    ]
    for ridge in options.ridges:
        tried = [
            (names, *descend(start, points, answers, ridge=ridge, steps=options.steps))
            for names, start in rivals
        ]
        least = min(left for _, _, left in tried)
        if least > options.hopeless * scale:
            return None
        rivals = [(names, found) for names, found, left in tried if left <= 3.0 * least]
        for names, found in rivals:
            fewer = without_cheap(found, points, answers, 3.0 * least)
            for name in names:
                start = replace(fewer, activation=name)
                settled, left = descend(
                    start, points, answers, ridge=1e-17, steps=options.steps, target=0.1 * near
                )
                if left > near:
                    continue
                done = finish_union(settled, points, answers, near, doubt, options, rng)
                if done is not None:
                    return done
    return None


def finish_union(
    weights: Weights,
    points: Float[Array, "n k"],
    answers: Float[Array, "n d"],
    near: float,
    doubt: float,
    options: NeuronOptions,
    rng: np.random.Generator,
) -> Mlp | None:
    """Neurons that can be spared leave; the others are refined to the error of the limits."""
    scale = float(np.sqrt(np.mean(answers**2)))
    thin = thin_out(weights, points, answers, near, scale, RedundancyOptions(spare=1e-5))
    weights = weights if thin is None else thin
    refined = refine(weights, points, answers, doubt / scale, errors=False, rng=rng)
    if refined.residual > options.explained * doubt:
        return None
    found = refined.weights
    gate = found.gate
    return Mlp(
        found.inner[:, :-1],
        found.inner[:, -1],
        found.outer,
        activation=found.activation,
        linear=found.affine[:, :-1],
        offset=found.affine[:, -1],
        gate=None if gate is None else gate[:, :-1],
        gate_bias=None if gate is None else gate[:, -1],
    )


def slopes_of(network: Mlp, points: Float[Array, "n k"]) -> Float[Array, "n m k"]:
    """Derivatives of the hidden layer by the point."""
    phi = ACTIVATIONS[network.activation]
    inner = points @ network.inner.T + network.inner_bias
    if network.gate is None or network.gate_bias is None:
        return np.asarray(phi.first(inner)[..., None] * network.inner)
    gate: Array = points @ network.gate.T + network.gate_bias
    return np.asarray(
        phi.value(gate)[..., None] * network.inner
        + (phi.first(gate) * inner)[..., None] * network.gate
    )
