"""A network with one hidden layer in the coordinates of its points, whole and in parts."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.models.mlp import ACTIVATIONS


@dataclass(frozen=True, eq=False)
class Weights:
    """A network in the coordinates of its points: rows (w, b) of arguments, and what is linear.
    `gate` holds the arguments of φ where there is a gate, `inner` those of the other factor."""

    inner: Float[Array, "m e"]
    outer: Float[Array, "k m"]
    affine: Float[Array, "k e"]
    activation: str
    gate: Float[Array, "m e"] | None = None

    @property
    def neurons(self) -> int:
        return len(self.inner)

    def __call__(self, points: Float[Array, "n d"]) -> Float[Array, "n k"]:
        homogeneous = with_one(points)
        return self.linear_sum(hidden_layer(self, homogeneous)[0], homogeneous)

    def linear_sum(
        self, hidden: Float[Array, "n m"], homogeneous: Float[Array, "n e"]
    ) -> Float[Array, "n k"]:
        """The answers, from the hidden layer."""
        return np.asarray(hidden @ self.outer.T + homogeneous @ self.affine.T)


def with_one(points: Float[Array, "n d"]) -> Float[Array, "n e"]:
    return np.column_stack([points, np.ones(len(points))])


def chosen(weights: Weights, rows: Array) -> Weights:
    """The network of some of the neurons."""
    gate = None if weights.gate is None else weights.gate[rows]
    return Weights(
        weights.inner[rows], weights.outer[:, rows], weights.affine, weights.activation, gate
    )


def hidden_layer(weights: Weights, homogeneous: Float[Array, "n e"]) -> tuple[Array, list[Array]]:
    """The hidden layer, and its derivatives by the arguments of each block (inner, then gate)."""
    phi = ACTIVATIONS[weights.activation]
    inner = homogeneous @ weights.inner.T
    if weights.gate is None:
        return phi.value(inner), [phi.first(inner)]
    gate = homogeneous @ weights.gate.T
    bent = phi.value(gate)
    return bent * inner, [bent, phi.first(gate) * inner]


def joined(weights: Weights, more: Weights) -> Weights:
    """The network with the neurons of both; its linear part is that of the first."""
    gate = None
    if weights.gate is not None and more.gate is not None:
        gate = np.concatenate([weights.gate, more.gate])
    return Weights(
        np.concatenate([weights.inner, more.inner]),
        np.concatenate([weights.outer, more.outer], axis=1),
        weights.affine,
        weights.activation,
        gate,
    )


def random_start(
    neurons: int,
    points: Float[Array, "n d"],
    outputs: int,
    name: str,
    gated: bool,
    rng: np.random.Generator,
) -> Weights:
    """Rows whose arguments are of order one at the points."""
    width = points.shape[1]
    size = np.sqrt(np.mean((points**2).sum(axis=1)))

    def rows() -> Array:
        return np.column_stack(
            [rng.standard_normal((neurons, width)) / size, 0.5 * rng.standard_normal(neurons)]
        )

    empty = np.zeros((outputs, neurons)), np.zeros((outputs, width + 1))
    inner = rows()
    if gated:
        inner /= np.linalg.norm(inner, axis=1, keepdims=True)
    return Weights(inner, *empty, name, rows() if gated else None)
