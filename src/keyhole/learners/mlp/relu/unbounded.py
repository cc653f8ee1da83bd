"""A ReLU network from one line: free inputs, answers in double precision.

Statement.  All neurons whose hyperplanes a random line crosses, which are all of them, are found at
            little more than one query per unknown.
Queries.    The breakpoints of the line (line_search); the gradients of the cells along it
            (gradients); random points where the line leaves doubt; a few to validate.
Algebra.    The line orders the neurons: all are off at its beginning, and piece p has the first p
            of them on. What is known badly is the gradient of a narrow piece p: its error moves
            from neuron p-1 to neuron p, their sum stays exact. Answers at random points decide
            between the two (`correct_doubts`, scalar answers).
Fails.      Two hyperplanes so close on the line that they pass for one: validation notices, and
            another line is asked, three at most. Answers with few digits: `FewDigits`.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import Counterexample
from keyhole.learners.base import Inconclusive, Refuted
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.gradients import AskPoints, Frame, Gradients, Room, measure_gradients
from keyhole.learners.mlp.relu.hypothesis import (
    Curved,
    Exactness,
    FoundNetwork,
    NetworkBox,
    SearchResult,
    find_round_bend,
    refuse,
    report_unexplained,
    validate_network,
)
from keyhole.learners.mlp.relu.least_squares import (
    Doubts,
    choose_informative,
    correct_doubts,
    flatten_output,
    unflatten_output,
)
from keyhole.learners.mlp.relu.line_search import (
    BendsEverywhere,
    LineFit,
    LineSearchOptions,
    NotPiecewiseAffine,
    search_line,
)
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.noise import DETECTION


class SinglePrecision(Exception):
    """The answers turned out to be numbers of single precision."""


@dataclass(frozen=True, eq=False)
class FewDigits(Inconclusive):
    """The answers are not exact enough for a single line."""


@dataclass(frozen=True, eq=False)
class LineNetwork:
    """A network in normal form, neurons in the order of the line, unit rows, and its doubts."""

    network: ReluNetwork
    unit: float  # rounding error of one answer, per 1 + |t|
    scale: float  # how much the answers vary, per 1 + |t|
    doubts: Doubts  # error of the function between the two hyperplanes of a piece

    @property
    def error(self) -> Float[Array, " n"]:
        """Of output_j weight_j per neuron, in units of the answers."""
        return np.asarray(self.doubts.sizes[:-1] + self.doubts.sizes[1:])


def search_one_line(box: NetworkBox, region: InputRegion, rng: np.random.Generator) -> SearchResult:
    """A line through the box, and another one while the network does not agree with it."""
    exactness = Exactness()
    best: FoundNetwork | None = None
    witness: Counterexample | None = None

    def ask(points: Array) -> Array:
        answers = box.ask(points)
        if not box.clean:
            raise SinglePrecision
        return answers

    for number in range(3):  # lines tried before the box is refused
        frame, reach = region.line(rng)
        try:
            # after a failure, meeting lines of vectors are not taken for proof any more
            found = learn_from_line(ask, frame, reach, region.room, box, trusting=number == 0)
        except SinglePrecision:
            return FewDigits("the box answers in single precision")
        except NotPiecewiseAffine as error:
            point = frame.points(np.array([error.t]))
            shown = box.counterexample(point, error.value, error.expected, str(error))
            refused = refuse(str(error), exactness, shown)
            if isinstance(error, BendsEverywhere) and isinstance(refused, Refuted):
                return Curved(refused.reason, shown)
            return refused
        exactness = Exactness(max(exactness.unit, found.unit), max(exactness.scale, found.scale))
        affine_error = float(found.doubts.sizes[0])
        found = correct_narrow_pieces(box, region, found, exactness, rng)
        agreement, shown = validate_network(box, region, found.network, rng)
        if best is None or agreement < best.agreement:
            witness = shown
            best = FoundNetwork(
                found.network,
                found.error,
                affine_error,
                agreement,
                exactness,
                number + 1,
            )
        best = replace(best, exactness=exactness, lines=number + 1)
        if best.agreement <= exactness.allowed:
            round_bend = find_round_bend(box, region, best.network, rng)
            if round_bend is not None:
                return Curved("the bends are round, not kinks", round_bend)
            return best
        if exactness.low:
            return FewDigits(report_unexplained(best.network, best.agreement, exactness))
    assert best is not None  # a line was asked
    return refuse(report_unexplained(best.network, best.agreement, exactness), exactness, witness)


def learn_from_line(
    ask: AskPoints,
    frame: Frame,
    reach: tuple[float, float],
    room: Room,
    box: NetworkBox,
    *,
    trusting: bool,
) -> LineNetwork:
    """All neurons whose hyperplanes the line crosses."""
    options = LineSearchOptions(trusting=trusting)
    line = search_line(
        lambda times: ask(frame.points(times)), box.relative, box.noise, reach, options=options
    )
    box.expect_neurons(len(line.breakpoints), line.jumps.shape[1])
    gradients = measure_gradients(ask, line, frame, room)
    network = assemble_network(line, frame, gradients)
    doubts = Doubts(
        predict_errors(line, gradients),
        choose_centres(line, frame, gradients),
        float(np.linalg.norm(frame.direction)),
    )
    return LineNetwork(network, line.unit, line.scale, doubts)


def assemble_network(line: LineFit, frame: Frame, gradients: Gradients) -> ReluNetwork:
    """The network whose neurons are off where the line begins."""
    square = float(frame.direction @ frame.direction)
    normals = (frame.direction + gradients.across @ frame.across) / square
    crossings = frame.points(line.breakpoints)
    bias = -np.einsum("nd,nd->n", normals, crossings)
    lengths = np.linalg.norm(normals, axis=1)
    first = np.concatenate([line.slopes[:1], gradients.table[0]])
    skip = np.concatenate([frame.direction[None], frame.across]).T @ first / square
    anchor = frame.points(line.anchors[:1])
    offset = (line.values[:1] - anchor @ skip)[0]
    return ReluNetwork(
        normals / lengths[:, None],
        bias / lengths,
        line.jumps * lengths[:, None],
        skip,
        offset,
    )


def choose_centres(line: LineFit, frame: Frame, gradients: Gradients) -> Array:
    """Where the values of the pieces are exact: the bases of their gradients."""
    if gradients.bases.shape[1] == 0 or len(gradients.anchors) < len(line.anchors):
        return frame.points(line.anchors)
    return frame.points(gradients.bases[:, -1])


def predict_errors(line: LineFit, gradients: Gradients) -> Float[Array, " pieces"]:
    """Of the gradient of each piece: rounding of an answer over the length of the step."""
    if gradients.steps.shape[1] == 0:
        return np.full(len(line.slopes), line.unit)
    error = line.unit * ((1 + np.abs(gradients.bases)) / gradients.steps).max(axis=1)
    if line.jumps.shape[1] == 1:
        return np.asarray(error)
    return predict_errors_between(line, gradients, error)


def predict_errors_between(line: LineFit, gradients: Gradients, measured: Array) -> Array:
    """Vector answers: pieces between two anchors take the anchors' errors and those of their own
    slopes, amplified by taking the jumps apart. Errors of breakpoints that were proven, not
    checked, are met in measurements only: hence a factor of five."""
    errors = np.zeros(len(line.slopes))
    errors[gradients.anchors] = measured
    slopes = line.unit * (1 + np.abs(line.anchors)) / line.spans
    for i, (start, stop) in enumerate(
        zip(gradients.anchors[:-1], gradients.anchors[1:], strict=True)
    ):
        jumps = line.jumps[start:stop]
        sizes = np.linalg.norm(jumps, axis=1)
        values = np.linalg.svd(jumps / np.maximum(sizes, TINY)[:, None], compute_uv=False)
        own = float(np.linalg.norm(slopes[start : stop + 1])) + measured[i : i + 2].max()
        inside = slice(start, stop + 1)
        errors[inside] = np.maximum(errors[inside], own / max(float(values[-1]), TINY))
    return DETECTION * errors


def correct_narrow_pieces(
    box: NetworkBox,
    region: InputRegion,
    found: LineNetwork,
    exactness: Exactness,
    rng: np.random.Generator,
) -> LineNetwork:
    """Answers at random points decide between the two neurons at a narrow piece. At most 8% of the
    queries spent before are spent on that, at the best of four times as many random points."""
    if not box.scalar or found.network.neurons == 0:
        return found
    corrected = 2.5e-11  # predicted error of a piece, relative to the answers, worth a correction
    doubts, limit = found.doubts, corrected * exactness.scale
    unknowns = int((doubts.sizes > limit).sum()) * (found.network.width + 1)
    count = min(unknowns, int(0.08 * box.spent))
    if count == 0:
        return found
    network = flatten_output(found.network)
    points = choose_informative(network, doubts, region.points(rng, 4 * count), count)
    difference = box.ask(points, "corrections")[:, 0] - network(points)
    # an answer at a random point is off by about four roundings at zero
    network = correct_doubts(network, doubts, points, difference, 4 * exactness.unit)
    doubts = replace(doubts, sizes=np.minimum(doubts.sizes, limit))
    return replace(found, network=unflatten_output(network), doubts=doubts)
