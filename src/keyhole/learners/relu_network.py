"""A network with one hidden layer of ReLUs, from its values alone.

Statement.  f(x) = offset + skip . x + Σ_j output_j relu(weight_j . x + bias_j) is recovered as a
            function, with the number of neurons unknown, at little more than one question per
            unknown: m(d-1) for the gradients, about four and a half per kink for the line.
Questions.  Length one. A random line crosses every plane once (probes/kinks, probes/lines); the
            gradients of the cells along it (probes/gradients); a few random points to validate.
Algebra.    Jumps of the gradient are output_j weight_j. Narrow cells are corrected by least
            squares on random points (algebra/relu_corrections), with `exact` all parameters are.
            Which side of a plane is on is decided where it can be (algebra/signs).
Fails.      A box that bends or jumps is refused along the line, one that is piecewise affine but
            not one hidden layer by validation (WrongFamily, with a counterexample). Answers with
            few digits hide close or weak kinks (IllConditioned). Planes that miss a bounded domain
            cannot be seen, and are not needed there.
Source.     Milli et al. 2019; Jagielski et al. 2020; Carlini, Jagielski, Mironov 2020; Daniely,
            Granot 2021. The shared gradients, two-sided checks and corrections are ours.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from keyhole.algebra.relu_corrections import (
    Doubts,
    balanced_points,
    corrected,
    informative,
    merged,
    polished,
)
from keyhole.algebra.signs import Signs, decided_signs
from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, IllConditioned, InvalidArgument, WrongFamily
from keyhole.learners.base import Learned
from keyhole.learners.relu_pass import Pass, run_pass
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.questions import Questions
from keyhole.probes.input_region import InputRegion
from keyhole.probes.pieces import NotPiecewiseAffine

ROUNDING = 2.0**-52  # relative error of an answer in double precision: a few operations' worth
CORRECTED = (
    2.5e-11  # a piece's predicted error, relative to the answers, that is worth a correction
)
CORRECTION_SHARE = 0.08  # most questions spent on corrections, relative to those spent before
VALIDATION_SIZES = (1.0, 3.0, 0.3, 1.0)  # input scale of the validation points, in turn
VALIDATION_SHARE = 0.01  # validation points per question spent before,
VALIDATION_POINTS = 4, 12  # within these bounds
VALID = 1e-7  # difference to the box, relative to the answers, that is not rounding any more
VALID_ROUNDINGS = 100.0  # the same in units of one answer's rounding
CLEAN = 1e-11  # rounding beyond this: differences are blamed on the answers' digits
PASSES = 3  # lines tried before the box is refused
BOUNDED_SIZES = (2.0, 3.0, 1.0, 2.0)  # of validation points in a bounded domain: all of it
BOUNDED_VALIDATION = 32  # validation points there
BOUNDED_PASSES = 24  # the same where a line cannot leave the domain and misses planes
SAME_PLANE = 1e-6  # distance of unit planes that are one plane, found by two passes
ZERO = 12.0  # standard errors within which a whole block of parameters counts as zero,
NEGLIGIBLE = 1e-8  # if it is as small as this beside inputs and answers
POLISH_SHARE = 1.2  # answers per unknown in the exact mode
POLISH_LIMIT = 2.48  # and the most that passes and polish may cost together, per unknown
ANSWER_NOISE = 4.0  # error of an answer at a random point, in units of the rounding at zero
CANDIDATES = 4  # random points per correction question, of which the best are asked
POLISHED = 20.0  # error of the parameters after the polish, in units of one answer's rounding
STALLED = 0.3  # a round that leaves more than this of the difference is the last
SEEN = 1.5  # points on either side of each plane in the exact mode, per unknown of a neuron
POLISH_ROUNDS = 3  # solutions of the least squares problem, each with fresh on/off patterns


@dataclass(frozen=True)
class ReluNetworkLearner:
    """Learner for networks with one hidden layer of ReLUs (leaky ones included).

    `neurons` is a promise, not needed: a box with more planes is refused. `exact` spends about
    twice the questions to reach the last digits. `scale` is the size of the inputs of interest
    (taken from the domain where there is one). `signs=False` leaves the neurons' sides open.

    >>> import numpy as np
    >>> from keyhole.oracles.base import Spec
    >>> from keyhole.oracles.function import FunctionOracle
    >>> box = FunctionOracle(lambda x: np.maximum(x[:, 0] @ np.ones(3) - 1, 0), Spec(width=3))
    >>> ReluNetworkLearner().learn(box, np.random.default_rng(0)).model
    ReluNetwork(width=3, neurons=1, outputs=scalar)
    """

    neurons: int | None = None
    exact: bool = False
    scale: float | None = None
    signs: bool = True

    def __post_init__(self) -> None:
        if self.neurons is not None and self.neurons < 0:
            raise InvalidArgument(f"neurons must not be negative, got {self.neurons}")
        if self.scale is not None and not 0 < self.scale < np.inf:
            raise InvalidArgument(f"scale must be positive and finite, got {self.scale}")

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Learned:
        work = _Work(oracle, InputRegion.of(oracle.spec.domain, oracle.spec.width, self.scale), rng)
        network = work.passes()
        if self.exact and work.scalar:
            network = work.polish(network)
        if self.neurons is not None and network.neurons > self.neurons:
            raise WrongFamily(
                f"the box bends at {network.neurons} planes, more than the {self.neurons} neurons "
                "that were promised"
            )
        return work.result(network, self.signs)

    def expected_questions(self, spec: Spec) -> int | None:
        if self.neurons is None:
            return None
        answer = spec.outputs or 1
        floor = self.neurons * (spec.width + answer) + answer
        if answer > 1:
            return int(2.3 * floor / answer)
        return int((2.4 if self.exact else 1.03) * floor + 3.5 * self.neurons)


@dataclass(eq=False)
class _Work:
    """The box, what was spent on it, and what is known about its answers."""

    oracle: Oracle
    region: InputRegion
    rng: np.random.Generator
    relative: float = ROUNDING
    noise: float = 0.0  # stated error of an answer that does not depend on its size
    unit: float = 0.0  # rounding of an answer as met along the lines
    scale: float = 0.0  # how much the answers vary
    spent: int = 0
    scalar: bool = True
    agreement: float = np.inf  # largest difference at the validation points
    error: Array = field(default_factory=lambda: np.zeros(0))  # of output_j weight_j, per neuron
    affine_error: float = 0.0
    passes_run: int = 0

    def __post_init__(self) -> None:
        precision = self.oracle.spec.precision
        if precision is not None:
            self.relative = max(self.relative, 2 * precision.relative)
            self.noise = precision.additive + precision.step / 2

    def ask(self, points: Float[Array, "n d"], purpose: str) -> Float[Array, "n k"]:
        raw = self.oracle.ask(Questions.of(points[:, None, :], purpose))
        self.spent += len(points)
        self.scalar = raw.ndim == 1
        return raw.astype(np.float64).reshape(len(points), -1)

    def asking(self, model: ReluNetwork | None) -> Callable[[Array], Array]:
        if model is None:
            return lambda points: self.ask(points, "network")
        return lambda points: self.ask(points, "network again") - model(points)

    def passes(self) -> ReluNetwork:
        """Lines through the box until a network agrees with it at fresh points.

        In the whole space one line sees every plane; another is only needed where two planes
        were so close on the first that they passed for one. In a bounded domain each line sees
        some planes, and the next one looks at what the network so far leaves unexplained."""
        best: ReluNetwork | None = None
        witness: Counterexample | None = None
        floor = self.noise
        for _ in range(PASSES if self.region.unbounded else BOUNDED_PASSES):
            known = None if self.region.unbounded else best
            found = self.one_pass(known, floor)
            network = self.corrected(found) if known is None else joined(known, found.network)
            difference, seen = self.validate(network)
            if best is None or difference < self.agreement:
                best, self.agreement, witness = network, difference, seen
            if self.agreement <= self.allowed():
                return best
            if not self.region.unbounded:
                floor = max(floor, found.unit, float(found.doubt.sum()))
        count = 0 if best is None else best.neurons
        raise self.refusal(
            f"{count} neurons explain the lines that were asked but not the box: at a "
            f"fresh point they are off by {self.agreement:.2g}, where {self.allowed():.2g} "
            "would be rounding",
            witness,
        )

    def one_pass(self, model: ReluNetwork | None, floor: float) -> Pass:
        frame, reach = self.region.line(self.rng)
        ask = self.asking(model)
        try:
            found = run_pass(
                ask,
                frame,
                reach,
                self.region.room,
                self.relative,
                floor,
                trusting=self.passes_run == 0,
            )
        except NotPiecewiseAffine as error:
            point = frame.points(np.array([error.t]))
            known = np.zeros_like(error.value) if model is None else model(point)[0]
            witness = self.counterexample(
                point, error.value + known, error.expected + known, str(error)
            )
            raise self.refusal(str(error), witness) from error
        self.passes_run += 1
        if model is None:  # later lines see what a network leaves over, with its errors
            self.unit = max(self.unit, found.unit)
            self.scale = max(self.scale, found.scale)
        self.error = np.append(self.error, found.error)
        self.affine_error += float(found.doubt[0])
        return found

    def corrected(self, found: Pass) -> ReluNetwork:
        """Answers at random points decide between the two neurons at a narrow piece."""
        if not self.scalar or found.network.neurons == 0:
            return found.network
        pieces = int((found.doubt > CORRECTED * self.scale).sum())
        unknowns = pieces * (found.network.width + 1)
        count = min(unknowns, int(CORRECTION_SHARE * self.spent))
        if count == 0:
            return found.network
        network = flat(found.network)
        doubts = Doubts(found.doubt, found.centres, found.length)
        candidates = self.region.points(self.rng, CANDIDATES * count)
        points = informative(network, doubts, candidates, count)
        difference = self.ask(points, "corrections")[:, 0] - network(points)
        network = corrected(network, doubts, points, difference, ANSWER_NOISE * self.unit)
        np.minimum(found.doubt, CORRECTED * self.scale, out=found.doubt)
        self.error = found.error
        return unflat(network)

    def validate(self, network: ReluNetwork) -> tuple[float, Counterexample]:
        count = int(np.clip(VALIDATION_SHARE * self.spent, *VALIDATION_POINTS))
        if not self.region.unbounded:  # some planes may not have been met by any line
            count = BOUNDED_VALIDATION
        sizes = np.resize(VALIDATION_SIZES if self.region.unbounded else BOUNDED_SIZES, count)
        points = np.concatenate([self.region.points(self.rng, 1, size) for size in sizes])
        answers = self.ask(points, "validation")
        predicted = network(points)
        differences = np.linalg.norm(answers - predicted, axis=1) / np.maximum(sizes, 1.0)
        i = int(np.argmax(differences))
        return float(differences[i]), self.counterexample(
            points[i : i + 1], answers[i], predicted[i], "a fresh point"
        )

    def allowed(self) -> float:
        return max(VALID * self.scale, VALID_ROUNDINGS * self.unit)

    def counterexample(
        self, point: Array, answer: Array, predicted: Array, reason: str
    ) -> Counterexample:
        if self.scalar:
            answer, predicted = answer[0], predicted[0]
        return Counterexample(point, answer, predicted, reason)

    def refusal(self, message: str, witness: Counterexample | None) -> Exception:
        if self.passes_run > 1 and not self.region.unbounded:
            return IllConditioned(
                f"{message}. In a bounded domain a line meets only some of the planes, and "
                f"{self.passes_run} lines did not settle what lies between them. A wider domain "
                "would help"
            )
        if self.unit > CLEAN * self.scale:
            return IllConditioned(
                f"{message}. The box's answers are exact to about {self.unit / self.scale:.1g} of "
                "their size only; kinks that are close or weak drown in that. A box in double "
                "precision would be recovered"
            )
        return WrongFamily(f"not one hidden layer of ReLUs: {message}", witness)

    def polish(self, network: ReluNetwork) -> ReluNetwork:
        """All parameters again, from as many random points as there are unknowns and some."""
        unknowns = (network.neurons + 1) * (network.width + 1)
        floor = network.neurons * (network.width + 1) + 1
        count = min(int(POLISH_SHARE * unknowns), int(POLISH_LIMIT * floor) - self.spent)
        points = self.region.points(self.rng, max(count, unknowns + 1))
        if self.region.unbounded:
            points = balanced_points(network, points, int(SEEN * (network.width + 1)))
        answers = self.ask(points, "polish")[:, 0]
        best, smallest = network, np.inf
        current = flat(network)
        for _ in range(POLISH_ROUNDS):
            difference = answers - current(points)
            size = float(np.sqrt(np.mean(difference**2)))
            stalled = size > STALLED * smallest
            if size < smallest:
                best, smallest = unflat(current), size
            if stalled:
                break
            current = polished(current, points, difference)
        difference = answers - current(points)
        if float(np.sqrt(np.mean(difference**2))) < smallest:
            best = unflat(current)
        self.error = np.full(best.neurons, POLISHED * self.unit)
        self.affine_error = POLISHED * self.unit
        return best

    def result(self, network: ReluNetwork, signs: bool) -> Learned:
        answer = network.output.shape[1]
        error = self.error
        if len(error) != network.neurons:  # planes were merged: the worst speaks for all
            error = np.full(network.neurons, error.max(initial=0.0))
        accuracy = float(np.linalg.norm(error)) + self.affine_error
        decided = Signs(network, False, "not asked")
        if signs:
            decided = decided_signs(network, accuracy)
        model = flat(decided.network) if self.scalar else decided.network
        errors = standard_errors(model, error, self.affine_error, self.region.scale)
        model = without_rounding(model, errors, self.scale, self.region.scale)
        floor = (network.neurons * (network.width + answer) + answer) / answer
        details = {
            "neurons": network.neurons,
            "sides": decided.method,
            "sides_certified": decided.certified,
            "validation_difference": self.agreement,
            "function_error": max(self.agreement, float(np.linalg.norm(error))),
            "rounding": self.unit,
            "scale": self.scale,
            "passes": self.passes_run,
            "leak": decided.leak,
        }
        return Learned(model, errors, floor, notes_on(decided), details)


def flat(network: ReluNetwork) -> ReluNetwork:
    """A scalar box's network, from answers kept as vectors of length one."""
    return ReluNetwork(
        network.weight, network.bias, network.output[:, 0], network.skip[:, 0], network.offset[0]
    )


