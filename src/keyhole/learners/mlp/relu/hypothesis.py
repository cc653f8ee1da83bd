"""What the searches for a ReLU network share: the box, how exact it is, and what is reported.

A search takes a `NetworkBox` and returns a `FoundNetwork`, `Refuted` or `Inconclusive`;
`build_hypothesis` turns what was found into standard errors, zeros and notes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float, Int, random_stream
from keyhole.errors import Counterexample
from keyhole.learners.base import Diagnostics, Hypothesis, Inconclusive, Refuted
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.least_squares import flatten_output
from keyhole.learners.mlp.relu.orientation import Orientation, orient_neurons
from keyhole.measurement.asker import Asker
from keyhole.measurement.evidence import Estimate, Evidence
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import ROUNDINGS, NoiseModel

CLEAN = 1e-11  # rounding, relative to the answers, beyond which two answers define no line


@dataclass(frozen=True, eq=False)
class NetworkBox:
    """The box as a function of points.

    Args:
        asker: Rounds points as the box does, counts them, knows how exact answers are.
        forecast: Queries for so many neurons.
    """

    asker: Asker
    forecast: Callable[[int, Spec], int | None] | None = None

    @classmethod
    def of(
        cls, oracle: Oracle, forecast: Callable[[int, Spec], int | None] | None = None
    ) -> "NetworkBox":
        return cls(Asker(oracle, rounding=True), forecast)

    @property
    def relative(self) -> float:
        """Rounding of an answer, relative to it, at least: in float64 of two operations."""
        return max(self.asker.unit, 2 * UNIT_ROUNDOFF)

    @property
    def noise(self) -> float:
        """Error of an answer that does not depend on its size."""
        return self.asker.noise.additive + self.asker.noise.step / 2

    @property
    def clean(self) -> bool:
        """Whether two answers define a line."""
        return self.relative <= CLEAN

    @property
    def spent(self) -> int:
        return self.asker.spent

    @property
    def scalar(self) -> bool:
        return self.asker.scalar

    def ask(self, points: Float[Array, "n d"], purpose: str = "network") -> Float[Array, "n k"]:
        return self.asker.points(points, purpose)

    def expect_neurons(self, count: int, outputs: int) -> None:
        """Tells what a network of so many neurons will cost, now that they are counted."""
        if self.forecast is None:
            return
        oracle = self.asker.oracle
        spec = replace(oracle.spec, outputs=outputs, precision=self.asker.noise)
        total = self.forecast(count, spec)
        oracle.expect(None if total is None else max(0, total - self.spent))

    def round_points(self, points: Array) -> Array:
        """Points as the box sees them."""
        return self.asker.representable(points)

    def counterexample(
        self, point: Array, answer: Array, predicted: Array, reason: str
    ) -> Counterexample:
        answer, predicted = self.asker.as_answered(answer), self.asker.as_answered(predicted)
        return Counterexample(point, answer, predicted, reason)


@dataclass(frozen=True)
class Exactness:
    """How exact the answers are, as met by a search."""

    unit: float = 0.0  # rounding of one answer
    scale: float = 0.0  # how much the answers vary

    @property
    def digits(self) -> float:
        """Rounding relative to the answers."""
        return self.unit / max(self.scale, TINY)

    @property
    def low(self) -> bool:
        """Whether differences are blamed on the answers' digits."""
        return bool(self.unit > CLEAN * self.scale)

    @property
    def allowed(self) -> float:
        """Difference between network and box that is still rounding."""
        return max(1e-7 * self.scale, ROUNDINGS * self.unit)


@dataclass(frozen=True, eq=False)
class FoundNetwork:
    """A network in normal form (outputs as a table) that agrees with the box, and its errors."""

    network: ReluNetwork
    error: Float[Array, " n"]  # of output_j weight_j per neuron, in units of the answers
    affine_error: float
    agreement: float  # largest difference at the validation points
    exactness: Exactness
    lines: int  # or rays, that were asked
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Curved(Refuted):
    """The box is a curve where it was looked at: no network of ReLUs, but a smooth one may be."""


