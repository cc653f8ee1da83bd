"""A network of any number of neurons, known to a few digits, refined on directions of its answers.

Statement.  z(x) = affine(x) + Σ_j outer_j φ(inner_j . x + bias_j), n = z / |z| known at points:
            from a start of a few digits all parameters follow to the errors of n, up to one factor
            of z (and of every ReLU's row).
Queries.    None: points and directions are given, at least 1.3 numbers per unknown.
Algebra.    Gauss-Newton steps by products with the Jacobian (fitting/gauss_newton.py): a change
            moves n by Π dz / |z|, Π across n. Units of the unknowns: the Gram matrix of each
            neuron's own columns, and of each row of the affine part; neurons hardly see each other.
Fails.      Neurons that few points see keep their errors.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.gauss_newton import (
    BlockScaling,
    FitOptions,
    Linearization,
    fit_least_squares,
)
from keyhole.learners.block.direction_fit import Data, Directed, balanced, lengths, residual_of
from keyhole.models.mlp import ACTIVATIONS


def join(net: Directed) -> Float[Array, " unknowns"]:
    """The affine part row by row, then outer weights and row of every neuron."""
    return np.concatenate([net.affine.ravel(), np.column_stack([net.outer.T, net.rows]).ravel()])


def split(vector: Float[Array, " unknowns"], like: Directed) -> Directed:
    p = len(like.affine)
    affine, neurons = np.split(vector, [like.affine.size])
    table = neurons.reshape(like.neurons, -1)
    return replace(
        like, affine=affine.reshape(like.affine.shape), outer=table[:, :p].T, rows=table[:, p:]
    )


@dataclass(frozen=True, eq=False)
class DirectionModel:
    """Directions of a network against those that were seen, a forward model of its parameters."""

    like: Directed
    data: Data

    def residual(self, point: Float[Array, " unknowns"]) -> Float[Array, " numbers"]:
        return residual_of(split(point, self.like), self.data)[1].ravel()

    def linearize(self, point: Float[Array, " unknowns"]) -> Linearization:
        at = Slope(split(point, self.like), self.data)
        return Linearization(at.rest.ravel(), len(point), at.jvp, at.vjp, scaling=at.units())

    def retract(self, point: Array, step: Array) -> Array:
        return point + step


@dataclass(frozen=True, eq=False)
class Slope:
    """What changes of a network do to directions."""

    net: Directed
    data: Data

    @cached_property
    def hidden(self) -> tuple[Float[Array, "n m"], Float[Array, "n m"]]:
        """What the neurons give, and their slopes."""
        phi, arguments = ACTIVATIONS[self.net.activation], self.data.points @ self.net.rows.T
        return phi.value(arguments), phi.first(arguments)

    @cached_property
    def z(self) -> Float[Array, "n p"]:
        return np.asarray(self.data.points @ self.net.affine.T + self.hidden[0] @ self.net.outer.T)

    @cached_property
    def size(self) -> Float[Array, "n 1"]:
        return lengths(self.z)

    @cached_property
    def ahead(self) -> Float[Array, "n p"]:
        return np.asarray(self.z / self.size)

    @property
    def rest(self) -> Float[Array, "n p"]:
        return self.ahead - self.data.seen

    def across(self, z: Float[Array, "n p"]) -> Float[Array, "n p"]:
        """A change of z as one of its direction; this matrix is symmetric."""
        along = np.sum(z * self.ahead, axis=1, keepdims=True)
        return np.asarray((z - along * self.ahead) / self.size)

    def jvp(self, step: Float[Array, " unknowns"]) -> Float[Array, " numbers"]:
        move, (value, bend) = split(step, self.net), self.hidden
        z = self.data.points @ move.affine.T + value @ move.outer.T
        z = z + (bend * (self.data.points @ move.rows.T)) @ self.net.outer.T
        return np.asarray(self.across(z).ravel())

    def vjp(self, vector: Float[Array, " numbers"]) -> Float[Array, " unknowns"]:
        z, (value, bend) = self.across(vector.reshape(self.z.shape)), self.hidden
        rows = (bend * (z @ self.net.outer)).T @ self.data.points
        return join(replace(self.net, affine=z.T @ self.data.points, outer=z.T @ value, rows=rows))

    def units(self) -> BlockScaling:
        """Units in which the columns of each row of the affine part, and of each neuron, are
        orthonormal."""
        x, (value, bend), u = self.data.points, self.hidden, self.ahead
        p, weight = u.shape[1], 1.0 / self.size[:, 0] ** 2
        share = 1.0 - 1.0 / p  # of a random direction, that lies across
        found = [matrix_of(share * (x * weight[:, None]).T @ x)] * p
        for j in range(self.net.neurons):
            outer = self.net.outer[:, j]
            beside = outer - (u @ outer)[:, None] * u
            given = value[:, j] ** 2 * weight
            both = (beside * (value[:, j] * bend[:, j] * weight)[:, None]).T @ x
            own = (x * (bend[:, j] ** 2 * weight * np.sum(beside**2, axis=1))[:, None]).T @ x
            first = given.sum() * np.eye(p) - (u * given[:, None]).T @ u
            found.append(matrix_of(np.block([[first, both], [both.T, own]])))
        return BlockScaling(tuple(found))


def matrix_of(gram: Float[Array, "k k"]) -> Float[Array, "k k"]:
    """Units in which columns with this Gram matrix are orthonormal; a ridge holds combinations of
    columns that rounding alone makes."""
    sizes = np.sqrt(np.diag(gram))
    sizes = np.where(sizes > 0, sizes, 1.0)
    gram, place = gram / sizes / sizes[:, None], np.diag_indices(len(gram))
    gram[place] += np.where(np.diag(gram) > 0, 0.0, 1.0)
    ridge = 4.0 * UNIT_ROUNDOFF * len(gram)
    while True:
        gram[place] += ridge
        try:
            triangle = cholesky(gram, check_finite=False)
        except LinAlgError:
            ridge *= 16.0
        else:
            inverse = solve_triangular(triangle, np.eye(len(gram)), check_finite=False)
            return np.asarray(inverse / sizes[:, None])


def refine_directions(
    net: Directed, data: Data, steps: int = 3, target: float = 0.0
) -> tuple[Directed, float]:
    """The network fitted to these directions, and what is left of them."""
    net = balanced(net)
    options = FitOptions(
        steps=steps,
        damping=1e-12,
        dense_unknowns=0,
        accuracy=1e-2,
        tolerance=0.3,
        target=target,
        probes=0,
        inner_steps=100,
    )
    found = fit_least_squares(DirectionModel(net, data), join(net), options)
    net = split(found.point, net)
    return balanced(net), residual_of(net, data)[0]