def unflat(network: ReluNetwork) -> ReluNetwork:
    return ReluNetwork(
        network.weight,
        network.bias,
        network.output[:, None],
        network.skip[:, None],
        network.offset[None],
    )


def joined(first: ReluNetwork, second: ReluNetwork) -> ReluNetwork:
    """The sum of two networks, neurons on the same plane taken together."""
    both = ReluNetwork(
        np.concatenate([first.weight, second.weight]),
        np.concatenate([first.bias, second.bias]),
        np.concatenate([first.output, second.output]),
        first.skip + second.skip,
        first.offset + second.offset,
    )
    return merged(both, SAME_PLANE)


def standard_errors(
    model: ReluNetwork, error: Array, affine_error: float, scale: float
) -> ReluNetwork:
    """Errors in the model's own structure, from those of the products output_j weight_j."""
    length = np.sqrt(model.width) * scale
    size = np.linalg.norm(model.output_table, axis=1)
    size = np.maximum(size, np.finfo(float).tiny)
    rows = error / size
    weight = np.repeat((rows / length)[:, None], model.width, axis=1)
    output = np.zeros_like(model.output) + (error / length).reshape(
        -1, *([1] * (model.output.ndim - 1))
    )
    skip = np.full_like(model.skip, affine_error / length if model.skip.any() else 0.0)
    return ReluNetwork(weight, rows, output, skip, np.full_like(model.offset, affine_error))