SearchResult = FoundNetwork | Refuted | Inconclusive


def validate_network(
    box: NetworkBox, region: InputRegion, network: ReluNetwork, rng: np.random.Generator
) -> tuple[float, Counterexample]:
    """The largest difference at four to twelve fresh points of several sizes, and where it is."""
    count = int(np.clip(0.01 * box.spent, 4, 12))
    sizes = np.resize([1.0, 3.0, 0.3, 1.0], count)
    points = np.concatenate([region.points(rng, 1, size) for size in sizes])
    points = box.round_points(points)
    answers = box.ask(points, "validation")
    predicted = network(points)
    differences = np.linalg.norm(answers - predicted, axis=1) / np.maximum(sizes, 1.0)
    i = int(np.argmax(differences))
    worst = box.counterexample(points[i : i + 1], answers[i], predicted[i], "a fresh point")
    return float(differences[i]), worst


def approach_planes(
    network: ReluNetwork, points: Float[Array, "n d"], distance: float, rng: np.random.Generator
) -> tuple[Float[Array, "n d"], Int[Array, " n"]]:
    """The points moved to this distance from planes of different neurons, on the side where these
    are on; and the neurons."""
    chosen = rng.permutation(network.neurons)[: len(points)]
    rows = network.weight[chosen]
    lengths = np.linalg.norm(rows, axis=1)
    heights = ((rows * points).sum(axis=1) + network.bias[chosen]) / lengths
    return points + (distance - heights)[:, None] * rows / lengths[:, None], chosen


def find_round_bend(
    box: NetworkBox, region: InputRegion, network: ReluNetwork, rng: np.random.Generator
) -> Counterexample | None:
    """A bend that is round: close to its plane the box answers half of what a kink would, as all
    smooth activations do. Two neurons are looked at, where inputs are free and answers exact."""
    if not region.unbounded or not box.clean or not network.neurons:
        return None
    distance = 1e-7 * region.size
    points = region.points(rng, min(2, network.neurons))
    near, chosen = approach_planes(network, points, distance, rng)
    answers = box.ask(near, "validation")
    missing = network(near) - answers
    kinks = (
        distance * network.output[chosen] * np.linalg.norm(network.weight[chosen], axis=1)[:, None]
    )
    shares = (missing * kinks).sum(axis=1) / np.maximum((kinks**2).sum(axis=1), TINY)
    if not ((shares > 0.2) & (shares < 0.8)).all():
        return None
    predicted = network(near)
    return box.counterexample(near[:1], answers[0], predicted[0], "a point close to a bend")


def report_unexplained(network: ReluNetwork, agreement: float, exactness: Exactness) -> str:
    return (
        f"{network.neurons} neurons explain the lines that were asked but not the box: at a fresh "
        f"point they are off by {agreement:.2g}, where {exactness.allowed:.2g} would be rounding"
    )


def refuse(
    message: str,
    exactness: Exactness,
    witness: Counterexample | None,
    *,
    rays: int | None = None,
) -> Refuted | Inconclusive:
    """What a failed search says. `rays` counts those of a bounded domain that did not settle it."""
    if exactness.low:
        return Inconclusive(
            f"{message}. The box's answers are exact to about {exactness.digits:.1g} of their size "
            "only; breakpoints that are close or weak drown in that. More digits would show them"
        )
    if rays is not None:
        return Inconclusive(
            f"{message}. In a bounded domain a line meets only some of the hyperplanes, and {rays} "
            "lines did not settle what lies between them. A wider domain would help"
        )
    return Refuted(f"not one hidden layer of ReLUs: {message}", witness)


@dataclass(frozen=True, eq=False, kw_only=True)
class NetworkDiagnostics(Diagnostics):
    """How far a network of one token is off: what a score behind it inherits."""

    function_error: float  # largest error, in units of the answers
    scale: float  # how much the answers vary


