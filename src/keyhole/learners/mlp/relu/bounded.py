"""A ReLU network inside a bounded domain: rays from one point.

Statement.  All hyperplanes that a set of random points can tell from the centre's side are found,
            one by one, each with checks of its own.
Queries.    The gradient at a centre; random validation points, most of them at the edge; then rays
            from the centre through validation points that the network so far does not explain:
            such a ray must meet an unknown hyperplane. Every breakpoint on a ray is measured by
            itself (hyperplanes) on what the known neurons leave over.
Algebra.    Neurons are turned so that the centre is on their dead side: there the answers are the
            affine part, and what is left over at a validation point is what the unknown neurons
            that are on there contribute. In the end all answers together give all parameters.
            Where answers have few digits and rays come to an end, such a fit tells right neurons
            from wrong ones.
Fails.      Breakpoints too close or too weak for the answers' digits stay unexplained: rays without
            progress end the search. A known hyperplane that turns up again with another jump is no
            hyperplane: another family. One that cuts off less of the domain than the validation
            points can see is missed; `RaySearch.unseen` bounds how much that may be.
Source.     Ours.
"""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import Counterexample
from keyhole.learners.base import Refuted
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.gradients import AskPoints, Frame
from keyhole.learners.mlp.relu.hyperplanes import Hyperplanes, measure_hyperplanes
from keyhole.learners.mlp.relu.hypothesis import (
    CLEAN,
    Exactness,
    FoundNetwork,
    NetworkBox,
    SearchResult,
    refuse,
    report_unexplained,
    validate_network,
)
from keyhole.learners.mlp.relu.least_squares import (
    Samples,
    join_neurons,
    keep_neurons,
    update_network,
)
from keyhole.learners.mlp.relu.line_search import (
    TOLERANCE,
    LineSearchOptions,
    NotPiecewiseAffine,
    measure_rounding,
    search_line,
)
from keyhole.learners.mlp.relu.several_lines import MultiLineOptions, MultiLineSearch
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.noise import REJECTION

POINTS = 256  # validation points asked at a time
CONFIDENCE_POINTS = 3.0  # of n agreeing points: at most 3/n of such points differ (95%)
LEAST_ERROR = 20.0  # of the parameters in the end, in units of one answer's rounding


@dataclass(frozen=True)
class RayOptions:
    """When the search ends and what it takes for a hyperplane."""

    rays: int = 80
    """Most rays; typical are three to six."""
    patience: int = 10
    """Rays without a new neuron before the search ends; three where all that is left over is
    errors of the known neurons, which the final fit removes."""
    stuck: int = 16
    """Rays that leave as many points unexplained as before, before the search ends."""
    wasted: int = 60
    """Breakpoints that are no hyperplanes, and four per neuron, before the search ends."""
    edge: float = 0.75
    """Share of the first validation points at the edge of the domain, where every neuron is on
    somewhere; those after them all are."""
    roomy: float = 3e3
    """Error of a neuron, in roundings, beyond which another ray may do better; a tenth of that
    where answers have few digits."""
    same: float = 1e-4
    """Distance of unit hyperplanes, in input scales, that are one."""
    bent: float = 0.05
    """Change of a known neuron's jump that says: its hyperplane ends here."""
    explained: float = 3.0
    """Misfit (mean square, in errors of the answers) of a fit to all answers that is rounding."""
    step: float = 0.1
    """Length of a tangent where answers have few digits, relative to the free distance; lines are
    then trusted no further than three times their lengths."""


def search_by_rays(
    box: NetworkBox, region: InputRegion, rng: np.random.Generator, unseen: float
) -> SearchResult:
    """Neurons one by one, until all validation points are explained; then all of them together."""
    search = RaySearch.begin(box, region, rng)
    try:
        complete = search.run(unseen)
    except NotPiecewiseAffine as error:
        return refuse(str(error), search.exactness, search.witness_on_ray(error))
    if not complete:
        return search.refuse()
    if search.exactness.low:
        unknowns = (search.network.neurons + 1) * (search.network.width + 1)
        search.ask(region.points(rng, 3 * unknowns))
    search.refine()
    # twins for one hyperplane excuse each other's errors by their own: all answers tell
    explained = not search.exactness.low or search.misfit() <= search.options.explained
    if not (explained or search.reconsider()):
        return search.refuse()
    exactness, least = search.exactness, LEAST_ERROR * search.exactness.unit
    agreement, witness = validate_network(box, region, search.network, rng)
    if agreement > exactness.allowed:
        message = report_unexplained(search.network, agreement, exactness)
        return refuse(message, exactness, witness)
    return FoundNetwork(
        search.network,
        search.error + least,
        search.affine_error + least,
        agreement,
        exactness,
        search.rays,
        (report_region(region, search.unseen, exactness),),
    )


