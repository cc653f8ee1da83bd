"""The search for a ReLU network behind a box: by one line, by several, or by rays."""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, IllConditioned, WrongFamily
from keyhole.learners.mlp.bounded import Star
from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.low_precision import Lines
from keyhole.learners.mlp.pieces import NotPiecewiseAffine
from keyhole.learners.mlp.relu_answers import Answers
from keyhole.learners.mlp.relu_corrections import (
    Doubts,
    balanced_points,
    corrected,
    informative,
    polished,
)
from keyhole.learners.mlp.relu_hypothesis import flat, note_on_digits, note_on_region, unflat
from keyhole.learners.mlp.relu_pass import Pass, run_pass
from keyhole.models.relu_network import ReluNetwork

CORRECTED = 2.5e-11  # predicted error of a piece, relative to the answers, worth a correction
CORRECTION_SHARE = 0.08  # most queries spent on corrections, relative to those spent before
VALIDATION_SIZES = (1.0, 3.0, 0.3, 1.0)  # input scale of the validation points, in turn
VALIDATION_SHARE = 0.01  # validation points per query spent before,
VALIDATION_POINTS = 4, 12  # within these bounds
PASSES = 3  # lines tried before the box is refused
POLISH_SHARE = 1.2  # answers per unknown in the exact mode
POLISH_LIMIT = 2.48  # and the most that passes and polish may cost together, per unknown
ANSWER_NOISE = 4.0  # error of an answer at a random point, in units of the rounding at zero
CANDIDATES = 4  # random points per correction query, of which the best are asked
POLISHED = 20.0  # error of the parameters after the polish, in units of one answer's rounding
STALLED = 0.7  # a round that leaves more than this of the difference is the last
SEEN = 1.5  # points on either side of each plane in the exact mode, per unknown of a neuron
ROUGH_POLISH_SHARE = 3.0  # random points per unknown in the end, where answers have few digits
FOREIGN = 0.1  # of the answers' spread: so far off, several lines miss more than weak neurons
POLISH_ROUNDS = 5  # solutions of the least squares problem, each with fresh on/off patterns


class FewDigits(Exception):
    """The answers are not exact enough for a single line."""


@dataclass(eq=False)
class NetworkSearch:
    """All that is asked of one box, and what it came to."""

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
        if self.agreement > FOREIGN * lines.spread:
            raise WrongFamily(
                f"not one hidden layer of ReLUs: {self.unexplained(network)}", witness
            )
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
        """All parameters of a scalar box again, from more random points than unknowns."""
        unknowns = (network.neurons + 1) * (network.width + 1)
        floor = network.neurons * (network.width + 1) + 1
        count = min(int(POLISH_SHARE * unknowns), int(POLISH_LIMIT * floor) - self.box.spent)
        points = self.region.points(self.rng, max(count, unknowns + 1))
        if self.region.unbounded:
            points = balanced_points(network, points, int(SEEN * (network.width + 1)))
        answers = self.box.ask(points, "polish")
        best = least_squares(network, points, answers[:, 0])
        self.error = np.full(best.neurons, POLISHED * self.box.unit)
        self.affine_error = POLISHED * self.box.unit
        return best


def least_squares(
    network: ReluNetwork, points: Float[Array, "n d"], answers: Float[Array, " n"]
) -> ReluNetwork:
    """The best of a few solutions, each with fresh on/off patterns."""
    best, smallest, current = network, np.inf, flat(network)
    for _ in range(POLISH_ROUNDS + 1):
        difference = answers - current(points)
        size = float(np.sqrt(np.mean(difference**2)))
        stalled = size > STALLED * smallest
        if size < smallest:
            best, smallest = unflat(current), size
        if stalled:
            break
        current = polished(current, points, difference)
    return best
