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

from dataclasses import dataclass, field

import numpy as np

from keyhole.algebra.relu_corrections import (
    Doubts,
    balanced_points,
    corrected,
    informative,
    polished,
)
from keyhole.algebra.signs import Signs, decided_signs
from keyhole.arrays import Array, real_number, whole_number
from keyhole.errors import Counterexample, IllConditioned, WrongFamily
from keyhole.learners.base import Learned
from keyhole.learners.relu_answers import SINGLE, Answers
from keyhole.learners.relu_lines import Lines
from keyhole.learners.relu_pass import Pass, run_pass
from keyhole.learners.relu_result import (
    flat,
    note_on_digits,
    note_on_region,
    notes_on,
    standard_errors,
    unflat,
    without_rounding,
)
from keyhole.learners.relu_star import Star
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle, Precision, Spec
from keyhole.probes.asking import few_digits
from keyhole.probes.input_region import InputRegion
from keyhole.probes.pieces import TINY, NotPiecewiseAffine

CORRECTED = (
    2.5e-11  # a piece's predicted error, relative to the answers, that is worth a correction
)
CORRECTION_SHARE = 0.08  # most questions spent on corrections, relative to those spent before
VALIDATION_SIZES = (1.0, 3.0, 0.3, 1.0)  # input scale of the validation points, in turn
VALIDATION_SHARE = 0.01  # validation points per question spent before,
VALIDATION_POINTS = 4, 12  # within these bounds
PASSES = 3  # lines tried before the box is refused
POLISH_SHARE = 1.2  # answers per unknown in the exact mode
POLISH_LIMIT = 2.48  # and the most that passes and polish may cost together, per unknown
ANSWER_NOISE = 4.0  # error of an answer at a random point, in units of the rounding at zero
CANDIDATES = 4  # random points per correction question, of which the best are asked
POLISHED = 20.0  # error of the parameters after the polish, in units of one answer's rounding
STALLED = 0.7  # a round that leaves more than this of the difference is the last
SEEN = 1.5  # points on either side of each plane in the exact mode, per unknown of a neuron
ROUGH_POLISH_SHARE = 3.0  # random points per unknown in the end, where answers have few digits
POLISH_ROUNDS = 5  # solutions of the least squares problem, each with fresh on/off patterns


