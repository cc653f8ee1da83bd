"""A ReLU network from answers with few digits: several lines, and one fit to all answers.

Statement.  Hyperplanes that a line shows badly, because others are near, another line shows well:
            what all lines saw, weighed by random points, is the network; least squares over every
            answer then reach the answers' own rounding.
Queries.    A line and the gradients beside it (noisy_line_search, gradients), about one and a half
            per unknown; as many random points; another line while those are not explained.
Algebra.    Neurons seen twice are sure. Of the others, those that keep their outputs when all
            outputs are fitted to the random points (least_squares); more are added while they
            help. All parameters are then fitted together.
Fails.      Neurons that are weak or hidden on every line leave the points unexplained.
Source.     Ours.
"""

from dataclasses import InitVar, dataclass, field

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.base import Inconclusive, Refuted
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.gradients import measure_gradients
from keyhole.learners.mlp.relu.hypothesis import (
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
    balance_points,
    estimate_errors,
    fit_network,
    fit_outputs,
    join_neurons,
    keep_neurons,
    rate_additions,
)
from keyhole.learners.mlp.relu.line_search import NotPiecewiseAffine
from keyhole.learners.mlp.relu.noisy_line_search import search_noisy_line
from keyhole.learners.mlp.relu.unbounded import assemble_network, predict_errors
from keyhole.models.canonical import gradient_jumps
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.noise import REJECTION


@dataclass(frozen=True)
class MultiLineOptions:
    """How many lines and points are asked, and which neurons are believed."""

    lines: int = 5
    """Most lines; typical are one to three."""
    points: float = 2.0
    """Random points per unknown; as many on either side of each hyperplane, per unknown of a
    neuron."""
    most_unknowns: int = 5000
    """Of the fit: its matrix has the square of that."""
    explained: float = 3.0
    """Misfit (mean square, in roundings) that is rounding; typical is below one."""
    same: float = 0.1
    """Relative distance of two measurements that are one neuron; three times that from the fitted
    neuron that a measurement led to."""
    kept: float = 0.5
    """Share of its output that a right neuron keeps or gains, at least and at most."""
    additions: int = 8
    """Fits in which further neurons are tried, after each line."""
    random: int = 1000
    """Hyperplanes among them that no line showed."""
    worth: float = 0.9
    """Share of the misfit that an addition must not leave."""
    invisible: float = 50.0
    """Strength of a neuron across a typical length, in roundings of an answer, below which it is
    none: rounding is not random."""


def search_several_lines(
    box: NetworkBox, region: InputRegion, rng: np.random.Generator
) -> SearchResult:
    """Neurons from as many lines as it takes, then all of them from all answers."""
    search = MultiLineSearch(box, region, rng)
    try:
        failed = search.run()
    except NotPiecewiseAffine as error:
        return Inconclusive(
            f"{error}: a smooth activation, or more neurons than answers with so few digits "
            "can tell apart. The same box in double precision would tell"
        )
    if isinstance(failed, Inconclusive):
        return failed
    network, exactness = search.network, search.exactness
    agreement, witness = validate_network(box, region, network, rng)
    message = report_unexplained(network, agreement, exactness)
    if agreement > 0.1 * search.spread:  # several lines miss weak neurons, but not that much
        return Refuted(f"not one hidden layer of ReLUs: {message}", witness)
    if search.misfit > search.options.explained or agreement > exactness.allowed:
        return refuse(message, exactness, witness)
    share = box.spent / search.count_unknowns(network.neurons)
    return FoundNetwork(
        network,
        search.error,
        search.affine_error,
        agreement,
        exactness,
        search.lines,
        (report_digits(search.lines, share, exactness),),
    )