@dataclass(frozen=True, eq=False, kw_only=True)
class ReluDiagnostics(NetworkDiagnostics):
    """What the search for a ReLU network found out beside the network."""

    neurons: int
    orientation: str  # how the sides on which neurons are active were decided
    orientation_certified: bool
    validation_difference: float  # largest difference at the validation points
    rounding: float  # error of an answer, as met along the lines
    lines: int  # or rays, that were asked
    leak: float | None  # slope below zero, where neurons are leaky
    radius: float  # of the domain


def build_hypothesis(
    found: FoundNetwork, box: NetworkBox, region: InputRegion, *, orient: bool
) -> Hypothesis:
    """The network with its neurons oriented where that can be decided, errors and notes."""
    network, exactness = found.network, found.exactness
    answer = network.output.shape[1]
    size = float(np.linalg.norm(found.error))
    oriented = Orientation(network, False, "not asked")
    if orient:
        oriented = orient_neurons(network, size + found.affine_error)
        # with large errors sides may seem to fit that change the function
        points = region.points(random_stream(0, "superfluous"), 256)
        moved = np.abs(oriented.network(points) - network(points)).max(initial=0.0)
        if moved > exactness.allowed:
            oriented = Orientation(network, False, "the errors are too large")
    model = flatten_output(oriented.network) if box.scalar else oriented.network
    errors = derive_standard_errors(model, found.error, found.affine_error, region.scale)
    model = drop_rounding(model, errors, exactness, region.scale)
    return Hypothesis(
        model,
        errors,
        floor=(network.neurons * (network.width + answer) + answer) / answer,
        notes=(*report_orientation(oriented), *found.notes),
        noise=None if box.clean else box.asker.noise,
        diagnostics=ReluDiagnostics(
            function_error=max(found.agreement, size),
            scale=exactness.scale,
            neurons=network.neurons,
            orientation=oriented.method,
            orientation_certified=oriented.certified,
            validation_difference=found.agreement,
            rounding=exactness.unit,
            lines=found.lines,
            leak=oriented.leak,
            radius=region.radius,
        ),
    )


def derive_standard_errors(
    model: ReluNetwork, error: Array, affine_error: float, scale: float
) -> ReluNetwork:
    """Errors in the model's own structure, from those of the products output_j weight_j."""
    length = np.sqrt(model.width) * scale
    size = np.linalg.norm(model.output_table, axis=1)
    size = np.maximum(size, TINY)
    rows = error / size
    weight = np.repeat((rows / length)[:, None], model.width, axis=1)
    output = np.zeros_like(model.output) + (error / length).reshape(
        -1, *([1] * (model.output.ndim - 1))
    )
    skip = np.full_like(model.skip, affine_error / length if model.skip.any() else 0.0)
    return ReluNetwork(weight, rows, output, skip, np.full_like(model.offset, affine_error))


def drop_rounding(
    model: ReluNetwork, errors: ReluNetwork, exactness: Exactness, inputs: float
) -> ReluNetwork:
    """Biases, skip and offset that cannot be told from zero, and would not matter beside inputs
    and answers, are zero."""
    evidence = Evidence(NoiseModel(max(exactness.digits, UNIT_ROUNDOFF)))
    answers = exactness.scale
    parts = model.to_arrays()
    for name, yardstick in (("bias", inputs), ("skip", answers / inputs), ("offset", answers)):
        if evidence.vanishes(Estimate(parts[name], getattr(errors, name)), yardstick):
            parts[name] = np.zeros_like(parts[name])
    return ReluNetwork.from_arrays(parts)


def report_orientation(oriented: Orientation) -> tuple[str, ...]:
    network = oriented.network
    notes = []
    if oriented.leak is not None:
        notes.append(
            f"Below zero the neurons have slope {oriented.leak:.6g} (leaky ReLUs; -1 means "
            "absolute values): the skip holds it."
        )
    elif not oriented.certified:
        notes.append(
            f"Which side of its hyperplane each neuron is on was not decided "
            f"({oriented.method}); the function is known, the skip holds the difference."
        )
    elif network.skip.any():
        notes.append("The box has a linear part beside its neurons: the skip.")
    if network.neurons == 0:
        notes.append("The box is affine: it has no neurons that change the answer.")
    return tuple(notes)
