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
from keyhole.network.weights import Weights


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
    schedule = Schedule(options, deque(list_attempts(options, width)))
    while (attempt := schedule.choose()) is not None:
        size, gated, names = attempt
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
        if tried.network is not None:
            return Union(on_points(tried.network), exact)
        schedule.note(attempt, tried.left)
    raise NoNetwork("no network of the sizes tried explains single tokens")


@dataclass
class Schedule:
    """Which attempt is next: it and `note` alone write here. Plain and gated neurons take turns;
    what leaves much more of the answers than the other kind does waits."""

    options: NeuronOptions
    attempts: deque[Trial]
    late: deque[Trial] = field(default_factory=deque)
    nearly: dict[bool, int] = field(default_factory=lambda: {False: 0, True: 0})
    """Sizes, plain and gated, whose neurons were nearly enough."""
    left: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    """Of the answers, by the last attempts with first activations; what was not tried comes in
    turn."""
    stalled: dict[bool, bool] = field(default_factory=lambda: {False: False, True: False})
    """Whether more neurons hardly left less: then there are others, however little these leave."""
    too_small: set[tuple[int, bool]] = field(default_factory=set)

    def choose(self) -> Trial | None:
        while self.attempts or self.late:
            attempt = (self.attempts or self.late).popleft()
            size, gated, _ = attempt
            if self.nearly[gated] > self.options.further or (size, gated) in self.too_small:
                continue
            behind = self.left[gated] > self.options.behind * self.left[not gated]
            if not (self.attempts and behind and not self.stalled[not gated]):
                return attempt
            self.late.append(attempt)
        return None

    def note(self, attempt: Trial, left: float) -> None:
        """An attempt left so much of the answers."""
        size, gated, names = attempt
        first = names == (self.options.gates if gated else self.options.activations)[0]
        if first:
            self.stalled[gated] = 0.0 < self.left[gated] < 2.0 * left
            self.left[gated] = left
        if self.stalled[gated] and self.late:
            others = [one for one in self.late if one[1] is not gated]
            self.attempts.extendleft(reversed(others))
            self.late = deque(one for one in self.late if one[1] is gated)
        if left > self.options.few:
            self.too_small.add((size, gated))
        else:
            self.nearly[gated] += first


def on_points(found: Weights) -> Mlp:
    """The network that was fitted to points with a one behind them."""
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