@dataclass(eq=False)
class RaySearch:
    """The accumulator: the network so far and what it rests on."""

    box: NetworkBox
    region: InputRegion
    rng: np.random.Generator
    centre: Float[Array, " d"]
    network: ReluNetwork
    points: Float[Array, "n d"]  # that must be explained
    answers: Float[Array, "n k"]
    at_edge: int  # how many of them are at the edge of the domain
    exactness: Exactness
    affine_error: float  # of the answers, across the domain
    log: list[tuple[Array, Array]]  # all points and answers
    error: Array = field(default_factory=lambda: np.zeros(0))  # of output_j weight_j, per neuron
    options: RayOptions = field(default_factory=RayOptions)
    rays: int = 0
    bent: bool = False  # a known hyperplane was met again with another jump
    wasted: int = 0  # breakpoints that turned out to be no hyperplanes
    frame: Frame | None = None  # the line that was looked at last
    doubtful: ReluNetwork = field(init=False)  # measured and not confirmed

    def __post_init__(self) -> None:
        self.doubtful = keep_neurons(self.network, np.zeros(0, dtype=int))

    @classmethod
    def begin(cls, box: NetworkBox, region: InputRegion, rng: np.random.Generator) -> "RaySearch":
        """The first validation points, how exact the answers are, and the affine part: value and
        gradient at a centre, where no hyperplane is near."""
        log: list[tuple[Array, Array]] = []

        def ask(points: Array) -> Array:
            points = box.round_points(points)
            answers = box.ask(points)
            log.append((points, answers))
            return answers

        centre = region.inner_point(rng)
        points = box.round_points(draw_points(region, rng, RayOptions().edge))
        answers = ask(points)
        exactness = measure_exactness(box, region, rng, centre, answers, ask)
        slopes, value, step = measure_affine_part(region, rng, centre, exactness.unit, ask)
        width, answer = slopes.shape
        network = ReluNetwork(
            np.zeros((0, width)),
            np.zeros(0),
            np.zeros((0, answer)),
            slopes,
            value - centre @ slopes,
        )
        affine_error = exactness.unit * region.size / step
        seen = points, answers, round(RayOptions().edge * POINTS)
        return cls(box, region, rng, centre, network, *seen, exactness, affine_error, log)

    def run(self, unseen: float) -> bool:
        """Whether all validation points are explained, and so many that at most the given share of
        the domain's edge may differ."""
        while self.explain() or (self.exactness.low and self.reconsider()):
            missing = int(np.ceil(CONFIDENCE_POINTS / unseen)) - self.at_edge
            if missing <= 0:
                return True
            # these look for corners: all of them at the edge
            points = self.region.edge_points(self.rng, min(POINTS, missing))
            points = self.box.round_points(points)
            answers = self.ask(points)
            self.at_edge += len(points)
            self.points = np.concatenate([self.points, points])
            self.answers = np.concatenate([self.answers, answers])
        return False

    def explain(self) -> bool:
        """Rays through points that are not explained, until there are none."""
        idle, stuck, fewest = 0, 0, np.inf
        while self.rays < self.options.rays and not self.hopeless and stuck < self.options.stuck:
            differences = self.differences()
            unexplained = np.flatnonzero(differences > self.allowed())
            stuck = stuck + 1 if len(unexplained) >= fewest else 0
            fewest = min(fewest, len(unexplained))
            if len(unexplained) == 0:
                return True
            close = float(differences.max()) <= 1e-6 * self.exactness.scale
            if idle >= (3 if close else self.options.patience):
                return close
            witness = self.points[self.rng.choice(unexplained)]
            idle = 0 if self.follow_ray(witness) else idle + 1
        return False

    def reconsider(self) -> bool:
        """Where answers have few digits, two hyperplanes may have passed for one, and right ones
        for wrong: of all that were measured, those are taken that random points need
        (several_lines). All parameters are then fitted to all answers; whether that explains
        them."""
        seen, options = join_neurons(self.network, self.doubtful), MultiLineOptions()
        unknowns = (seen.neurons + 1) * (seen.width + 1)
        if unknowns > options.most_unknowns:
            return False
        random = [Samples(self.points, self.answers, self.growth(self.points))]
        missing = int(options.points * unknowns) - len(self.points)
        if missing > 0:
            inside = self.region.points(self.rng, missing // 2)
            edge = self.region.edge_points(self.rng, missing - len(inside))
            points = self.box.round_points(np.concatenate([inside, edge]))
            random.append(Samples(points, self.ask(points), self.growth(points)))
        search = MultiLineSearch(
            self.box,
            self.region,
            self.rng,
            options,
            self.exactness,
            random=random,
            beside=[Samples(*part, self.growth(part[0])) for part in self.log],
            votes=np.where(np.arange(seen.neurons) < self.network.neurons, 2, 1),
            measured=seen,
        )
        search.explain()
        explained = self.options.explained
        if search.misfit <= explained:
            search.refine()
        if search.misfit > explained:
            return False
        self.network, self.error = search.network, search.error
        self.affine_error = search.affine_error
        return True

    def samples(self) -> Samples:
        points, answers = (np.concatenate(part) for part in zip(*self.log, strict=True))
        return Samples(points, answers, self.answer_noise(points))

    def misfit(self) -> float:
        """What the network leaves of all answers: mean square, in errors of the answers."""
        return self.samples().misfit(self.network)

    def follow_ray(self, witness: Array) -> bool:
        """Looks at the line through centre and witness; whether it led to a neuron."""
        self.rays += 1
        frame, reach = self.region.line_through(self.centre, witness)
        self.frame = frame
        low, unit = self.exactness.low, self.exactness.unit
        options = LineSearchOptions(trusting=False)
        if low:
            options = LineSearchOptions(step=self.options.step, reliable=3.0, trusting=False)
        line = search_line(
            lambda times: self.ask_left_over(frame.points(times)),
            np.finfo(float).eps,
            unit,
            reach,
            bends=REJECTION * self.network_error(),
            options=options,
        )
        if len(line.breakpoints) == 0:
            return False
        found = measure_hyperplanes(
            self.ask_left_over, line, frame, self.region.room, self.rng, unit, self.network_error()
        )
        self.wasted += len(line.breakpoints) - len(found.bias)
        fresh, error = self.orient(found), found.error
        roomy = error <= (self.options.roomy / 10 if low else self.options.roomy) * unit
        if roomy.any():
            fresh, error = keep_neurons(fresh, roomy), error[roomy]
        if low:
            sure = self.confirm(fresh, error)
            self.doubtful = join_neurons(self.doubtful, keep_neurons(fresh, ~sure))
            fresh, error = keep_neurons(fresh, sure), error[sure]
        return self.add_neurons(fresh, error)

    def orient(self, found: Hyperplanes) -> ReluNetwork:
        """Neurons with the centre on their dead side."""
        side = np.where(found.weight @ self.centre + found.bias > 0, -1.0, 1.0)
        return ReluNetwork(side[:, None] * found.weight, side * found.bias, found.output)

    def confirm(self, fresh: ReluNetwork, error: Array) -> Array:
        """Which neurons bend the answers as they should at some other place of their hyperplanes
        too: two hyperplanes that passed for one do not. Five places are tried, on either side at
        ten errors of the hyperplane or where answers change by 240 roundings."""
        sure = np.zeros(fresh.neurons, dtype=bool)
        strength = np.maximum(np.linalg.norm(fresh.output, axis=1), TINY)
        step = np.maximum(10 * error, 240 * self.exactness.unit) / strength
        for _ in range(5):
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
            values = self.ask_left_over(places).reshape(4, len(left), -1)
            before, after = (values[1] - values[0]) / h, (values[3] - values[2]) / h
            jump = after - before
            gap = (values[2] - h * after) - (values[1] + h * before)  # zero if they meet at zero
            alike = 0.4 * strength[left]
            good = np.linalg.norm(jump - fresh.output[left], axis=1) <= alike
            good &= np.linalg.norm(gap, axis=1) <= alike * step[left]
            sure[left[good]] = True
        return sure

    def add_neurons(self, fresh: ReluNetwork, error: Array) -> bool:
        """Adds neurons; one on a known hyperplane corrects that neuron, or shows that it bends."""
        known = self.network
        output, new = np.array(known.output), []
        for j in range(fresh.neurons):
            gaps = np.linalg.norm(known.weight - fresh.weight[j], axis=1)
            gaps = gaps + np.abs(known.bias - fresh.bias[j]) / self.region.size
            i = int(np.argmin(gaps)) if len(gaps) else 0
            if len(gaps) == 0 or gaps[i] > self.options.same:
                new.append(j)
                continue
            if np.linalg.norm(fresh.output[j]) > self.options.bent * np.linalg.norm(output[i]):
                self.bent = True
            output[i] += fresh.output[j]
        known = ReluNetwork(known.weight, known.bias, output, known.skip, known.offset)
        self.network = join_neurons(known, keep_neurons(fresh, np.array(new, dtype=int)))
        self.error = np.concatenate([self.error, error[new]])
        return len(new) > 0

    def refine(self) -> None:
        """All parameters from all answers; neurons that the fit moved onto one hyperplane are one,
        and neurons that turn out to be nothing are dropped."""
        if not self.network.neurons:
            return
        self.refit()
        gaps = np.linalg.norm(self.network.weight[:, None] - self.network.weight, axis=2)
        gaps += np.abs(self.network.bias[:, None] - self.network.bias) / self.region.size
        first = np.argmax(gaps <= self.options.same, axis=1)  # of those on this hyperplane
        own = first == np.arange(len(first))
        if not own.all():
            output = np.zeros_like(self.network.output)
            np.add.at(output, first, self.network.output)
            known = self.network
            known = ReluNetwork(known.weight, known.bias, output, known.skip, known.offset)
            self.network = keep_neurons(known, own)
            self.error = self.error[own]
            self.refit()
        strength = np.linalg.norm(self.network.output, axis=1) * self.region.size
        real = strength > REJECTION * self.error
        if not real.all():
            self.network, self.error = keep_neurons(self.network, real), self.error[real]
            self.refit()

    def refit(self) -> None:
        """All parameters again, by least squares, four times: on/off patterns may change."""
        points = np.concatenate([part for part, _ in self.log])
        answers = np.concatenate([part for _, part in self.log])
        noise = self.answer_noise(points)
        # errors before the fit are taken a hundred times larger: what is asked decides
        prior = 100 * np.append(self.affine_error, self.error) / self.region.size
        for _ in range(4):
            difference = answers - self.network(points)
            found = update_network(self.network, prior, points, difference, noise)
            if found is None:
                return
            before = np.linalg.norm(difference / noise[:, None])
            after = np.linalg.norm((answers - found[0](points)) / noise[:, None])
            if after > before:
                return
            self.network, spread = found[0], found[1] * self.region.size
            self.affine_error, self.error = float(spread[0]), spread[1:]

    def answer_noise(self, points: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Errors of answers, which grow with the distance from the centre."""
        return 2 * self.exactness.unit * self.growth(points)

    def growth(self, points: Float[Array, "n d"]) -> Float[Array, " n"]:
        """Of errors of answers, relative to those at the centre."""
        return np.asarray(1 + np.linalg.norm(points - self.centre, axis=1) / self.region.size)

    def ask(self, points: Array) -> Array:
        points = self.box.round_points(points)
        answers = self.box.ask(points)
        self.log.append((points, answers))
        return answers

    def ask_left_over(self, points: Array) -> Array:
        return np.asarray(self.ask(points) - self.network(self.box.round_points(points)))

    def differences(self) -> Array:
        return np.asarray(np.linalg.norm(self.answers - self.network(self.points), axis=1))

    def network_error(self) -> float:
        """Error of the network so far across the domain."""
        return float(np.hypot(np.linalg.norm(self.error), self.affine_error))

    def allowed(self) -> float:
        return TOLERANCE * (self.exactness.unit + self.network_error())

    @property
    def hopeless(self) -> bool:
        """Whether far more breakpoints were met than belong to hyperplanes: the answers bend
        everywhere."""
        return self.wasted > self.options.wasted + 4 * self.network.neurons

    @property
    def unseen(self) -> float:
        """Share of the domain's edge on which the box may differ (95%)."""
        return CONFIDENCE_POINTS / self.at_edge

    def witness_on_ray(self, error: NotPiecewiseAffine) -> Counterexample | None:
        """An answer on the last ray, which saw what the known neurons leave over."""
        if self.frame is None:
            return None
        point = self.box.round_points(self.frame.points(np.array([error.t])))
        known = self.network(point)[0]
        value, expected = error.value + known, error.expected + known
        return self.box.counterexample(point, value, expected, str(error))

    def refuse(self) -> SearchResult:
        """What the validation points that stay unexplained say about the box."""
        differences = self.differences()
        worst = int(np.argmax(differences))
        point = self.points[worst : worst + 1]
        witness = self.box.counterexample(
            point, self.answers[worst], self.network(point)[0], "a random point of the domain"
        )
        message = report_unexplained(self.network, float(differences[worst]), self.exactness)
        if self.exactness.low or not (self.bent or self.hopeless):
            return refuse(message, self.exactness, witness, rays=self.rays)
        return Refuted(
            f"not one hidden layer of ReLUs: hyperplanes end or bend; {message}", witness
        )


def draw_points(region: InputRegion, rng: np.random.Generator, edge: float) -> Array:
    """Validation points, the given share of them at the edge of the domain."""
    inside = region.points(rng, POINTS - round(edge * POINTS), 1.0)
    return np.concatenate([inside, region.edge_points(rng, POINTS - len(inside))])


def measure_exactness(
    box: NetworkBox,
    region: InputRegion,
    rng: np.random.Generator,
    centre: Array,
    answers: Array,
    ask: AskPoints,
) -> Exactness:
    """Rounding of an answer from a cluster at the centre, and how much answers vary. Where inputs
    are not rounded the cluster is short: a bend there must not pass for noise."""
    scale = float(np.linalg.norm(np.std(answers, axis=0)))
    direction = region.scale * rng.standard_normal(len(centre))
    step = 0.02 if box.relative > CLEAN else 2e-5
    measured = measure_rounding(lambda times: ask(centre + np.outer(times, direction)), step)
    largest = float(np.abs(answers).max())
    return Exactness(max(box.relative * largest, box.noise, measured, TINY), scale)


def measure_affine_part(
    region: InputRegion, rng: np.random.Generator, centre: Array, unit: float, ask: AskPoints
) -> tuple[Float[Array, "d k"], Float[Array, " k"], float]:
    """Gradient and value at the centre, and the step they were measured with: a tenth of the input
    scale, or a fifth of that, and so on, until three random directions show no hyperplane."""
    width = len(centre)
    step = 0.1 * region.scale
    for _ in range(7):
        spots = rng.standard_normal((3, width))
        spots /= np.linalg.norm(spots, axis=1, keepdims=True)
        offsets = np.concatenate([np.zeros((1, width)), np.eye(width), spots])
        values = ask(centre + step * offsets)
        slopes = (values[1 : width + 1] - values[0]) / step
        gap = np.abs(values[width + 1 :] - values[0] - step * spots @ slopes).max()
        if gap <= TOLERANCE * unit:
            break
        step *= 0.2
    return slopes, values[0], step


def report_region(region: InputRegion, unseen: float, exactness: Exactness) -> str:
    """What the search did not look at."""
    limits = []
    if region.radius < np.inf:
        limits.append(f"points of norm up to {region.radius:.3g}")
    if region.reach < np.inf:
        limits.append(f"entries within {region.reach:.3g} of {region.centre[0]:.3g}")
    where = " and ".join(limits)
    note = (
        f"Hyperplanes were looked for among {where}; one that cuts off less than about "
        f"{unseen:.1%} of the edge there may have been missed, and those beyond are part of skip "
        "and offset."
    )
    if exactness.low:
        note += (
            f" The box's answers are exact to about {exactness.digits:.0e} of their size; neurons "
            "weaker than that are not seen either."
        )
    return note
