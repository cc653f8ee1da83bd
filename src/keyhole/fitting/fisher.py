"""Fisher information of attention parameters: standard errors and conditioning at a fit.

With unit noise on the labels the covariance of the scores is K^-1, K = J^t (I - Q Q^t) J (the
values eliminated), and that of the values (Z^t Z)^-1 x I + T K^-1 T^t with T = Z^+ J. For few
unknowns both are formed and factored. For many, traces per head are estimated by random probes
and conjugate gradients, and shared out among a head's entries by the Kronecker approximation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.linalg import LinAlgError, cholesky, solve_triangular

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.attention_rows import Rows, average_tokens, pull, push
from keyhole.fitting.conjugate_gradients import solve_preconditioned
from keyhole.fitting.levenberg_marquardt import AMPLE
from keyhole.fitting.preconditioner import approximate_normal
from keyhole.fitting.variable_projection import (
    DENSE_LIMIT,
    ProjectedFit,
    form_normal,
    multiply_normal,
    project,
    project_derivative,
)

POWER_STEPS = 10  # of power iteration for the largest eigenvalue


@dataclass(frozen=True, eq=False)
class FisherInformation:
    """Standard errors for unit noise on every label, and how well the scores are determined."""

    theta: Float[Array, "p m d"]
    values: Float[Array, "md D"]
    offset: Float[Array, " D"]
    conditioning: float  # smallest / largest singular value of the scores' Jacobian, columns scaled

    @classmethod
    def missing(cls, at: ProjectedFit, conditioning: float) -> "FisherInformation":
        """No standard errors: scores are not determined, or (conditioning NaN) nobody looked."""
        return cls(
            np.full(at.theta.shape, np.inf),
            np.full(at.values.shape, np.inf),
            np.full(at.offset.shape, np.inf),
            conditioning,
        )

    def scaled(self, factor: float) -> "FisherInformation":
        """With standard errors times a factor."""
        parts = (factor * self.theta, factor * self.values, factor * self.offset)
        return FisherInformation(*parts, self.conditioning)

    @property
    def deficient(self) -> bool:
        """Whether some direction of the scores leaves no trace in the labels."""
        return self.conditioning < 1e-7  # rounding cannot tell it from zero


def estimate_information(
    rows: Rows, at: ProjectedFit, rng: np.random.Generator
) -> FisherInformation:
    """Standard errors for unit noise at a fit; of very many rows a sample tells them."""
    some = rows.sample(at.theta.shape[1], AMPLE, rng)
    if some is not rows:
        found = estimate_information(some, project(some, at.theta), rng)
        if not found.deficient:
            return found.scaled(float(np.sqrt(some.counted / rows.counted)))
    columns = at.values.shape[0] + int(rows.offset)
    if at.basis.shape[1] < columns:  # the values themselves are not determined
        return FisherInformation.missing(at, 0.0)
    return _dense(rows, at) if at.theta.size <= DENSE_LIMIT else _probed(rows, at, rng)


def _dense(rows: Rows, at: ProjectedFit) -> FisherInformation:
    normal = form_normal(rows, at)
    unit = np.sqrt(np.diagonal(normal))
    # an entry seen this little (saturated attention) has no standard error
    if not unit.min(initial=np.inf) > 1e-100 * np.abs(at.values).max():
        return FisherInformation.missing(at, 0.0)
    normal /= unit[:, None]
    normal /= unit[None, :]
    try:
        lower = cholesky(normal, lower=True, check_finite=False)
    except LinAlgError:
        return FisherInformation.missing(at, 0.0)
    sizes = np.linalg.eigvalsh(normal)
    conditioning = float(np.sqrt(max(sizes[0], 0.0) / sizes[-1]))
    inverse = solve_triangular(lower, np.eye(len(lower)), lower=True, check_finite=False)
    theta = np.sqrt(np.einsum("ij,ij->j", inverse, inverse)) / unit
    pseudo, leverage = _design(rows, at)
    # T in rows (column of Z, output): the values' reaction to each score entry
    reaction = np.tensordot(pseudo, project_derivative(rows, at), axes=1)
    shape = reaction.shape[:2]
    reaction = reaction.reshape(-1, len(unit)) / unit
    spread = solve_triangular(lower, reaction.T, lower=True, check_finite=False)
    values = np.einsum("ij,ij->j", spread, spread).reshape(shape) + leverage[:, None]
    return _information(at, theta.reshape(at.theta.shape), np.sqrt(values), conditioning)


def _design(rows: Rows, at: ProjectedFit) -> tuple[Array, Array]:
    """R^-1 with Z = basis R, and the diagonal of (Z^t Z)^-1."""
    design = average_tokens(rows, at.pattern)
    if rows.offset:
        design = np.hstack([design, rows.weights.reshape(-1, 1)])
    inverse = np.linalg.inv(at.basis.T @ design)
    return inverse, np.einsum("ij,ij->i", inverse, inverse)


def _information(
    at: ProjectedFit, theta: Array, values: Array, conditioning: float
) -> FisherInformation:
    wide = at.values.shape[0]
    offset = values[wide] if len(values) > wide else np.zeros(at.offset.shape)
    return FisherInformation(theta, values[:wide], offset, conditioning)


def _probed(rows: Rows, at: ProjectedFit, rng: np.random.Generator) -> FisherInformation:
    """Traces per head from random signs, shared out by the preconditioner's diagonal."""
    rows32, at32 = rows.astype(np.float32), at.astype(np.float32)
    near = approximate_normal(rows, at)
    near32 = near.astype(np.float32)
    pseudo, leverage = _design(rows, at)

    left_over = np.zeros(at.theta.shape)  # of a system that would not be solved

    def solve(vector: Array) -> Array:
        nonlocal left_over
        size = float(np.linalg.norm(vector)) or 1.0
        probe_tolerance = 0.03  # relative accuracy of the solution for a probe
        found, image = solve_preconditioned(
            lambda v: multiply_normal(rows32, at32, v),
            lambda v: near32.solve(0.0, v).astype(np.float32),
            (vector / size).astype(np.float32),
            probe_tolerance,
            300,
        )
        rest = vector / size - image
        if float(np.linalg.norm(rest)) > 2 * probe_tolerance:
            left_over = rest
        return found.astype(np.float64) * size

    _p, m, d = at.theta.shape
    scores, values = np.zeros(m), np.zeros(m)
    extreme = np.zeros(at.theta.shape)
    probes = 4  # random vectors for a trace; each averages over all entries of a head
    for _ in range(probes):
        signs = rng.choice([-1.0, 1.0], at.theta.shape)
        extreme = solve(signs)
        scores += np.einsum("pmd,pmd->m", signs, extreme) / probes
        signs = rng.choice([-1.0, 1.0], (len(leverage), rows.outputs))
        back = solve(pull(rows, at.pattern, at.values, at.basis @ (pseudo.T @ signs)))
        forth = pseudo @ (at.basis.T @ push(rows, at.pattern, at.values, back))
        values += (signs * forth)[: m * d].reshape(m, -1).sum(axis=1) / probes
    shape = near.inverse_diagonal()
    theta = np.sqrt(shape * (scores.clip(0) / shape.sum(axis=(0, 2)))[None, :, None])
    base = leverage[: m * d].reshape(m, d)
    share = 1.0 + values.clip(0) / (base.sum(axis=1) * rows.outputs)
    spread = np.sqrt(np.repeat((base * share[:, None]).ravel()[:, None], rows.outputs, axis=1))
    if rows.offset:
        constant = np.sqrt(leverage[-1] * share.max())
        spread = np.vstack([spread, np.full((1, rows.outputs), constant)])
    conditioning = _extremes(rows32, at32, solve, extreme)
    if left_over.any():
        conditioning = min(conditioning, _flatness(rows, at, left_over))
    return _information(at, theta, spread, conditioning)


def _flatness(rows: Rows, at: ProjectedFit, vector: Array) -> float:
    """Conditioning along one vector; zero below what single precision can tell from zero. What
    conjugate gradients cannot reduce lies where the information is flat."""
    unit = vector / np.linalg.norm(vector)
    along = float((unit * multiply_normal(rows, at, unit)).sum())
    top = unit
    for _ in range(POWER_STEPS):
        top = multiply_normal(rows, at, top / np.linalg.norm(top))
    share = along / max(float(np.linalg.norm(top)), TINY)
    return 0.0 if share < 1e-6 else float(np.sqrt(share))


def _extremes(rows: Rows, at: ProjectedFit, solve: Callable[[Array], Array], start: Array) -> float:
    """Conditioning from one inverse step and a few power steps: an estimate from above."""
    low = solve(start)
    small = float(np.linalg.norm(start) / max(float(np.linalg.norm(low)), TINY))
    top = start.astype(np.float32)
    large = 1.0
    for _ in range(POWER_STEPS):
        top = multiply_normal(rows, at, top / np.linalg.norm(top))
        large = float(np.linalg.norm(top))
    return float(np.sqrt(small / max(large, TINY)))
