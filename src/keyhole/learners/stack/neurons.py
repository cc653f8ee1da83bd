"""The neurons of all blocks, as one network on the norm's sphere.

Statement.  For single tokens the wide layer is c_0([z]) = Σ_h M_h z + Σ_j outer_j φ(inner_j . z +
            b_j) + constant: one network with the neurons of all blocks, up to which way each neuron
            is turned (gelu(-u) = gelu(u) - u leaves a linear part, which order.py reads). Behind a
            norm at the end the part along z is hidden, and with it multiples of z itself.
Queries.    Random points of the sphere at two sizes, a few numbers per unknown of the network that
            is tried: its neurons become more until the answers are explained.
Algebra.    Redundant neurons, thinned out (`network.redundancy`), one activation after the other.
Fails.      More neurons than fit into the largest attempt; an activation that is not in the table.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.block import Unclear
from keyhole.learners.stack.shallow import Shallow, Terms
from keyhole.models.mlp import ACTIVATIONS, Mlp
from keyhole.network.observation import Direction, Observation, Value
from keyhole.network.redundancy import fit_network


@dataclass(frozen=True)
class NeuronOptions:
    """What a person might tune. first: neurons of the first attempt, per number of a point;
    growth: of the next; most: unknown entries of rows in the largest one. redundant: numbers per
    unknown of an attempt. activations: classes of plain ones that are tried, gates: of gated ones;
    those in a class are alike from afar, and are told apart at the end. few: what is left,
    relative to the answers, where there are too few neurons of any activation; further: sizes that
    are tried when less is left. behind: what gated neurons may leave relative to plain ones, or
    these to those, to be tried next. explained: residual in units of the limits' error."""

    first: float = 2.0
    growth: float = 1.6
    most: int = 4000
    redundant: float = 3.5
    activations: tuple[tuple[str, ...], ...] = (("gelu", "gelu_tanh"), ("silu",), ("tanh",))
    gates: tuple[tuple[str, ...], ...] = (("silu",), ("gelu", "gelu_tanh"))
    few: float = 0.06
    further: int = 4
    behind: float = 3.0
    explained: float = 10.0


Trial = tuple[int, bool, tuple[str, ...]]  # neurons, whether they are gated, activations


class NoNetwork(Unclear):
    """All sizes and activations were tried: other queries would not change that."""


@dataclass(frozen=True, eq=False)
class Union:
    """The network, its linear part what the heads do not explain; and the single tokens whose
    second terms are exact."""

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
    exact = shallow.ask_alone(shallow.points(rng, 2 * width), "neurons")
    if is_affine(exact, observe(shallow, exact.anchors), doubt):
        raise Unclear("single tokens show no neurons: stacks of attention alone are not solved")
    asked = shallow.ask_alone(exact.anchors, "neurons", 2)
    doubt = max(doubt, float(np.sqrt(np.mean((asked.limit - exact.limit) ** 2))))
    nearly = {False: 0, True: 0}  # sizes whose neurons were nearly enough
    # of the answers, by the last attempts with first activations; what was not tried comes in turn
    left = {False: 0.0, True: 0.0}
    # whether more neurons hardly left less: then there are others, however little these leave
    stalled = {False: False, True: False}
    too_small = set[tuple[int, bool]]()
    attempts, late = deque(list_attempts(options, width)), deque[Trial]()
    while attempts or late:
        size, gated, names = attempt = (attempts or late).popleft()
        if nearly[gated] > options.further or (size, gated) in too_small:
            continue
        behind = left[gated] > options.behind * left[not gated] and not stalled[not gated]
        if attempts and behind:
            late.append(attempt)
            continue
        unknowns = size * ((width + 1) * (1 + gated) + outputs) / shallow.numbers + width + 1
        count = int(options.redundant * unknowns)
        more = count - len(asked.anchors)
        if more > 0:
            asked = asked + shallow.ask_alone(shallow.points(rng, more), "neurons", 2)
        points = asked.anchors[:count]
        answers = asked.limit[:count] - shallow.show(points, points @ whole.T)
        observation = observe(shallow, points)
        accepted = options.explained * doubt
        tried = fit_network(points, answers, size, names, gated, accepted, rng, observation)
        found, first = tried.network, names == (options.gates if gated else options.activations)[0]
        if first:
            stalled[gated] = 0.0 < left[gated] < 2.0 * tried.left
            left[gated] = tried.left
        if stalled[gated] and late:
            attempts.extendleft(reversed([one for one in late if one[1] is not gated]))
            late = deque(one for one in late if one[1] is gated)
        if found is None and tried.left > options.few:
            too_small.add((size, gated))
            continue
        nearly[gated] += first
        if found is None:
            continue
        gate = found.gate
        network = Mlp(
            found.inner[:, :-1],
            found.inner[:, -1],
            found.outer,
            activation=found.activation,
            linear=found.affine[:, :-1],
            offset=found.affine[:, -1],
            gate=None if gate is None else gate[:, :-1],
            gate_bias=None if gate is None else gate[:, -1],
        )
        return Union(network, exact)
    raise NoNetwork("no network of the sizes tried explains single tokens")


def list_attempts(options: NeuronOptions, width: int) -> list[Trial]:
    """Numbers of neurons that are tried, whether they are gated, and with which activations: fewest
    unknowns first. Too few neurons of one activation leave about what those of another do, so the
    first one is tried with more neurons before others are."""
    tried = []
    for gated, classes in ((False, options.activations), (True, options.gates)):
        size = int(options.first * (width + 1))
        while size * (width + 1) * (1 + gated) <= options.most:
            for place, names in enumerate(classes):
                tried.append((size * (1 + gated) * (1 + (place > 0)), (size, gated, names)))
            size = int(options.growth * size)
    return [attempt for _, attempt in sorted(tried, key=lambda one: one[0])]


def observe(shallow: Shallow, points: Float[Array, "n k"]) -> Observation:
    """What is seen of single tokens at these points."""
    hidden = shallow.hidden(points)
    return Value() if hidden is None else Direction(hidden)


def is_affine(asked: Terms, observation: Observation, doubt: float) -> bool:
    basis, _ = np.linalg.qr(np.column_stack([asked.anchors, np.ones(len(asked.anchors))]))
    whole = observation.completed(basis, asked.limit)
    return bool(np.abs(whole - basis @ (basis.T @ whole)).max() < 1e3 * doubt)


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
