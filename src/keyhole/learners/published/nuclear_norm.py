"""The matrix of least nuclear norm among those with given rank-one measurements.

    minimise ‖W‖_*  subject to  a_k · W b_k = t_k

is a semidefinite program; cvxpy states and solves it. Its dual, maximise t · y with
‖Σ_k y_k a_k b_kᵀ‖ ≤ 1, tells how good the answer is: the two values are equal at the optimum, and
if only rank(W) singular values of the dual matrix reach one, no other matrix does as well.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import IllConditioned
from keyhole.extras import need

TIGHT = 1e-4  # singular values of the dual matrix this close to one have reached it
VISIBLE = 1e-4  # singular values this small, relative, are zero to the program's accuracy


@dataclass(frozen=True, eq=False)
class LeastNuclearNorm:
    matrix: Float[Array, "d d"]
    rank: int  # to the program's accuracy
    gap: float  # between the values of program and dual, relative
    unique: bool  # whether the dual matrix shows that there is no other


def require_solver() -> None:
    """Raises MissingExtra where cvxpy is not installed."""
    need("cvxpy", "convex", "the nuclear norm program")


def least_nuclear_norm(
    left: Float[Array, "m d"], right: Float[Array, "m d"], products: Float[Array, " m"]
) -> LeastNuclearNorm:
    """Solves the program; accurate to about six digits."""
    cvxpy: Any = need("cvxpy", "convex", "the nuclear norm program")
    width = left.shape[1]
    # one scale for everything: the solver's tolerances are absolute
    norms = np.linalg.norm(left, axis=1) * np.linalg.norm(right, axis=1)
    size = float(np.sqrt(np.mean((products / norms) ** 2))) or 1.0
    design = (left[:, :, None] * right[:, None, :]).reshape(len(left), -1) / norms[:, None]
    goal = products / norms / size
    unknown = cvxpy.Variable((width, width))
    agreement = design @ cvxpy.vec(unknown, order="C") == goal
    problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.normNuc(unknown)), [agreement])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an inaccurate end is seen in the gap
            problem.solve(solver=cvxpy.CLARABEL)
    except cvxpy.error.SolverError as error:
        raise IllConditioned(f"the nuclear norm program was not solved: {error}") from error
    if unknown.value is None or agreement.dual_value is None:
        raise IllConditioned(f"the nuclear norm program ended as {problem.status}")
    singular = np.linalg.svd(unknown.value, compute_uv=False)
    rank = int(np.sum(singular > VISIBLE * singular[0]))
    dual = np.linalg.svd((agreement.dual_value @ design).reshape(width, width), compute_uv=False)
    value = abs(float(agreement.dual_value @ goal))
    gap = abs(value - singular.sum()) / max(float(singular.sum()), TINY)
    reached = int(np.sum(dual > 1.0 - TIGHT))
    return LeastNuclearNorm(size * unknown.value, rank, gap, reached == rank)
