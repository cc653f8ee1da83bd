"""A Transformer layer whose anchor also goes around the attention, from pairs of tokens.

    f(X) = skip . x_N + mixed_skip . (z - x_N)
           + sum_j output_j relu(weight_j . x_N + mixed_weight_j . (z - x_N) + bias_j) + offset

Statement.  Score, key bias, mixed_weight and mixed_skip are recovered once length-one queries have
            given weight, skip, bias, output and offset.
Queries.    X = [x + u ; x] has z - x_N = a u with a = sigmoid(u . (score x + key_bias)), and
            [x - u ; x] has 1 - a in the place of a. 3 d (d + 1) + 2 m d in all.
Algebra.    As long as no hyperplane is crossed, f([x + u ; x]) - f([x - u ; x]) = J u, with J the
            gradient of the mixed part in the cell of x, whatever the attention does. Then
            f([x + u ; x]) - f([x]) = a J u tells a, hence the score. J jumps by
            output_j mixed_weight_j at hyperplane j, which gives the rest.
Fails.      A mixed part that does not change hides the attention (NotIdentifiable).
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import NotIdentifiable
from keyhole.learners.mlp import InputRegion
from keyhole.linalg.bases import equal_overlap, random_rotation
from keyhole.linalg.softmax import expit, logit
from keyhole.measurement.asker import Asker
from keyhole.models.relu_network import ReluNetwork

CANDIDATES = 400  # random points from which those with the most room are taken
STEP = 0.1  # length of a probe, in distances to the nearest hyperplane


@dataclass(frozen=True, eq=False)
class ResidualProbe:
    """Queries to a layer whose network of one token is known."""

    ask: Asker
    network: ReluNetwork
    region: InputRegion
    rng: np.random.Generator

    def measure_score(self) -> tuple[Float[Array, "d d"], Float[Array, " d"]]:
        """Score matrix and key bias, from the keys of d + 1 points."""
        width = self.network.width
        points, rooms = self.choose_points(width + 1)
        keys = np.zeros((width + 1, width))
        for i, (point, room) in enumerate(zip(points, rooms, strict=True)):
            keys[i] = self.measure_key(point, STEP * room)
        table = np.column_stack([points, np.ones(width + 1)])
        solved = np.linalg.solve(table, keys)
        return solved[:-1].T, solved[-1]

    def measure_key(self, point: Float[Array, " d"], length: float) -> Float[Array, " d"]:
        """score x + key_bias at one point."""
        gradient = self.measure_gradient(point, length)
        slope, sizes, _ = np.linalg.svd(gradient, full_matrices=False)
        # a change below 1e-9 of the answer says nothing about the attention
        if sizes[0] * length <= 1e-9 * float(np.abs(self.predict(point)).max() + TINY):
            raise NotIdentifiable(
                "the mixed part of the network does not change, so the answers say nothing about "
                "the attention in front of it"
            )
        probes = equal_overlap(self.rng, slope[:, :1]).rows(np.arange(len(point)))
        moved = self.ask_pairs(point + length * probes, point) - self.predict(point)
        rise = length * probes @ gradient
        weight = np.einsum("nk,nk->n", moved, rise) / np.einsum("nk,nk->n", rise, rise)
        weight = np.clip(weight, 1e-15, 1 - 1e-15)  # zero and one have no log-odds
        return np.asarray(np.linalg.solve(probes, logit(weight) / length))

    def measure_mixed(self, score: Array, key_bias: Array) -> tuple[Array, Array]:
        """mixed_weight and mixed_skip, from both sides of every hyperplane."""
        net, width = self.network, self.network.width
        basis = random_rotation(self.rng, width)
        rows = np.zeros((net.neurons, width))
        last = np.zeros((width, net.output_table.shape[1]))
        base = np.zeros(width)
        for j in range(net.neurons):
            spot, room = self.choose_point_on_plane(j)
            normal = net.weight[j] / np.linalg.norm(net.weight[j])
            sides = []
            for sign in (-1.0, 1.0):
                base = spot + sign * 0.4 * room * normal
                last = self.measure_gradient_behind(base, STEP * room, basis, score, key_bias)
                sides.append(last)
            output = net.output_table[j]
            rows[j] = (sides[1] - sides[0]) @ output / float(output @ output)
        if net.neurons == 0:
            base, room = (part[0] for part in self.choose_points(1))
            last = self.measure_gradient_behind(base, STEP * room, basis, score, key_bias)
        on = net.weight @ base + net.bias > 0
        skip = last - rows[on].T @ net.output_table[on]
        return rows, skip.reshape(net.skip.shape)

    def measure_gradient(self, point: Array, length: float) -> Float[Array, "d k"]:
        """J at a point, whatever the attention is."""
        steps = length * random_rotation(self.rng, len(point))
        ahead, behind = self.ask_pairs(point + steps, point), self.ask_pairs(point - steps, point)
        return np.asarray(np.linalg.solve(steps, ahead - behind))

    def measure_gradient_behind(
        self, point: Array, length: float, basis: Array, score: Array, key_bias: Array
    ) -> Float[Array, "d k"]:
        """J at a point behind a known attention, with one query per direction."""
        steps = length * basis
        weight = expit(steps @ (score @ point + key_bias))
        moved = self.ask_pairs(point + steps, point) - self.predict(point)
        return np.asarray(np.linalg.solve(steps, moved / weight[:, None]))

    def ask_pairs(self, first: Float[Array, "n d"], last: Float[Array, " d"]) -> Array:
        tokens = np.stack([first, np.broadcast_to(last, first.shape)], axis=1)
        return self.ask(tokens, "residual")

    def predict(self, point: Array) -> Float[Array, " k"]:
        """The answer to one token."""
        return np.asarray(self.network(point[None])).reshape(-1)

    def clearance(self, points: Float[Array, "n d"], but: int | None = None) -> Array:
        """Distance to the nearest hyperplane (one of them left out) and to the domain's edge."""
        rows = np.maximum(np.linalg.norm(self.network.weight, axis=1), TINY)
        heights = np.abs(points @ self.network.weight.T + self.network.bias) / rows
        if but is not None:
            heights[:, but] = np.inf
        room = np.minimum(self.region.size, self.region.room(points, 1.0))
        return np.asarray(np.minimum(heights.min(axis=1, initial=np.inf), room))

    def choose_points(self, count: int) -> tuple[Array, Array]:
        """Random points far from all hyperplanes, and how far."""
        points = self.region.points(self.rng, CANDIDATES)
        rooms = self.clearance(points)
        best = np.argsort(-rooms)[:count]
        return points[best], rooms[best]

    def choose_point_on_plane(self, j: int) -> tuple[Array, float]:
        """A point on hyperplane j far from all others, and how far."""
        row = self.network.weight[j]
        points = self.region.points(self.rng, CANDIDATES)
        heights = points @ row + self.network.bias[j]
        points = points - np.outer(heights / float(row @ row), row)
        rooms = self.clearance(points, j)
        best = int(np.argmax(rooms))
        return points[best], float(rooms[best])
