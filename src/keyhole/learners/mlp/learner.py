"""Networks with one hidden layer of smooth or gated neurons, recovered exactly.

Statement.  y = linear x + offset + outer φ(inner x + inner_bias), φ any of the table's activations,
            is recovered with its number of neurons and its activation, from vector or scalar
            answers, with three to six times as many numbers as it has parameters.
Queries.    scale.py (which size of inputs shows the bends); far_field.py where inputs may be of any
            size; last, random points of the network's own size.
Algebra.    The stages give every neuron to a few digits; refinement.py fits all answers near zero
            to their rounding, and its Fisher matrix tells the standard errors.
Fails.      A fit that does not reach the rounding of the answers is no member of the family: the
            worst answer is the counterexample.
"""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF, Array, Float, whole_number
from keyhole.errors import (
    Counterexample,
    InvalidArgument,
    NotIdentifiable,
    WrongFamily,
)
from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.learners.mlp.far_field import (
    EXPLAINED,
    FAR,
    FarField,
    Unresolved,
    fit_scales,
    read_far_field,
)
from keyhole.learners.mlp.refinement import Refined, Weights, hidden_layer, refine, with_one
from keyhole.learners.mlp.scale import find_scale
from keyhole.measurement.noise import noise_of_type, recognise_format
from keyhole.models.mlp import ACTIVATIONS, Mlp, activation_named, turned
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

EXPECTED = 4  # neurons per entry of the input, before any was counted
PATHS = 3  # far away that are tried
NEAR = 1.2  # answers for the refinement, relative to the number of unknowns in them
FIRST = 0.3  # of these, asked at the size found first; the rest where arguments are of order one:
WIDE = 1.5  # standard deviation of the arguments there
FACTOR = 100.0  # by which the two sizes may differ
ROUNDINGS = 300.0  # of the terms of an answer, that the finished fit may leave
IDLE = 1e-7  # part of a neuron in the answers, relative to the others, that is none
CERTAIN = 0.05  # distance from a whole number below which the side of a neuron is decided
ZERO = 12.0  # standard errors within which a block of parameters counts as zero


@dataclass
class Box:
    """The oracle, its answers as rows of float64, and what they showed of its number format."""

    oracle: Oracle
    scalar: bool = True
    unit: float = UNIT_ROUNDOFF
    additive: float = 0.0
    spent: int = 0
    seen: list[Array] = field(default_factory=list)  # a few answers, for the number format

    def ask(self, points: Float[Array, "n d"], purpose: str) -> Float[Array, "n k"]:
        if self.unit > UNIT_ROUNDOFF:  # points as the box sees them
            points = points.astype(np.float32).astype(np.float64)
        raw = np.asarray(self.oracle.ask(QueryBatch.of(points[:, None, :], purpose)))
        self.spent += len(points)
        self.scalar = raw.ndim == 1
        answers = raw.astype(np.float64).reshape(len(points), -1)
        if not self.seen:
            kind = recognise_format(noise_of_type(self.oracle.spec.precision, raw), raw)
            self.unit, self.additive = max(kind.relative, UNIT_ROUNDOFF), kind.error_floor
            self.seen.append(answers)
        return answers


@dataclass(frozen=True, eq=False, kw_only=True)
class MlpDiagnostics(Diagnostics):
    """What was found, and how well it fits."""

    neurons: int
    activation: str
    gated: bool
    residual: float  # root mean square of what the network leaves of the answers
    steps: int  # of the refinement