@dataclass(eq=False)
class MultiLineSearch:
    """The accumulator: what the lines saw, and the network that explains it."""

    box: NetworkBox
    region: InputRegion
    rng: np.random.Generator
    options: MultiLineOptions = field(default_factory=MultiLineOptions)
    exactness: Exactness = field(default_factory=Exactness)
    lines: int = 0
    random: list[Samples] = field(default_factory=list)  # answers at random points
    beside: list[Samples] = field(default_factory=list)  # and on and beside the lines
    seen: ReluNetwork = field(init=False)  # every neuron that some line showed
    votes: Array = field(default_factory=lambda: np.zeros(0, dtype=int))  # on how many
    doubts: Array = field(default_factory=lambda: np.zeros(0))  # error of output_j weight_j
    network: ReluNetwork = field(init=False)
    misfit: float = np.inf
    error: Array = field(default_factory=lambda: np.zeros(0))
    affine_error: float = 0.0
    measured: InitVar[ReluNetwork | None] = None  # neurons that are known from elsewhere

    def __post_init__(self, measured: ReluNetwork | None) -> None:
        width = len(self.region.centre)
        self.network = ReluNetwork(
            np.zeros((0, width)), np.zeros(0), np.zeros((0, 1)), None, np.zeros(1)
        )
        self.seen = self.network if measured is None else measured

    def run(self) -> Inconclusive | None:
        """Lines until a network explains all answers, as far as the options go."""
        explained = self.options.explained
        while self.lines < self.options.lines:
            failed = self.scan_line()
            if failed is not None:
                return failed
            self.explain()
            if self.misfit <= explained:
                self.refine()
            if self.misfit <= explained:
                return None
        return None

    @property
    def spread(self) -> float:
        """Of the answers at random points: root mean square from their mean."""
        return float(np.linalg.norm(self.collect(self.random).answers.std(axis=0)))

    def count_unknowns(self, neurons: int) -> int:
        return (neurons + 1) * (len(self.region.centre) + 1)

    def ask(self, points: Array) -> Samples:
        points = self.box.round_points(points)
        far = np.linalg.norm(points - self.region.centre, axis=1) / self.region.size
        return Samples(points, self.box.ask(points), 1 + far)

    def ask_beside(self, points: Array) -> Array:
        self.beside.append(self.ask(points))
        return self.beside[-1].answers

    def scan_line(self) -> Inconclusive | None:
        """One line with the gradients beside it, and random points for what it shows."""
        frame, _ = self.region.line(self.rng)
        box = self.box
        line = search_noisy_line(
            lambda times: self.ask_beside(frame.points(times)), box.relative, box.noise
        )
        unknowns, most = self.count_unknowns(len(line.breakpoints)), self.options.most_unknowns
        if self.lines == 0:
            box.expect_neurons(len(line.breakpoints), line.jumps.shape[1])
        if unknowns > most:
            return Inconclusive(
                f"{len(line.breakpoints)} neurons have {unknowns} unknowns, more than can be "
                f"fitted together ({most}), which answers with few digits need"
            )
        gradients = measure_gradients(self.ask_beside, line, frame, self.region.room, thorough=True)
        found = assemble_network(line, frame, gradients)
        doubt = predict_errors(line, gradients)
        self.exactness = Exactness(
            max(self.exactness.unit, line.unit), max(self.exactness.scale, line.scale)
        )
        self.remember(found, doubt[:-1] + doubt[1:])
        self.lines += 1
        options = self.options
        count = int(options.points * unknowns) - sum(len(part.points) for part in self.random)
        if count > 0:
            points = self.region.points(self.rng, count)
            points = balance_points(found, points, int(options.points * (found.width + 1)))
            self.random.append(self.ask(points))
        return None

    def remember(self, found: ReluNetwork, doubts: Array) -> None:
        """Neurons met again get a vote, and the better of two measurements stays."""
        if self.lines == 0:
            self.seen, self.doubts = found, doubts
            self.votes = np.ones(found.neurons, dtype=int)
            return
        gaps = relative_gaps(self.seen, found)
        votes, known = self.votes.copy(), self.doubts.copy()
        parts = {name: np.array(getattr(self.seen, name)) for name in ("weight", "bias", "output")}
        new = []
        for j in range(found.neurons):
            i = int(np.argmin(gaps[:, j])) if len(gaps) else 0
            if len(gaps) == 0 or gaps[i, j] > self.options.same:
                new.append(j)
                continue
            votes[i] += 1
            if doubts[j] < known[i]:
                known[i] = doubts[j]
                for name, part in parts.items():
                    part[i] = getattr(found, name)[j]
        self.seen = join_neurons(ReluNetwork(**parts), keep_neurons(found, np.array(new, int)))
        self.doubts = np.append(known, doubts[new])
        self.votes = np.append(votes, np.ones(len(new), dtype=int))

    def collect(self, parts: list[Samples]) -> Samples:
        """Answers with their errors; those with twenty times the error of the centre say little
        and are left out."""
        points, answers, sizes = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("points", "answers", "noise")
        )
        near = sizes < 20
        return Samples(points[near], answers[near], self.exactness.unit * sizes[near])

    def explain(self) -> None:
        """The network of the neurons that the random points need, fitted to them. Answers beside
        the lines lie in clusters, which a hyperplane that is a little off has on its wrong side."""
        data = self.collect(self.random)
        start, kept = fit_outputs(self.seen, data)
        network = fit_network(keep_neurons(start, (self.votes > 1) | self.keeps(kept)), data)
        network = self.add_neurons(network, data)
        self.network, self.misfit = network, data.misfit(network)
        if self.misfit > self.options.explained:
            # hyperplanes that no line showed are believed only where all is explained with them
            tried = self.add_neurons(network, data, beside_random=True)
            if data.misfit(tried) <= self.options.explained:
                self.network, self.misfit = tried, data.misfit(tried)

    def add_neurons(
        self, network: ReluNetwork, data: Samples, beside_random: bool = False
    ) -> ReluNetwork:
        """The network with further neurons, as long as these explain more."""
        misfit = data.misfit(network)
        for _ in range(self.options.additions):
            if misfit <= self.options.explained:
                break
            tried = self.extend(network, data, beside_random)
            if tried is None:
                break
            tried = fit_network(tried, data)
            if not data.misfit(tried) < self.options.worth * misfit:
                break
            network, misfit = tried, data.misfit(tried)
        return network

    def keeps(self, share: Array) -> Array:
        """Which neurons keep about their output."""
        return np.asarray(np.abs(share - 1) < self.options.kept)

    def extend(
        self, network: ReluNetwork, data: Samples, beside_random: bool
    ) -> ReluNetwork | None:
        """With the neurons that were seen and are not in the network but would be right beside
        it; if there are none, with the one that helps most, random ones among them if wished: fits
        lead from there to the right one. Fitted neurons that fade to 30% of their output are given
        up again."""
        gaps = relative_gaps(network, self.seen)
        known = 3 * self.options.same
        unused = keep_neurons(self.seen, gaps.min(axis=0, initial=np.inf) > known)
        both, kept = fit_outputs(join_neurons(network, unused), data)
        right = self.keeps(kept)
        right[: network.neurons] = np.abs(kept[: network.neurons]) > 0.3
        if right[network.neurons :].any():
            return keep_neurons(both, right)
        if beside_random:
            unused = join_neurons(unused, self.draw_neurons(data))
        if unused.neurons == 0:
            return None
        best = int(np.argmax(rate_additions(network, unused, data)))
        return fit_outputs(join_neurons(network, keep_neurons(unused, np.array([best]))), data)[0]

    def draw_neurons(self, data: Samples) -> ReluNetwork:
        """Random hyperplanes through the points."""
        count, width = self.options.random, data.points.shape[1]
        rows = self.rng.standard_normal((count, width))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        through = data.points[self.rng.integers(len(data.points), size=count)]
        bias = -np.einsum("nd,nd->n", rows, through)
        return ReluNetwork(rows, bias, np.ones((count, data.answers.shape[1])))

    def refine(self) -> None:
        """All parameters from all answers. Neurons that turn out to be nothing are dropped, one by
        one: of two that share a hyperplane, neither is known, and only one is too many."""
        data, explained = self.collect(self.random + self.beside), self.options.explained
        self.network = fit_network(self.network, data)
        self.misfit = data.misfit(self.network)
        while self.misfit <= explained:
            errors = estimate_errors(self.network, data) * self.region.size
            self.affine_error, self.error = float(errors[0]), errors[1:]
            strength = np.linalg.norm(self.network.output, axis=1) * self.region.size
            least = np.maximum(REJECTION * self.error, self.options.invisible * self.exactness.unit)
            seen = strength / least
            if seen.min(initial=np.inf) > 1:
                return
            others = np.arange(len(seen)) != np.argmin(seen)
            fewer = fit_network(keep_neurons(self.network, others), data)
            if data.misfit(fewer) > explained:
                return
            self.network, self.misfit = fewer, data.misfit(fewer)


def relative_gaps(network: ReluNetwork, other: ReluNetwork) -> Float[Array, "m n"]:
    """Distances of the neurons of two networks, whichever way they are turned."""
    one, two = gradient_jumps(network)[:, None], gradient_jumps(other)[None]
    gaps = np.minimum(*(np.linalg.norm(one - side * two, axis=(2, 3)) for side in (1, -1)))
    sizes = np.maximum(*(np.linalg.norm(part, axis=(2, 3)) for part in (one, two)))
    return np.asarray(gaps / np.maximum(sizes, TINY))


def report_digits(lines: int, per_unknown: float, exactness: Exactness) -> str:
    """What few digits cost and hide."""
    return (
        f"The box's answers are exact to about {exactness.digits:.0e} of their size, and so is the "
        f"network: that took {lines} line{'s' if lines > 1 else ''} and {per_unknown:.1f} queries "
        "per unknown, where little more than one is enough for double precision; neurons weaker "
        "than that are not seen."
    )
