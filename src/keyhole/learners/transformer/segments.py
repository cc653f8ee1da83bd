"""Two-token queries about a Transformer layer whose network is known.

X = [x + u ; x] makes the network see x + a u, where a = sigmoid(u . (score x + key_bias)): the
x-on-x score cancels. Along the segment from x to x + u the network is a known polyline, so the
answer tells a, and logit(a) is one number about the score. One query per number; biases do no
harm. A segment is good where the polyline is steep and does not turn back.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.models.relu_network import ReluNetwork

BEGINNING = 1e-6  # part of a segment in which turns are rounding: planes through its start
TURNING = 0.15  # least steepness of the middle part, relative to the mean
MIDDLE = (0.2, 0.8)  # weights that log-odds of about one lead to
ROUNDING = 1e-9  # speed, relative to the mean, that is not distinguished from standing still


@dataclass(frozen=True, eq=False)
class Reading:
    """Weights of the first token, how well each is known, how far answers are off the segment."""

    weight: Float[Array, " n"]
    slope: Float[Array, " n"]  # change of the answer per change of the weight
    off: Float[Array, " n"]  # distance of the answer from the polyline


@dataclass(frozen=True, eq=False)
class Lifted:
    """Points as the network's first layer sees them: `hidden` before the bias, `linear` by the
    skip. Scaling and adding points scales and adds these."""

    hidden: Float[Array, "n m"]
    linear: Float[Array, "n k"]

    @classmethod
    def of(cls, network: ReluNetwork, points: Float[Array, "n d"]) -> "Lifted":
        return cls(points @ network.weight.T, points @ skip_table(network))


def steepness(
    network: ReluNetwork, start: Lifted, at: float, step: Lifted, by: float
) -> Float[Array, " n"]:
    """Least speed of the answer along the middle part of the segments from at * start to
    at * start + by * step, in the direction it goes on the whole; zero where it turns back."""
    height, gain = at * start.hidden + network.bias, by * step.hidden
    path = (np.maximum(height + gain, 0) - np.maximum(height, 0)) @ network.output_table
    path += by * step.linear
    length = np.linalg.norm(path, axis=1)
    path /= np.maximum(length, TINY)[:, None]
    pull = path @ network.output_table.T  # what each neuron adds along the path, per its gain
    on = height + BEGINNING * gain > 0
    speed = (gain * pull * on).sum(axis=1) + np.einsum("nk,nk->n", by * step.linear, path)
    with np.errstate(divide="ignore", invalid="ignore"):
        turns = -height / gain
    met = (turns > BEGINNING) & (turns < 1)
    turns = np.where(met, turns, np.inf)
    order = np.argsort(turns, axis=1)
    changes = np.take_along_axis(np.where(met, np.abs(gain) * pull, 0.0), order, axis=1)
    knots = np.take_along_axis(turns, order, axis=1)
    knots = np.concatenate([np.zeros((len(knots), 1)), knots, np.full((len(knots), 1), 2.0)], 1)
    speeds = np.concatenate([speed[:, None], speed[:, None] + np.cumsum(changes, axis=1)], axis=1)
    real = knots[:, :-1] < 1
    central = (knots[:, :-1] < MIDDLE[1]) & (knots[:, 1:] > MIDDLE[0])
    backward = np.where(real, speeds, np.inf).min(axis=1) < -ROUNDING * length
    least = np.where(central, speeds, np.inf).min(axis=1)
    return np.where((least > TURNING * length) & ~backward, least, 0.0)


def gradients_at(network: ReluNetwork, points: Float[Array, "n d"]) -> Float[Array, "n d k"]:
    on = points @ network.weight.T + network.bias > 0
    parts = np.einsum("nm,md,mk->ndk", on, network.weight, network.output_table, optimize=True)
    return np.asarray(parts + skip_table(network))


def skip_table(network: ReluNetwork) -> Float[Array, "d k"]:
    return network.skip if network.skip.ndim == 2 else network.skip[:, None]


def read_weights(
    network: ReluNetwork,
    start: Float[Array, "n d"],
    step: Float[Array, "n d"],
    answers: Float[Array, "n k"],
) -> Reading:
    """The weight at which each segment's polyline comes closest to the answer."""
    weight, slope, off = (np.zeros(len(start)) for _ in range(3))
    for i in range(len(start)):
        weight[i], slope[i], off[i] = nearest(network, start[i], step[i], answers[i])
    return Reading(weight, slope, off)


def nearest(
    network: ReluNetwork, start: Array, step: Array, answer: Array
) -> tuple[float, float, float]:
    height = network.weight @ start + network.bias
    gain = network.weight @ step
    with np.errstate(divide="ignore", invalid="ignore"):
        turns = -height / gain
    inside = np.sort(turns[(turns > 0) & (turns < 1)])
    knots = np.concatenate([[0.0], inside, [1.0]])
    corners = network(start + knots[:, None] * step).reshape(len(knots), -1)
    sides = np.diff(corners, axis=0)
    squares = np.maximum(np.einsum("sk,sk->s", sides, sides), TINY)
    part = np.clip(np.einsum("sk,sk->s", answer - corners[:-1], sides) / squares, 0.0, 1.0)
    gaps = np.linalg.norm(answer - corners[:-1] - part[:, None] * sides, axis=1)
    best = int(np.argmin(gaps))
    length = knots[best + 1] - knots[best]
    weight = knots[best] + part[best] * length
    slope = np.sqrt(squares[best]) / max(length, TINY)
    return float(weight), float(slope), float(gaps[best])
