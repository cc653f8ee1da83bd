"""A network with one hidden layer and an affine part as matrices, and its products with steps.

Statement.  z(x) = affine (x, 1) + outer φ(rows (x, 1)); what is seen of z is its value or, behind a
            norm, its direction. The derivative of what is seen by a matrix is an outer product: of
            what a change of its result does, and of what it reads.
Queries.    None.
Algebra.    As for whole blocks (`block`), without attention: `push` takes a step of all parameters
            forwards, `pull` a change of what is seen backwards. A direction moves by what of dz is
            across z, over the length of z; this matrix is symmetric.
When it fails. Nowhere.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.forward.block import Batch, Parts, with_one
from keyhole.models.mlp import ACTIVATIONS


@dataclass(frozen=True, eq=False)
class NetworkPass:
    """One pass: what was seen and everything that products need again. `length`: of z where only
    its direction is seen."""

    outer: Float[Array, "o m"]
    reads: dict[str, Array]
    bend: Float[Array, "n m"]
    answers: Float[Array, "n o"]
    length: Float[Array, "n 1"] | None

    def astype(self, dtype: type) -> "NetworkPass":
        length: Array | None = None if self.length is None else self.length.astype(dtype)
        return NetworkPass(
            self.outer.astype(dtype),
            {name: np.asarray(part, dtype=dtype) for name, part in self.reads.items()},
            self.bend.astype(dtype),
            self.answers.astype(dtype),
            length,
        )

    def push(self, moves: Parts) -> Float[Array, "n o"]:
        hidden = self.bend * (self.reads["rows"] @ moves["rows"].T)
        z = self.reads["affine"] @ moves["affine"].T + self.reads["outer"] @ moves["outer"].T
        return self._seen(z + hidden @ self.outer.T)

    def pull(self, vector: Float[Array, "n o"]) -> Parts:
        z = self._seen(vector)
        return {"affine": z, "outer": z, "rows": self.bend * (z @ self.outer)}

    def _seen(self, z: Float[Array, "n o"]) -> Float[Array, "n o"]:
        if self.length is None:
            return z
        along = np.sum(z * self.answers, axis=1, keepdims=True)
        return np.asarray((z - along * self.answers) / self.length)


def run_network(parts: Parts, activation: str, one: Batch, direction: bool) -> NetworkPass:
    """One pass through the network of these parts, for single tokens."""
    x, phi = with_one(one.tokens[:, 0]), ACTIVATIONS[activation]
    arguments = x @ parts["rows"].T
    hidden = phi.value(arguments)
    z, length = x @ parts["affine"].T + hidden @ parts["outer"].T, None
    if direction:
        length = np.maximum(np.linalg.norm(z, axis=1, keepdims=True), TINY)
        z = z / length
    reads = {"affine": x, "rows": x, "outer": hidden}
    return NetworkPass(parts["outer"], reads, phi.first(arguments), z, length)
