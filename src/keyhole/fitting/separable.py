"""Variable projection for any forward model: unknowns that act linearly are eliminated.

Answers Y ~ Z(p) B with features Z (numbers x columns) of the nonlinear unknowns p. Given p, B is a
linear least-squares problem, solved by QR; what is left, Z B - Y, depends on p alone. Its
derivative is taken in Kaufman's form, (I - Q Q^t) dZ B, exact to first order at a zero residual.
The features are themselves a forward model whose data are zero, so a torch function will do
(fitting/torch_model with answers of zero).

Source: Golub, Pereyra (1973); Kaufman (1975). The specialised form for attention, which forms no
features' derivative, is fitting/variable_projection.
"""

from dataclasses import dataclass
from typing import Generic

import numpy as np
from scipy.linalg import solve_triangular

from keyhole.arrays import Array, Float
from keyhole.fitting.gauss_newton import ForwardModel, Linearization, P
from keyhole.fitting.variable_projection import factor_columns


@dataclass(frozen=True, eq=False)
class SeparableModel(Generic[P]):
    """`features`: a model whose residual is Z(p), row by row; answers, and their errors by row."""

    features: ForwardModel[P]
    answers: Float[Array, "rows D"]
    errors: Float[Array, " rows"]

    def residual(self, point: P) -> Array:
        return self._eliminate(self.features.residual(point))[0].ravel()

    def solve_linear_part(self, point: P) -> Float[Array, "columns D"]:
        """B at a point; zero for columns that the others make superfluous."""
        return self._eliminate(self.features.residual(point))[2]

    def linearize(self, point: P) -> Linearization:
        at = self.features.linearize(point)
        residual, basis, linear = self._eliminate(at.residual)
        rows = len(self.answers)

        def project_out(change: Array) -> Array:
            return np.asarray(change - basis @ (basis.T @ change))

        def jvp(step: Array) -> Array:
            change = at.jvp(step).reshape(rows, -1) / self.errors[:, None]
            return project_out(change @ linear).ravel()

        def vjp(vector: Array) -> Array:
            left = project_out(vector.reshape(rows, -1)) / self.errors[:, None]
            return at.vjp((left @ linear.T).ravel())

        return Linearization(
            residual.ravel(),
            at.unknowns,
            jvp,
            vjp,
            scaling=at.scaling,
            eliminated=basis.shape[1] * self.answers.shape[1],
        )

    def retract(self, point: P, step: Array) -> P:
        return self.features.retract(point, step)

    def _eliminate(self, features: Array) -> tuple[Array, Array, Array]:
        """Residual, orthonormal basis of the features, and the linear unknowns."""
        design = features.reshape(len(self.answers), -1) / self.errors[:, None]
        targets = self.answers / self.errors[:, None]
        basis, order, upper = factor_columns(design)
        inside = basis.T @ targets
        linear = np.zeros((design.shape[1], targets.shape[1]))
        linear[order] = solve_triangular(upper, inside, check_finite=False)
        return basis @ inside - targets, basis, linear