@dataclass(frozen=True)
class MlpLearner:
    """Learner for networks with one hidden layer: GELU, its tanh approximation, SiLU, quick GELU.

    `activation`, `neurons` are promises, not needed: a box that does not keep them is refused.

    >>> import numpy as np
    >>> from keyhole.models.mlp import Mlp
    >>> from keyhole.oracles.base import Spec
    >>> from keyhole.oracles.function import FunctionOracle
    >>> rng = np.random.default_rng(0)
    >>> secret = Mlp(rng.standard_normal((6, 4)), np.ones(6), rng.standard_normal((4, 6)))
    >>> box = FunctionOracle(secret, Spec(width=4))
    >>> MlpLearner().learn(box, np.random.default_rng(1)).model
    Mlp(width=4, neurons=6, outputs=4, gelu)
    """

    activation: str | None = None
    neurons: int | None = None
    gated: bool | None = None

    def __post_init__(self) -> None:
        if self.activation is not None:
            activation_named(self.activation)
        if self.neurons is not None:
            whole_number("neurons", self.neurons, 1)
        if self.gated not in (None, True, False):
            raise InvalidArgument(f"gated must be True, False or None, got {self.gated!r}")

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        if oracle.spec.domain.vocabulary is not None:
            raise NotIdentifiable(
                "a finite vocabulary does not determine a network: it needs inputs that can be "
                "moved freely"
            )
        box = Box(oracle)
        refined, points, answers = self._free(box, rng)
        return self._hypothesis(box, refined, points, answers)

    def expected_queries(self, spec: Spec) -> int | None:
        if self.neurons is None:
            return None
        return int(3.2 * unknowns(self.neurons, spec.width, spec.outputs or 1, self.gated))

    def _names(self) -> list[str]:
        """Activations that bend, one of each class."""
        if self.activation is None:
            return ["gelu", "silu", "gelu_tanh"]
        alias = ACTIVATIONS[self.activation].alias
        return [self.activation if alias is None else alias[0]]

    def _free(self, box: Box, rng: np.random.Generator) -> tuple[Refined, Array, Array]:
        """Inputs may be of any size."""
        width = box.oracle.spec.width
        scale = find_scale(box.ask, width, box.unit, rng)
        if not scale.smooth:
            raise WrongFamily("the box is piecewise linear; use ReluNetworkLearner")
        far = self._far(box, scale.size, rng)
        neurons = len(far.jump)
        self._promised(neurons)
        count = int(NEAR * unknowns(neurons, width, far.jump.shape[1], False)) + 1
        first = int(FIRST * count) + 1
        points = scale.size * rng.standard_normal((first, width))
        answers = box.ask(points, "near zero")
        names = self._names()
        weights, left = fit_scales(far, points, answers, names, scale.size)
        size = WIDE / float(np.median(np.linalg.norm(weights.inner[:, :-1], axis=1)))
        if not scale.size / FACTOR < size < scale.size * FACTOR:
            size = scale.size
        more = size * rng.standard_normal((count - first, width))
        points = np.concatenate([points, more])
        answers = np.concatenate([answers, box.ask(more, "near zero")])
        names = [weights.activation] if left < EXPLAINED else names
        weights, _ = fit_scales(far, points, answers, names, size)
        refined = without_idle(weights, points, answers, box.unit, rng)
        self._fits(box, refined, points, answers)
        return refined, points, answers

    def _far(self, box: Box, size: float, rng: np.random.Generator) -> FarField:
        width = box.oracle.spec.width
        expected = EXPECTED * width if self.neurons is None else self.neurons
        radius = FAR * expected * np.sqrt(width / 2.0) * size
        reason = ""
        for _ in range(PATHS):
            try:
                return read_far_field(box.ask, width, radius, size, box.unit, rng)
            except Unresolved as failed:
                reason = str(failed)
        raise WrongFamily(f"not a network that is piecewise linear far from zero: {reason}")

    def _promised(self, neurons: int) -> None:
        if self.neurons is not None and neurons > self.neurons:
            raise WrongFamily(
                f"the box has {neurons} neurons, more than the {self.neurons} that were promised"
            )

    def _fits(self, box: Box, refined: Refined, points: Array, answers: Array) -> None:
        """Refuses a network that does not explain the answers to their rounding."""
        allowed = ROUNDINGS * box.unit * terms(refined.weights, points) + 6.0 * box.additive
        if refined.residual <= allowed:
            return
        predicted = refined.weights(points)
        worst = int(np.argmax(np.abs(predicted - answers).max(axis=1)))
        told = (answers[worst], predicted[worst])
        if box.scalar:
            told = (answers[worst, 0], predicted[worst, 0])
        raise WrongFamily(
            f"no network with one hidden layer of {refined.weights.neurons} neurons fits: the best "
            f"found leaves {refined.residual:.1e}, where rounding explains {allowed:.1e}",
            Counterexample(points[worst][None], *told, "a random point near zero"),
        )

    def _hypothesis(self, box: Box, refined: Refined, points: Array, answers: Array) -> Hypothesis:
        weights, errors = refined.weights, refined.errors
        if errors is None:
            raise ValueError("standard errors are needed")
        model, deviations = as_mlp(weights, box.scalar), as_mlp(errors, box.scalar)
        notes = []
        model, deviations, side = with_sides(model, deviations)
        notes.append(side)
        width, outputs = points.shape[1], answers.shape[1]
        floor = unknowns(weights.neurons, width, outputs, weights.gate is not None)
        diagnostics = MlpDiagnostics(
            neurons=weights.neurons,
            activation=weights.activation,
            gated=weights.gate is not None,
            residual=refined.residual,
            steps=refined.steps,
        )
        noise = NoiseModel(max(box.unit, UNIT_ROUNDOFF)) if box.unit >= SINGLE_ROUNDOFF else None
        return Hypothesis(
            model, deviations, floor, tuple(notes), noise=noise, diagnostics=diagnostics
        )