@dataclass(frozen=True)
class ReluNetworkLearner:
    """Learner for networks with one hidden layer of ReLUs (leaky ones included).

    `neurons` is a promise, not needed: a box with more planes is refused. `exact` spends about
    twice the questions to reach the last digits. `scale` is the size of the inputs of interest
    (taken from the domain where there is one). `signs=False` leaves the neurons' sides open.
    In a bounded domain a plane may cut off a corner that nothing was asked about: `unseen` is the
    share of the domain's edge for which that may be so; 3 / unseen questions are spent on it.

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
    unseen: float = 0.003

    def __post_init__(self) -> None:
        if self.neurons is not None:
            whole_number("neurons", self.neurons, 0)
        if self.scale is not None:
            real_number("scale", self.scale, 0.0)
        real_number("unseen", self.unseen, 0.0, 1.0)

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Learned:
        region = InputRegion.of(oracle.spec.domain, oracle.spec.width, self.scale)
        box = Answers(oracle)
        work = _Work(box, region, rng, self.unseen)
        network = work.network()
        if self.exact and box.scalar and not box.rough:
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
        if few_digits(spec):  # as measured: benchmarks/relu_boxes.py, single precision
            return int(self.neurons * ((2.4 if answer > 1 else 3.1) * spec.width + 15))
        if answer > 1:
            return int(2.3 * floor / answer)
        return int((2.4 if self.exact else 1.03) * floor + 3.5 * self.neurons)


@dataclass(eq=False)
class _Work:
    """The searches for one box, and what they came to."""

    box: Answers
    region: InputRegion
    rng: np.random.Generator
    unseen: float
    agreement: float = np.inf  # largest difference at the validation points
    error: Array = field(default_factory=lambda: np.zeros(0))  # of output_j weight_j, per neuron
    affine_error: float = 0.0
    passes_run: int = 0
    notes: tuple[str, ...] = ()

    def network(self) -> ReluNetwork:
        """One line sees every plane where inputs are free and answers exact; where answers have
        few digits, several do; where inputs are bounded, rays."""
        if not self.region.unbounded:
            return self.star()
        try:
            return self.passes()
        except FewDigits:
            return self.several_lines()

    def passes(self) -> ReluNetwork:
        """Lines through the box until a network agrees with it at fresh points: another one is
        only needed where two planes were so close on the first that they passed for one."""
        best: ReluNetwork | None = None
        witness: Counterexample | None = None
        for _ in range(PASSES):
            network = self.corrected(self.one_pass())
            difference, seen = self.validate(network)
            if best is None or difference < self.agreement:
                best, self.agreement, witness = network, difference, seen
            if self.agreement <= self.box.allowed():
                return best
            if self.box.rough:
                raise FewDigits
        raise self.box.refusal(self.unexplained(best), witness)

    def unexplained(self, network: ReluNetwork | None) -> str:
        count = 0 if network is None else network.neurons
        return (
            f"{count} neurons explain the lines that were asked but not the box: at a fresh point "
            f"they are off by {self.agreement:.2g}, where {self.box.allowed():.2g} would be "
            "rounding"
        )

    def star(self) -> ReluNetwork:
        """Rays from one point: neurons one by one, then all of them together."""
        star = Star(
            lambda points: self.box.ask(points, "network"),
            self.region,
            self.rng,
            self.box.relative,
            self.unseen,
            self.box.noise,
            self.box.rounded,
        )
        try:
            complete = star.run()
        except NotPiecewiseAffine as error:
            raise self.box.refusal(str(error), self.on_ray(star, error)) from error
        finally:
            self.box.unit, self.box.scale = star.unit, star.scale
            self.passes_run = star.rays
        if not complete:
            raise self.star_refusal(star)
        if star.rough:
            unknowns = (star.network.neurons + 1) * (star.network.width + 1)
            star.asked(self.region.points(self.rng, int(ROUGH_POLISH_SHARE * unknowns)))
        star.refine()
        network, least = star.network, POLISHED * self.box.unit
        self.error, self.affine_error = star.error + least, star.affine_error + least
        self.agreement, witness = self.validate(network)
        if self.agreement > self.box.allowed():
            raise self.box.refusal(self.unexplained(network), witness)
        digits = self.box.unit / self.box.scale
        self.notes = (note_on_region(self.region, star.unseen, star.rough, digits),)
        return network

    def several_lines(self) -> ReluNetwork:
        """Neurons from as many lines as it takes, then all of them from all answers."""
        lines = Lines(
            lambda points: self.box.ask(points, "network"),
            self.region,
            self.rng,
            self.box.relative,
            self.box.noise,
            self.box.rounded,
        )
        try:
            explained = lines.run()
        except NotPiecewiseAffine as error:
            raise IllConditioned(
                f"{error}: a smooth activation, or more neurons than answers with so few digits "
                "can tell apart. The same box in double precision would tell"
            ) from error
        finally:
            self.box.unit, self.box.scale = lines.unit, lines.scale
            self.passes_run = lines.lines
        network = lines.network
        self.agreement, witness = self.validate(network)
        if not explained or self.agreement > self.box.allowed():
            raise self.box.refusal(self.unexplained(network), witness)
        self.error, self.affine_error = lines.error, lines.affine_error
        share = self.box.spent / lines.unknowns(network.neurons)
        digits = self.box.unit / self.box.scale
        self.notes = (note_on_digits(lines.lines, share, digits),)
        return network

    def on_ray(self, star: Star, error: NotPiecewiseAffine) -> Counterexample | None:
        """An answer on the last ray, which saw what the known neurons leave over."""
        if star.frame is None:
            return None
        point = self.box.rounded(star.frame.points(np.array([error.t])))
        known = star.network(point)[0]
        return self.box.counterexample(
            point, error.value + known, error.expected + known, str(error)
        )

    def star_refusal(self, star: Star) -> Exception:
        differences = star.differences()
        worst = int(np.argmax(differences))
        point = star.pool[worst : worst + 1]
        self.agreement = float(differences[worst])
        witness = self.box.counterexample(
            point, star.answers[worst], star.network(point)[0], "a random point of the domain"
        )
        message = self.unexplained(star.network)
        if star.rough or not star.bends:
            return self.box.refusal(message, witness, lines=self.passes_run)
        return WrongFamily(f"not one hidden layer of ReLUs: planes end or bend; {message}", witness)

    def least_squares(self, network: ReluNetwork, points: Array, answers: Array) -> ReluNetwork:
        """The best of a few solutions, each with fresh on/off patterns."""
        narrow = flat if self.box.scalar else unchanged
        wide = unflat if self.box.scalar else unchanged
        table = answers[:, 0] if self.box.scalar else answers
        best, smallest, current = network, np.inf, narrow(network)
        for _ in range(POLISH_ROUNDS + 1):
            difference = table - current(points)
            size = float(np.sqrt(np.mean(difference**2)))
            stalled = size > STALLED * smallest
            if size < smallest:
                best, smallest = wide(current), size
            if stalled:
                break
            current = polished(current, points, difference)
        return best

    def one_pass(self) -> Pass:
        frame, reach = self.region.line(self.rng)
        room, relative, noise = self.region.room, self.box.relative, self.box.noise
        trusting = self.passes_run == 0
        try:
            found = run_pass(
                self.exact_answers, frame, reach, room, relative, noise, trusting=trusting
            )
        except NotPiecewiseAffine as error:
            point = frame.points(np.array([error.t]))
            witness = self.box.counterexample(point, error.value, error.expected, str(error))
            raise self.box.refusal(str(error), witness) from error
        self.passes_run += 1
        self.box.unit = max(self.box.unit, found.unit)
        self.box.scale = max(self.box.scale, found.scale)
        self.error = np.append(self.error, found.error)
        self.affine_error += float(found.doubt[0])
        return found

    def exact_answers(self, points: Array) -> Array:
        answers = self.box.ask(points, "network")
        if self.box.single:
            raise FewDigits
        return answers

    def corrected(self, found: Pass) -> ReluNetwork:
        """Answers at random points decide between the two neurons at a narrow piece."""
        if not self.box.scalar or found.network.neurons == 0:
            return found.network
        pieces = int((found.doubt > CORRECTED * self.box.scale).sum())
        unknowns = pieces * (found.network.width + 1)
        count = min(unknowns, int(CORRECTION_SHARE * self.box.spent))
        if count == 0:
            return found.network
        network = flat(found.network)
        doubts = Doubts(found.doubt, found.centres, found.length)
        candidates = self.region.points(self.rng, CANDIDATES * count)
        points = informative(network, doubts, candidates, count)
        difference = self.box.ask(points, "corrections")[:, 0] - network(points)
        network = corrected(network, doubts, points, difference, ANSWER_NOISE * self.box.unit)
        np.minimum(found.doubt, CORRECTED * self.box.scale, out=found.doubt)
        self.error = found.error
        return unflat(network)

    def validate(self, network: ReluNetwork) -> tuple[float, Counterexample]:
        count = int(np.clip(VALIDATION_SHARE * self.box.spent, *VALIDATION_POINTS))
        sizes = np.resize(VALIDATION_SIZES, count)
        points = np.concatenate([self.region.points(self.rng, 1, size) for size in sizes])
        points = self.box.rounded(points)
        answers = self.box.ask(points, "validation")
        predicted = network(points)
        differences = np.linalg.norm(answers - predicted, axis=1) / np.maximum(sizes, 1.0)
        i = int(np.argmax(differences))
        return float(differences[i]), self.box.counterexample(
            points[i : i + 1], answers[i], predicted[i], "a fresh point"
        )

    def polish(self, network: ReluNetwork) -> ReluNetwork:
        """All parameters again, from as many random points as there are unknowns and some."""
        unknowns = (network.neurons + 1) * (network.width + 1)
        floor = network.neurons * (network.width + 1) + 1
        count = min(int(POLISH_SHARE * unknowns), int(POLISH_LIMIT * floor) - self.box.spent)
        points = self.region.points(self.rng, max(count, unknowns + 1))
        if self.region.unbounded:
            points = balanced_points(network, points, int(SEEN * (network.width + 1)))
        answers = self.box.ask(points, "polish")
        best = self.least_squares(network, points, answers)
        self.error = np.full(best.neurons, POLISHED * self.box.unit)
        self.affine_error = POLISHED * self.box.unit
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
        model = flat(decided.network) if self.box.scalar else decided.network
        errors = standard_errors(model, error, self.affine_error, self.region.scale)
        digits = self.box.unit / max(self.box.scale, TINY)
        model = without_rounding(model, errors, self.box.scale, self.region.scale, digits)
        floor = (network.neurons * (network.width + answer) + answer) / answer
        details = {
            "neurons": network.neurons,
            "sides": decided.method,
            "sides_certified": decided.certified,
            "validation_difference": self.agreement,
            "function_error": max(self.agreement, float(np.linalg.norm(error))),
            "rounding": self.box.unit,
            "scale": self.box.scale,
            "passes": self.passes_run,
            "leak": decided.leak,
            "radius": self.region.radius,
        }
        precision = Precision(SINGLE) if self.box.single else None
        notes = (*notes_on(decided), *self.notes)
        return Learned(model, errors, floor, notes, details, precision)


class FewDigits(Exception):
    """The answers are not exact enough for a single line."""


def unchanged(network: ReluNetwork) -> ReluNetwork:
    return network
