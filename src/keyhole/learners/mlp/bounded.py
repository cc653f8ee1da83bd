"""A ReLU network inside a bounded domain: rays from one point.

Statement.  All planes that a set of random points can tell from the centre's side are found, one
            by one, each with checks of its own.
Queries.  The gradient at a centre; random points, most of them at the edge (the pool); then rays
            from the centre through points of the pool that the network so far does not explain:
            such a ray must meet an unknown plane. Every kink on a ray is measured by itself
            (learners/mlp/hyperplanes) on what the known neurons leave over.
Algebra.    Neurons are turned so that the centre is on their dead side: there the answers are the
            affine part, and what is left over at a point of the pool is what the unknown neurons
            that are on there contribute.
Fails.      Kinks too close or too weak for the answers' digits stay unexplained: rays without
            progress end the search. A known plane that turns up again with another jump is no
            plane: another family. A plane that cuts off less of the domain than the pool can see
            is missed; `Star.unseen` bounds how much that may be.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import TINY, Array
from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.gradients import AskPoints, Frame
from keyhole.learners.mlp.hyperplanes import Patches, measured_patches
from keyhole.learners.mlp.kinks import STEP
from keyhole.learners.mlp.line_search import trace
from keyhole.learners.mlp.pieces import measured_rounding
from keyhole.learners.mlp.relu_corrections import updated
from keyhole.learners.mlp.relu_hypothesis import joined, only
from keyhole.models.relu_network import ReluNetwork

POOL = 256  # random points that must be explained, asked at a time, until so many agree that
CONFIDENCE_POINTS = 3.0  # of n agreeing points: at most 3/n of such points differ (95%)
EDGE = 0.75  # share of them at the edge of the domain: there every neuron is on somewhere
CENTRE_STEP = 0.1  # first step of the gradient at the centre, relative to the input scale,
CENTRE_SHORTER = 0.2  # shortened by this until no plane is near
CENTRE_ATTEMPTS = 7
CENTRE_CHECKS = 3
CLUSTER_STEP = 0.02  # length, in input scales, of the stretch on which rounding is measured,
SHORT_CLUSTER_STEP = 2e-5  # and where inputs are not rounded: a bend there must not pass for noise
SAFETY = 40.0  # differences beyond this many errors are not explained
RAYS = 80  # most rays; typical are three to six
PATIENCE = 10  # rays without a new neuron before the search ends,
STUCK = 16  # or rays that leave as many points unexplained as before,
CLOSE_PATIENCE = 3  # or so few where all that is left over is
CLOSE = 1e-6  # this small beside the answers: errors of neurons, which a polish removes
ROUGH = 1e-11  # rounding relative to the answers from which on tangents are long and checked
ROUGH_STEP = 0.1  # of a tangent, relative to the free distance
RELIABLE = 3.0  # how far a line is trusted there, in units of its length
ROOMY = 3e3  # error of a neuron, in roundings, beyond which another ray may do better
BENDS = 8.0  # changes of slope, in errors of the known neurons, that are no kinks
ROUGH_ROOMY = 300.0  # the same where answers have few digits
PLACES = 5  # of a plane at which it is looked for again, where answers have few digits,
FAR_OFF = 10.0  # on either side of it, in units of its error,
VISIBLE = 60.0  # at least so that the answers change by this many roundings
FAR_SIZE = 4.0  # of rounding errors out there, in units of those at the centre
ALIKE = 0.4  # relative difference of the two jumps that are one
REFITS = 4  # solutions, each with fresh on/off patterns
PRIOR = 100.0  # errors before the fit, in units of those expected: what is asked decides
ANSWER_NOISE = 2.0  # error of an answer in a fit, in roundings
NOTHING = 8.0  # errors of a neuron below which it is none
WASTED, WASTED_SHARE = 60, 4  # kinks that are no planes, and per neuron, that end the search
SAME_PLANE = 1e-4  # distance of unit planes, in input scales, that are one
BENT = 0.05  # change of a known neuron's jump that says: its plane ends here


@dataclass(eq=False)
class Star:
    """The search: what is known so far and what it rests on."""

    ask: AskPoints
    region: InputRegion
    rng: np.random.Generator
    relative: float  # rounding of an answer, at least
    share: float  # of the domain's edge that may stay unseen
    noise: float = 0.0  # error of an answer beyond that, stated
    rounded: Callable[[Array], Array] = np.asarray  # points as the box sees them
    unit: float = 0.0
    scale: float = 0.0
    rays: int = 0
    log: list[tuple[Array, Array]] = field(default_factory=list)
    bent: bool = False  # a known plane was met again with another jump
    wasted: int = 0  # kinks that turned out to be no planes
    frame: Frame | None = None  # the line that was looked at last
    network: ReluNetwork = field(init=False)
    error: Array = field(default_factory=lambda: np.zeros(0))  # of output_j weight_j, per neuron
    affine_error: float = 0.0  # of the answers, across the domain
    centre: Array = field(init=False)
    pool: Array = field(init=False)
    answers: Array = field(init=False)

    def run(self) -> bool:
        """Whether all points of the pool are explained."""
        self.begin()
        self.at_centre()
        while self.explained():
            if len(self.pool) * self.share >= CONFIDENCE_POINTS:
                return True
            self.widen()
        return False

    def explained(self) -> bool:
        """Rays through points that are not explained, until there are none."""
        idle, stuck, fewest = 0, 0, np.inf
        while self.rays < RAYS and not self.hopeless and stuck < STUCK:
            differences = self.differences()
            unexplained = np.flatnonzero(differences > self.allowed())
            stuck = stuck + 1 if len(unexplained) >= fewest else 0
            fewest = min(fewest, len(unexplained))
            if len(unexplained) == 0:
                return True
            close = float(differences.max()) <= CLOSE * self.scale
            if idle >= (CLOSE_PATIENCE if close else PATIENCE):
                return close
            witness = self.pool[self.rng.choice(unexplained)]
            idle = 0 if self.ray(witness) else idle + 1
        return False

    def asked(self, points: Array) -> Array:
        points = self.rounded(points)
        answers = self.ask(points)
        self.log.append((points, answers))
        return answers

    def refine(self) -> None:
        """All parameters from all answers; neurons that turn out to be nothing are dropped."""
        self.refit()
        strength = np.linalg.norm(self.network.output, axis=1) * self.region.size
        real = strength > NOTHING * self.error
        if not real.all():
            self.network, self.error = only(self.network, real), self.error[real]
            self.refit()

    def refit(self) -> None:
        """All parameters again, by least squares, a few times: on/off patterns may change."""
        points = np.concatenate([part for part, _ in self.log])
        answers = np.concatenate([part for _, part in self.log])
        far = 1 + np.linalg.norm(points - self.centre, axis=1) / self.region.size
        noise = ANSWER_NOISE * self.unit * far
        prior = PRIOR * np.append(self.affine_error, self.error) / self.region.size
        for _ in range(REFITS):
            difference = answers - self.network(points)
            found = updated(self.network, prior, points, difference, noise)
            if found is None:
                return
            before = np.linalg.norm(difference / noise[:, None])
            after = np.linalg.norm((answers - found[0](points)) / noise[:, None])
            if after > before:
                return
            self.network, spread = found[0], found[1] * self.region.size
            self.affine_error, self.error = float(spread[0]), spread[1:]

    def begin(self) -> None:
        """The first part of the pool, and how exact the answers are."""
        self.centre = self.region.inner_point(self.rng)
        self.pool = np.zeros((0, len(self.centre)))
        self.widen()
        self.scale = float(np.linalg.norm(np.std(self.answers, axis=0)))
        direction = self.region.scale * self.rng.standard_normal(len(self.centre))
        measured = measured_rounding(
            lambda times: self.asked(self.centre + np.outer(times, direction)),
            CLUSTER_STEP if self.relative > ROUGH else SHORT_CLUSTER_STEP,
        )
        largest = float(np.abs(self.answers).max())
        self.unit = max(self.relative * largest, self.noise, measured, TINY)

    def widen(self) -> None:
        """More points of the pool."""
        inside = self.region.points(self.rng, round((1 - EDGE) * POOL), 1.0)
        edge = self.region.edge_points(self.rng, POOL - len(inside))
        points = self.rounded(np.concatenate([inside, edge]))
        answers = self.asked(points)
        known = self.answers if len(self.pool) else answers[:0]
        self.pool = np.concatenate([self.pool, points])
        self.answers = np.concatenate([known, answers])

    @property
    def hopeless(self) -> bool:
        """Whether far more kinks were met than belong to planes: the answers bend everywhere."""
        return self.wasted > WASTED + WASTED_SHARE * self.network.neurons

    @property
    def bends(self) -> bool:
        return self.bent or self.hopeless

    @property
    def rough(self) -> bool:
        return self.unit > ROUGH * self.scale

    @property
    def unseen(self) -> float:
        """Share of points like those of the pool on which the box may differ (95%)."""
        return CONFIDENCE_POINTS / len(self.pool)

    def at_centre(self) -> None:
        """The affine part: value and gradient at the centre, where no plane is near."""
        width = len(self.centre)
        step = CENTRE_STEP * self.region.scale
        for _ in range(CENTRE_ATTEMPTS):
            spots = self.rng.standard_normal((CENTRE_CHECKS, width))
            spots /= np.linalg.norm(spots, axis=1, keepdims=True)
            offsets = np.concatenate([np.zeros((1, width)), np.eye(width), spots])
            values = self.asked(self.centre + step * offsets)
            slopes = (values[1 : width + 1] - values[0]) / step
            gap = np.abs(values[width + 1 :] - values[0] - step * spots @ slopes).max()
            if gap <= SAFETY * self.unit:
                break
            step *= CENTRE_SHORTER
        answer = values.shape[1]
        self.network = ReluNetwork(
            np.zeros((0, width)),
            np.zeros(0),
            np.zeros((0, answer)),
            slopes,
            values[0] - self.centre @ slopes,
        )
        self.affine_error = self.unit * self.region.size / step

    def floor(self) -> float:
        """Error of the network so far across the domain."""
        return float(np.hypot(np.linalg.norm(self.error), self.affine_error))

    def differences(self) -> Array:
        return np.asarray(np.linalg.norm(self.answers - self.network(self.pool), axis=1))

    def allowed(self) -> float:
        return SAFETY * (self.unit + self.floor())

    def left_over(self, points: Array) -> Array:
        return np.asarray(self.asked(points) - self.network(self.rounded(points)))

    def ray(self, witness: Array) -> bool:
        """Looks at the line through centre and witness; whether it led to a neuron."""
        self.rays += 1
        self.frame, reach = self.region.line_through(self.centre, witness)
        frame = self.frame
        line = trace(
            lambda times: self.left_over(frame.points(times)),
            np.finfo(float).eps,
            self.unit,
            reach,
            trusting=False,
            step=ROUGH_STEP if self.rough else STEP,
            bends=BENDS * self.floor(),
            reliable=RELIABLE if self.rough else 0.0,
        )
        if len(line.kinks) == 0:
            return False
        patches = measured_patches(
            self.left_over, line, frame, self.region.room, self.rng, self.unit, self.floor()
        )
        self.wasted += len(line.kinks) - len(patches.bias)
        fresh, error = self.oriented(patches)
        roomy = error <= (ROUGH_ROOMY if self.rough else ROOMY) * self.unit
        if roomy.any():
            fresh, error = only(fresh, roomy), error[roomy]
        if self.rough:
            sure = self.confirmed(fresh, error)
            fresh, error = only(fresh, sure), error[sure]
        return self.take(fresh, error)

    def confirmed(self, fresh: ReluNetwork, error: Array) -> Array:
        """Which neurons bend the answers as they should at some other place of their planes too:
        two planes that passed for one do not."""
        sure = np.zeros(fresh.neurons, dtype=bool)
        strength = np.maximum(np.linalg.norm(fresh.output, axis=1), TINY)
        off = error / strength  # of the plane's position
        step = np.maximum(FAR_OFF * off, VISIBLE * self.unit * FAR_SIZE / strength)
        for _ in range(PLACES):
            left = np.flatnonzero(~sure)
            if len(left) == 0:
                break
            spots = self.region.points(self.rng, len(left))
            rows, bias = fresh.weight[left], fresh.bias[left]
            spots = spots - (np.einsum("nd,nd->n", rows, spots) + bias)[:, None] * rows
            inside = self.region.room(spots, 1.0) > 2 * step[left]
            left, spots, rows = left[inside], spots[inside], rows[inside]
            if len(left) == 0:
                continue
            h = step[left][:, None]
            places = np.concatenate([spots + side * h * rows for side in (-2, -1, 1, 2)])
            values = self.left_over(places).reshape(4, len(left), -1)
            before, after = (values[1] - values[0]) / h, (values[3] - values[2]) / h
            jump = after - before
            gap = (values[2] - h * after) - (values[1] + h * before)  # zero if they meet at zero
            good = np.linalg.norm(jump - fresh.output[left], axis=1) <= ALIKE * strength[left]
            good &= np.linalg.norm(gap, axis=1) <= ALIKE * strength[left] * step[left]
            sure[left[good]] = True
        return sure

    def oriented(self, found: Patches) -> tuple[ReluNetwork, Array]:
        """Neurons with the centre on their dead side, and their errors across the domain."""
        side = np.where(found.weight @ self.centre + found.bias > 0, -1.0, 1.0)
        network = ReluNetwork(side[:, None] * found.weight, side * found.bias, found.output)
        return network, found.error

    def take(self, fresh: ReluNetwork, error: Array) -> bool:
        """Adds neurons; one on a known plane corrects that neuron, or shows that it bends."""
        known = self.network
        output, new = np.array(known.output), []
        for j in range(fresh.neurons):
            gaps = np.linalg.norm(known.weight - fresh.weight[j], axis=1)
            gaps = gaps + np.abs(known.bias - fresh.bias[j]) / self.region.size
            i = int(np.argmin(gaps)) if len(gaps) else 0
            if len(gaps) == 0 or gaps[i] > SAME_PLANE:
                new.append(j)
                continue
            if np.linalg.norm(fresh.output[j]) > BENT * np.linalg.norm(output[i]):
                self.bent = True
            output[i] += fresh.output[j]
        known = ReluNetwork(known.weight, known.bias, output, known.skip, known.offset)
        self.network = joined(known, only(fresh, np.array(new, dtype=int)))
        self.error = np.concatenate([self.error, error[new]])
        return len(new) > 0
