"""A ReLU network from answers with few digits: several lines, and one fit to all answers.

Statement.  Planes that a line shows badly, because others are near, another line shows well: what
            all lines saw, weighed by random points, is the network; least squares over every
            answer then reach the answers' own rounding.
Queries.  A line and the gradients beside it (noisy_line_search, gradients), about one and
            a half queries per unknown; as many random points; another line while those are not
            explained.
Algebra.    Neurons seen twice are sure. Of the others, those that keep their outputs when all
            outputs are fitted to the random points (relu_fit); more are added while they
            help. All parameters are then fitted together.
Fails.      Neurons that are weak or hidden on every line leave the points unexplained.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import IllConditioned
from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.gradients import AskPoints, measure
from keyhole.learners.mlp.noisy_line_search import rough_trace
from keyhole.learners.mlp.relu_corrections import balanced_points
from keyhole.learners.mlp.relu_fit import Data, fitted, gains, remaining_errors, rescaled
from keyhole.learners.mlp.relu_hypothesis import joined, only
from keyhole.learners.mlp.relu_pass import assembled, predicted_doubt
from keyhole.models.canonical import gradient_jumps
from keyhole.models.relu_network import ReluNetwork

LINES = 5  # most lines; typical are one to three
POINTS = 2.0  # random points per unknown
SEEN = 2.0  # of them on either side of each plane, per unknown of a neuron
MOST_UNKNOWNS = 5000  # of the fit: its matrix has the square of that
FAR_AWAY = 20.0  # answers with errors beyond this, in units of those at the centre, say little
SAME = 0.1  # relative distance of two measurements that are one neuron,
KNOWN = 0.3  # and of a measurement from the fitted neuron that it led to
KEPT = 0.5  # share of its output that a right neuron keeps or gains, at least and at most
FADED = 0.3  # share below which a fitted neuron is given up again
EXPLAINED = 3.0  # misfit (mean square, in roundings) that is rounding; typical is below one
ADDITIONS = 6  # fits in which further neurons are tried, after each line
WORTH = 0.9  # share of the misfit that an addition must not leave
NOTHING = 8.0  # errors of a neuron below which it is none,
INVISIBLE = 50.0  # and roundings of an answer, across a typical length: rounding is not random


@dataclass(eq=False)
class Lines:
    """The search: what the lines saw, and the network that explains it."""

    ask: AskPoints
    region: InputRegion
    rng: np.random.Generator
    relative: float  # rounding of an answer, at least
    noise: float  # error of an answer beyond that, stated
    rounded: Callable[[Array], Array]  # points as the box sees them
    unit: float = 0.0
    scale: float = 0.0
    lines: int = 0
    random: list[Data] = field(default_factory=list)  # answers at random points
    beside: list[Data] = field(default_factory=list)  # and on and beside the lines
    seen: ReluNetwork = field(init=False)  # every neuron that some line showed
    votes: Array = field(init=False)  # on how many
    doubts: Array = field(init=False)  # predicted error of output_j weight_j
    network: ReluNetwork = field(init=False)
    misfit: float = np.inf
    error: Array = field(default_factory=lambda: np.zeros(0))
    affine_error: float = 0.0

    def run(self) -> bool:
        """Whether a network explains all answers."""
        while self.lines < LINES:
            self.look()
            self.explain()
            if self.misfit <= EXPLAINED:
                self.refine()
            if self.misfit <= EXPLAINED:
                return True
        return False

    @property
    def spread(self) -> float:
        """Of the answers at random points: root mean square from their mean."""
        answers = self.data(self.random).answers
        return float(np.linalg.norm(answers.std(axis=0)))

    def unknowns(self, neurons: int) -> int:
        return (neurons + 1) * (len(self.region.centre) + 1)

    def asked(self, points: Array) -> Data:
        points = self.rounded(points)
        far = np.linalg.norm(points - self.region.centre, axis=1) / self.region.size
        return Data(points, self.ask(points), 1 + far)

    def looked(self, points: Array) -> Array:
        self.beside.append(self.asked(points))
        return self.beside[-1].answers

    def look(self) -> None:
        """One line with the gradients beside it, and random points for what it shows."""
        frame, _ = self.region.line(self.rng)
        along = lambda times: self.looked(frame.points(times))  # noqa: E731 - one name for it
        line = rough_trace(along, self.relative, self.noise)
        unknowns = self.unknowns(len(line.kinks))
        if unknowns > MOST_UNKNOWNS:
            raise IllConditioned(
                f"{len(line.kinks)} neurons have {unknowns} unknowns, more than can be fitted "
                f"together ({MOST_UNKNOWNS}), which answers with few digits need. A box in double "
                "precision would be recovered"
            )
        gradients = measure(self.looked, line, frame, self.region.room, thorough=True)
        found = assembled(line, frame, gradients)
        doubt = predicted_doubt(line, gradients)
        self.unit, self.scale = max(self.unit, line.unit), max(self.scale, line.scale)
        self.remember(found, doubt[:-1] + doubt[1:])
        self.lines += 1
        count = int(POINTS * unknowns) - sum(len(d.points) for d in self.random)
        if count > 0:
            points = self.region.points(self.rng, count)
            points = balanced_points(found, points, int(SEEN * (found.width + 1)))
            self.random.append(self.asked(points))

    def remember(self, found: ReluNetwork, doubts: Array) -> None:
        """Neurons met again get a vote, and the better of two measurements stays."""
        if self.lines == 0:
            self.seen, self.doubts = found, doubts
            self.votes = np.ones(found.neurons, dtype=int)
            return
        gaps = relative_gaps(self.seen, found)
        parts = {name: np.array(getattr(self.seen, name)) for name in ("weight", "bias", "output")}
        new = []
        for j in range(found.neurons):
            i = int(np.argmin(gaps[:, j])) if len(gaps) else 0
            if len(gaps) == 0 or gaps[i, j] > SAME:
                new.append(j)
                continue
            self.votes[i] += 1
            if doubts[j] < self.doubts[i]:
                self.doubts[i] = doubts[j]
                for name, part in parts.items():
                    part[i] = getattr(found, name)[j]
        self.seen = joined(ReluNetwork(**parts), only(found, np.array(new, dtype=int)))
        self.doubts = np.append(self.doubts, doubts[new])
        self.votes = np.append(self.votes, np.ones(len(new), dtype=int))

    def data(self, parts: list[Data]) -> Data:
        """Answers with their errors, those from far away left out."""
        points, answers, sizes = (
            np.concatenate([getattr(part, name) for part in parts])
            for name in ("points", "answers", "noise")
        )
        near = sizes < FAR_AWAY
        return Data(points[near], answers[near], self.unit * sizes[near])

    def explain(self) -> None:
        """The network of the neurons that the random points need, fitted to them. Answers beside
        the lines lie in clusters, which a plane that is a little off has on its wrong side."""
        data = self.data(self.random)
        start, kept = rescaled(self.seen, data)
        network = fitted(only(start, (self.votes > 1) | keeps(kept)), data)
        misfit = data.misfit(network)
        for _ in range(ADDITIONS):
            if misfit <= EXPLAINED:
                break
            tried = self.extended(network, data)
            if tried is None:
                break
            tried = fitted(tried, data)
            if not data.misfit(tried) < WORTH * misfit:
                break
            network, misfit = tried, data.misfit(tried)
        self.network, self.misfit = network, misfit

    def extended(self, network: ReluNetwork, data: Data) -> ReluNetwork | None:
        """With the neurons that were seen and are not in the network but would be right beside
        it; if there are none, with the one that helps most."""
        gaps = relative_gaps(network, self.seen)
        unused = only(self.seen, gaps.min(axis=0, initial=np.inf) > KNOWN)
        if unused.neurons == 0:
            return None
        both, kept = rescaled(joined(network, unused), data)
        right = keeps(kept)
        right[: network.neurons] = np.abs(kept[: network.neurons]) > FADED
        if right[network.neurons :].any():
            return only(both, right)
        best = int(np.argmax(gains(network, unused, data)))
        return rescaled(joined(network, only(unused, np.array([best]))), data)[0]

    def refine(self) -> None:
        """All parameters from all answers. Neurons that turn out to be nothing are dropped, one by
        one: of two that share a plane, neither is known, and only one is too many."""
        data = self.data(self.random + self.beside)
        self.network = fitted(self.network, data)
        self.misfit = data.misfit(self.network)
        while self.misfit <= EXPLAINED:
            errors = remaining_errors(self.network, data) * self.region.size
            self.affine_error, self.error = float(errors[0]), errors[1:]
            strength = np.linalg.norm(self.network.output, axis=1) * self.region.size
            seen = strength / np.maximum(NOTHING * self.error, INVISIBLE * self.unit)
            if seen.min(initial=np.inf) > 1:
                return
            others = np.arange(len(seen)) != np.argmin(seen)
            fewer = fitted(only(self.network, others), data)
            if data.misfit(fewer) > EXPLAINED:
                return
            self.network, self.misfit = fewer, data.misfit(fewer)


def keeps(share: Array) -> Array:
    return np.asarray(np.abs(share - 1) < KEPT)


def relative_gaps(network: ReluNetwork, other: ReluNetwork) -> Float[Array, "m n"]:
    """Distances of the neurons of two networks, whichever way they are turned."""
    one, two = gradient_jumps(network)[:, None], gradient_jumps(other)[None]
    gaps = np.minimum(*(np.linalg.norm(one - side * two, axis=(2, 3)) for side in (1, -1)))
    sizes = np.maximum(*(np.linalg.norm(part, axis=(2, 3)) for part in (one, two)))
    return np.asarray(gaps / np.maximum(sizes, TINY))