def without_idle(
    weights: Weights, points: Array, answers: Array, unit: float, rng: np.random.Generator
) -> Refined:
    """The refined network, neurons that change no answer left out."""
    while True:
        refined = refine(weights, points, answers, unit, rng=rng)
        found = refined.weights
        size = np.linalg.norm(found.outer, axis=0)
        size = size * np.linalg.norm(found.inner if found.gate is None else found.gate, axis=1)
        kept = size > IDLE * np.median(size)
        if kept.all():
            return refined
        gate = None if found.gate is None else found.gate[kept]
        weights = Weights(
            found.inner[kept], found.outer[:, kept], found.affine, found.activation, gate
        )


def unknowns(neurons: int, width: int, outputs: int, gated: bool | None) -> float:
    """Parameters per number in an answer."""
    rows = neurons * (width + 1) * (2 if gated else 1)
    return (rows + neurons * outputs + (0 if gated else outputs * (width + 1))) / outputs


def terms(weights: Weights, points: Array) -> float:
    """Root mean square of the terms of which an answer is the sum."""
    homogeneous = with_one(points)
    hidden, _ = hidden_layer(weights, homogeneous)
    square = (hidden**2) @ (weights.outer**2).T + (homogeneous**2) @ (weights.affine**2).T
    return float(np.sqrt(square.mean()))


def as_mlp(weights: Weights, scalar: bool) -> Mlp:
    outer, affine = weights.outer, weights.affine
    gate = weights.gate
    return Mlp(
        weights.inner[:, :-1],
        weights.inner[:, -1],
        outer[0] if scalar else outer,
        activation=weights.activation,
        linear=affine[0, :-1] if scalar else affine[:, :-1],
        offset=affine[0, -1] if scalar else affine[:, -1],
        gate=None if gate is None else gate[:, :-1],
        gate_bias=None if gate is None else gate[:, -1],
    )


def with_sides(model: Mlp, errors: Mlp) -> tuple[Mlp, Mlp, str]:
    """Neurons turned so that the linear part is zero, or the identity, where that is possible:
    linear = Σ s_j outer_j inner_jᵀ + what is known, s_j zero or one."""
    parts, doubts = model.to_arrays(), errors.to_arrays()
    kind = ACTIVATIONS[model.activation]
    outer, linear = np.atleast_2d(model.outer), np.atleast_2d(model.linear)
    normal = (outer.T @ outer) * (model.inner @ model.inner.T)
    known = {"zero": np.zeros_like(linear)}
    if linear.shape[0] == linear.shape[1]:
        known["the identity"] = np.eye(len(linear))
    if kind.bends and linear.size >= model.neurons:
        for name, part in known.items():
            right = np.einsum("kj,kd,jd->j", outer, part - linear, model.inner, optimize=True)
            share, *_ = np.linalg.lstsq(normal, right, rcond=1e-14)
            near = np.abs(share - np.round(share)).max(initial=0.0)
            back = np.round(share)
            if near > CERTAIN or not np.isin(back, (0.0, 1.0)).all():
                continue
            other = turned(model, back == 1.0)
            rest = np.atleast_2d(other.linear) - part
            if np.linalg.norm(rest) <= CERTAIN * np.linalg.norm(outer @ model.inner) / 1e4:
                parts, doubts = other.to_arrays(), dict(doubts)
                parts["linear"] = part.reshape(model.linear.shape)
                doubts["linear"] = np.zeros_like(doubts["linear"])
                text = f"The linear part beside the neurons is {name}, which tells their sides."
                return Mlp.from_arrays(parts), Mlp.from_arrays(doubts), text
    size = np.linalg.norm(parts["linear"])
    if size <= ZERO * np.linalg.norm(doubts["linear"]):
        parts["linear"] = np.zeros_like(parts["linear"])
        doubts["linear"] = np.zeros_like(doubts["linear"])
        return Mlp.from_arrays(parts), Mlp.from_arrays(doubts), "There is no linear part."
    if not kind.bends:
        return model, errors, "The box has a linear part beside its neurons."
    return (
        model,
        errors,
        (
            "The box has a linear part beside its neurons. Which way each neuron is turned was not "
            "decided: the linear part holds the difference, the function is the same."
        ),
    )
