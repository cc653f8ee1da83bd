"""One pass over a box that is a ReLU network: a line, the gradients beside it, a network.

The line orders the neurons: all are off at its beginning, and piece p has the first p of them
on. What is known badly is the gradient of a narrow piece p: its error moves from neuron p-1 to
neuron p, their sum stays exact. `Pass.doubt` holds the predicted size of that error.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.gradients import AskPoints, Frame, Gradients, Room, measure
from keyhole.learners.mlp.line_search import Line, trace
from keyhole.models.relu_network import ReluNetwork

VECTOR_SAFETY = 5.0  # errors of kinks that were proven, not checked, are met in measurements only


@dataclass(frozen=True, eq=False)
class Pass:
    """A network in normal form, neurons in the order of the line, unit rows, and its doubts."""

    network: ReluNetwork
    unit: float  # rounding error of one answer, per 1 + |t|
    scale: float  # how much the answers vary, per 1 + |t|
    doubt: Float[Array, " pieces"]  # error of the function between the two planes of a piece
    centres: Float[Array, "pieces d"]  # where the gradients of the pieces were measured
    length: float  # of the line's direction

    @property
    def error(self) -> Float[Array, " n"]:
        """Of output_j weight_j per neuron, in units of the answers."""
        return np.asarray(self.doubt[:-1] + self.doubt[1:])


def run_pass(
    ask: AskPoints,
    frame: Frame,
    reach: tuple[float, float],
    room: Room,
    relative: float,
    floor: float,
    trusting: bool,
) -> Pass:
    """Learns all neurons whose planes the line crosses."""
    line = trace(lambda times: ask(frame.points(times)), relative, floor, reach, trusting=trusting)
    gradients = measure(ask, line, frame, room)
    network = assembled(line, frame, gradients)
    doubt = predicted_doubt(line, gradients)
    length = float(np.linalg.norm(frame.direction))
    return Pass(network, line.unit, line.scale, doubt, centres(line, frame, gradients), length)


def assembled(line: Line, frame: Frame, gradients: Gradients) -> ReluNetwork:
    """The network whose neurons are off where the line begins."""
    square = float(frame.direction @ frame.direction)
    normals = (frame.direction + gradients.across @ frame.across) / square
    crossings = frame.points(line.kinks)
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


def centres(line: Line, frame: Frame, gradients: Gradients) -> Array:
    if gradients.bases.shape[1] == 0 or len(gradients.anchors) < len(line.anchors):
        return frame.points(line.anchors)
    return frame.points(gradients.bases[:, -1])


def predicted_doubt(line: Line, gradients: Gradients) -> Array:
    """Rounding of an answer over the length of the step, per piece."""
    if gradients.steps.shape[1] == 0:
        return np.full(len(line.slopes), line.unit)
    doubt = line.unit * ((1 + np.abs(gradients.bases)) / gradients.steps).max(axis=1)
    if line.jumps.shape[1] == 1:
        return np.asarray(doubt)
    return doubt_between(line, gradients, doubt)


def doubt_between(line: Line, gradients: Gradients, measured: Array) -> Array:
    """Vector answers: pieces between two anchors take the anchors' doubts and those of their own
    slopes, amplified by taking the jumps apart."""
    doubt = np.zeros(len(line.slopes))
    doubt[gradients.anchors] = measured
    slopes = line.unit * (1 + np.abs(line.anchors)) / line.spans
    for i, (start, stop) in enumerate(
        zip(gradients.anchors[:-1], gradients.anchors[1:], strict=True)
    ):
        jumps = line.jumps[start:stop]
        sizes = np.linalg.norm(jumps, axis=1)
        values = np.linalg.svd(jumps / np.maximum(sizes, TINY)[:, None], compute_uv=False)
        own = float(np.linalg.norm(slopes[start : stop + 1])) + measured[i : i + 2].max()
        inside = slice(start, stop + 1)
        doubt[inside] = np.maximum(doubt[inside], own / max(float(values[-1]), TINY))
    return VECTOR_SAFETY * doubt