def without_rounding(
    model: ReluNetwork, errors: ReluNetwork, answers: float, inputs: float
) -> ReluNetwork:
    """Biases, skip and offset that cannot be told from zero, and would not matter, are zero."""
    parts = model.to_arrays()
    for name, yardstick in (("bias", inputs), ("skip", answers / inputs), ("offset", answers)):
        size = float(np.linalg.norm(parts[name]))
        doubt = float(np.linalg.norm(getattr(errors, name)))
        if size <= min(ZERO * doubt, NEGLIGIBLE * yardstick):
            parts[name] = np.zeros_like(parts[name])
    return ReluNetwork.from_arrays(parts)


def notes_on(decided: Signs) -> tuple[str, ...]:
    network = decided.network
    notes = []
    if decided.leak is not None:
        notes.append(
            f"Below zero the neurons have slope {decided.leak:.6g} (leaky ReLUs; -1 means absolute "
            "values): the skip holds it."
        )
    elif not decided.certified:
        notes.append(
            f"Which side of its plane each neuron is on was not decided ({decided.method}); the "
            "function is known, the skip holds the difference."
        )
    elif network.skip.any():
        notes.append("The box has a linear part beside its neurons: the skip.")
    if network.neurons == 0:
        notes.append("The box is affine: it has no neurons that change the answer.")
    return tuple(notes)
