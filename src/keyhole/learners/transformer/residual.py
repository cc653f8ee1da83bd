"""Two-token queries about a layer in which the anchor also goes around the attention.

    f(X) = skip . x_N + mixed_skip . (z - x_N)
           + sum_j output_j relu(weight_j . x_N + mixed_weight_j . (z - x_N) + bias_j) + offset

One token gives weight, skip, bias, output, offset. With X = [x + u ; x], z - x_N = a u where
a = sigmoid(u . (score x + key_bias)), and [x - u ; x] has 1 - a in the place of a: as long as no
plane is crossed, f([x + u ; x]) - f([x - u ; x]) = J u, with J the gradient of the mixed part in
the cell of x, whatever the attention does. Then f([x + u ; x]) - f([x]) = a J u tells a, hence the
score. J jumps by output_j mixed_weight_j at plane j, which gives the rest.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import NotIdentifiable
from keyhole.learners.mlp.domain import InputRegion
from keyhole.linalg.bases import equal_overlap, random_rotation
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle
from keyhole.oracles.queries import QueryBatch

CANDIDATES = 400  # random points from which roomy ones are taken
STEP = 0.1  # length of a probe relative to the distance of the nearest plane
FLAT = 1e-9  # gradient, relative to the answers, that says nothing about the attention
EDGE = 1e-15  # weights are kept this far inside (0, 1) before their logarithm is taken
NARROW_PLANE = 0.4  # distance of the two bases from a plane, relative to its clearance


@dataclass(frozen=True, eq=False)
class ResidualProbe:
    """Queries to a layer whose network of one token is known."""

    oracle: Oracle
    network: ReluNetwork
    region: InputRegion
    rng: np.random.Generator

    def score(self) -> tuple[Array, Array]:
        """Score matrix and key bias, from d + 1 roomy points."""
        width = self.network.width
        points, rooms = self.roomy_points(width + 1)
        keys = np.zeros((width + 1, width))
        for i, (point, room) in enumerate(zip(points, rooms, strict=True)):
            keys[i] = self.key(point, STEP * room)
        table = np.column_stack([points, np.ones(width + 1)])
        solved = np.linalg.solve(table, keys)
        return solved[:-1].T, solved[-1]

    def key(self, point: Float[Array, " d"], length: float) -> Float[Array, " d"]:
        """score x + key_bias at one point."""
        gradient = self.gradient(point, length)
        slope, sizes, _ = np.linalg.svd(gradient, full_matrices=False)
        if sizes[0] * length <= FLAT * float(np.abs(self.known(point)).max() + TINY):
            raise NotIdentifiable(
                "the mixed part of the network does not change, so the answers say nothing about "
                "the attention in front of it"
            )
        probes = equal_overlap(self.rng, slope[:, :1]).rows(np.arange(len(point)))
        moved = self.answers(point + length * probes, point) - self.known(point)
        rise = length * probes @ gradient
        weight = np.einsum("nk,nk->n", moved, rise) / np.einsum("nk,nk->n", rise, rise)
        weight = np.clip(weight, EDGE, 1 - EDGE)
        odds = np.log(weight) - np.log1p(-weight)
        return np.asarray(np.linalg.solve(probes, odds / length))

    def mixed(self, score: Array, key_bias: Array) -> tuple[Array, Array]:
        """mixed_weight and mixed_skip, from both sides of every plane."""
        net, width = self.network, self.network.width
        basis = random_rotation(self.rng, width)
        rows = np.zeros((net.neurons, width))
        last = np.zeros((width, net.output_table.shape[1]))
        base = np.zeros(width)
        for j in range(net.neurons):
            spot, room = self.on_plane(j)
            normal = net.weight[j] / np.linalg.norm(net.weight[j])
            sides = []
            for sign in (-1.0, 1.0):
                base = spot + sign * NARROW_PLANE * room * normal
                last = self.known_attention(base, STEP * room, basis, score, key_bias)
                sides.append(last)
            output = net.output_table[j]
            rows[j] = (sides[1] - sides[0]) @ output / float(output @ output)
        if net.neurons == 0:
            base, room = (part[0] for part in self.roomy_points(1))
            last = self.known_attention(base, STEP * room, basis, score, key_bias)
        on = net.weight @ base + net.bias > 0
        skip = last - rows[on].T @ net.output_table[on]
        return rows, skip.reshape(net.skip.shape)

    def gradient(self, point: Array, length: float) -> Float[Array, "d k"]:
        """J at a point, whatever the attention is."""
        steps = length * random_rotation(self.rng, len(point))
        ahead, behind = self.answers(point + steps, point), self.answers(point - steps, point)
        return np.asarray(np.linalg.solve(steps, ahead - behind))

    def known_attention(
        self, point: Array, length: float, basis: Array, score: Array, key_bias: Array
    ) -> Float[Array, "d k"]:
        """The same with one query per direction, once the attention is known."""
        steps = length * basis
        weight = 1 / (1 + np.exp(-(steps @ (score @ point + key_bias))))
        moved = self.answers(point + steps, point) - self.known(point)
        return np.asarray(np.linalg.solve(steps, moved / weight[:, None]))

    def answers(self, first: Float[Array, "n d"], last: Float[Array, " d"]) -> Array:
        tokens = np.stack([first, np.broadcast_to(last, first.shape)], axis=1)
        raw = self.oracle.ask(QueryBatch.of(tokens, "residual"))
        return np.asarray(raw, dtype=np.float64).reshape(len(first), -1)

    def known(self, point: Array) -> Float[Array, " k"]:
        return np.asarray(self.network(point[None])).reshape(-1)

    def clearance(self, points: Float[Array, "n d"], but: int | None = None) -> Array:
        """Distance to the nearest plane (one of them left out) and to the edge."""
        rows = np.maximum(np.linalg.norm(self.network.weight, axis=1), TINY)
        heights = np.abs(points @ self.network.weight.T + self.network.bias) / rows
        if but is not None:
            heights[:, but] = np.inf
        room = np.minimum(self.region.size, self.region.room(points, 1.0))
        return np.asarray(np.minimum(heights.min(axis=1, initial=np.inf), room))

    def roomy_points(self, count: int) -> tuple[Array, Array]:
        points = self.region.points(self.rng, CANDIDATES)
        rooms = self.clearance(points)
        best = np.argsort(-rooms)[:count]
        return points[best], rooms[best]

    def on_plane(self, j: int) -> tuple[Array, float]:
        row = self.network.weight[j]
        points = self.region.points(self.rng, CANDIDATES)
        heights = points @ row + self.network.bias[j]
        points = points - np.outer(heights / float(row @ row), row)
        rooms = self.clearance(points, j)
        best = int(np.argmax(rooms))
        return points[best], float(rooms[best])
