"""A low-rank update of one weight, from answers: alternating least squares.

Statement: rho_i = <A_i, dW> for all rows and directions i, with dW = U V' of small rank. For a
fixed V the equations are linear in U, and the other way round. The gradients A_i are never formed:
they are sums over tokens of outer products.
Algebra: begun at the posterior mean of dW (a ridge solution), whose leading singular vectors are
the first V. The rank is the smallest whose fit leaves as little of rows that were not fitted as the
best does. Then the weight is moved, gradients are taken again there, and the fit is repeated, until
the residual is rounding. Standard errors come from the last Jacobian.
When it fails: fewer equations than unknowns, r (outputs + inputs); then no update is returned.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.anatomy import Projection
from keyhole.diagnosis.experiment import Experiment
from keyhole.diagnosis.localise import (
    CLEAR,
    LARGE,
    Change,
    Traces,
    choose_directions,
    kernel,
    trace,
)
from keyhole.diagnosis.probes import Call

RANKS = (1, 2, 3, 4, 6, 8, 12)
AS_GOOD = 1.5  # a rank whose error on rows left out is within this of the best is as good
SWEEPS = 20
OUTER = 3
SMALL = 20_000  # numbers in a weight up to which its update is solved for
SEEN = 40  # directions of the answers that equations are written for
EXPLAINED = 1e-2  # of the residual that an update may leave and still be one
DETERMINED = 1.5  # equations for each unknown, at least


@dataclass(frozen=True, eq=False)
class Update:
    """A low-rank update with its standard errors."""

    left: Array  # (outputs, rank)
    right: Array  # (inputs, rank)
    errors: Array  # (outputs, inputs)
    residual: float  # what is left of the residual, relative to it

    @property
    def delta(self) -> Array:
        """The update (outputs, inputs)."""
        return self.left @ self.right.T


def features(traces: Traces, right: Array, rows: int) -> Array:
    """Equations for U, given V: (rows * directions, outputs * rank)."""
    mixed = traces.inputs @ right
    each = [np.tensordot(traces.gradients[:, part], mixed[part], (1, 0))
            for part in _tokens(traces, rows)]  # fmt: skip
    return np.stack(each).reshape(rows * len(traces.gradients), -1)


def features_right(traces: Traces, left: Array, rows: int) -> Array:
    """Equations for V, given U: (rows * directions, inputs * rank)."""
    mixed = traces.gradients @ left
    each = [np.tensordot(mixed[:, part], traces.inputs[part], (1, 0)).transpose(0, 2, 1)
            for part in _tokens(traces, rows)]  # fmt: skip
    return np.stack(each).reshape(rows * len(mixed), -1)


def _tokens(traces: Traces, rows: int) -> list[slice]:
    """Which tokens belong to each row."""
    ends = np.searchsorted(traces.row, np.arange(rows + 1))
    return [slice(ends[k], ends[k + 1]) for k in range(rows)]


def posterior_mean(traces: Traces, values: Array, rows: int) -> Array:
    """The ridge solution for dW, (outputs, inputs)."""
    matrix = kernel(traces, rows)
    ridge = 1e-6 * np.trace(matrix) / len(matrix)
    weights = np.linalg.solve(matrix + ridge * np.eye(len(matrix)), values)
    spread = weights.reshape(rows, -1)[traces.row]  # (tokens, directions)
    mixed = np.einsum("jto,tj->to", traces.gradients, spread, optimize=True)
    return mixed.T @ traces.inputs


def alternate(
    traces: Traces, values: Array, rows: int, right: Array, used: Array, exact: bool = False
) -> tuple[Array, Array]:
    """U and V by turns, from a first V, on the equations that are used."""
    rank = right.shape[1]
    left = np.zeros((traces.gradients.shape[2], rank))
    before = np.inf
    for _ in range(3 * SWEEPS if exact else SWEEPS):
        right = np.linalg.qr(right)[0]
        design = features(traces, right, rows)
        left = _solve(design[used], values[used]).reshape(-1, rank)
        left = np.linalg.qr(left)[0]
        design = features_right(traces, left, rows)
        right = _solve(design[used], values[used]).reshape(-1, rank)
        now = float(np.linalg.norm(values[used] - design[used] @ right.ravel()))
        if now > (1 - 1e-5 if exact else 0.99) * before:  # no longer getting better
            break
        before = now
    return left, right


def _solve(design: Array, values: Array) -> Array:
    gram = design.T @ design
    ridge = 1e-10 * np.trace(gram) / len(gram)
    solved: Array = np.linalg.solve(gram + ridge * np.eye(len(gram)), design.T @ values)
    return solved


def find_update(
    measure: Callable[[Array | None], tuple[Traces, Array]], rows: int
) -> Update | None:
    """The update of smallest rank that explains the residual.

    Args:
        measure: given a dW so far (or None), traces with the weight moved by it, and the values
            rho + <A, dW> that the whole update should give there.
        rows: how many rows there are.

    Returns:
        The update, or None where answers do not determine one.
    """
    traces, values = measure(None)
    count = len(traces.gradients)
    outputs, inputs = traces.gradients.shape[2], traces.inputs.shape[1]
    held = np.arange(rows) % 5 == 4
    used = np.repeat(~held, count)
    start = np.linalg.svd(posterior_mean(traces, values, rows))[2]
    fits: dict[int, tuple[float, Array, Array]] = {}
    for rank in RANKS:
        if rank * (outputs + inputs) > used.sum() or rank > min(outputs, inputs):
            break
        left, right = alternate(traces, values, rows, start[:rank].T, used)
        predicted = features(traces, right, rows) @ left.ravel()
        error = float(np.linalg.norm((values - predicted)[~used]) / np.linalg.norm(values[~used]))
        fits[rank] = (error, left, right)
        if len(fits) > 3 and error > AS_GOOD * min(e for e, _, _ in fits.values()):  # overfits
            break
    if not fits:
        return None
    best = min(error for error, _, _ in fits.values())
    rank = min(r for r, (error, _, _) in fits.items() if error <= AS_GOOD * best)
    _, left, right = fits[rank]
    everything = np.ones(rows * count, dtype=bool)
    for _ in range(OUTER):
        traces, values = measure(left @ right.T)
        left, right = alternate(traces, values, rows, right, everything, exact=True)
    rest = values - features(traces, right, rows) @ left.ravel()
    residual = float(np.linalg.norm(rest) / np.linalg.norm(values))
    return Update(left, right, errors_of(traces, left, right, rest, rows), residual)


def errors_of(traces: Traces, left: Array, right: Array, rest: Array, rows: int) -> Array:
    """Standard errors of the numbers of U V', from the Jacobian of the equations."""
    rank = left.shape[1]
    design = np.hstack([features(traces, right, rows), features_right(traces, left, rows)])
    unknowns = design.shape[1] - rank**2  # U and V may be turned against each other
    spread = float(rest @ rest) / max(len(rest) - unknowns, 1)
    covariance = spread * np.linalg.pinv(design.T @ design, rcond=1e-10, hermitian=True)
    cut = left.size
    uu = covariance[:cut, :cut].reshape(len(left), rank, len(left), rank)
    vv = covariance[cut:, cut:].reshape(len(right), rank, len(right), rank)
    uv = covariance[:cut, cut:].reshape(len(left), rank, len(right), rank)
    a, b = np.arange(len(left)), np.arange(len(right))
    variance = np.einsum("apq,bp,bq->ab", uu[a, :, a, :], right, right)
    variance += np.einsum("bpq,ap,aq->ab", vv[b, :, b, :], left, left)
    variance += 2 * np.einsum("apbq,bp,aq->ab", uv, right, left)
    return np.sqrt(np.maximum(variance, 0))


def solvable(experiment: Experiment, change: Change) -> bool:
    """Whether a change is clearly a small move of one weight that is small enough to solve for."""
    named = [p for p in experiment.bench.anatomy.projections if p.name == change.module]
    if change.margin < CLEAR or change.size > LARGE or len(named) != 1:
        return False
    return bool(named[0].matrix.numel() <= SMALL)


def with_rank(experiment: Experiment, rows: Sequence[int], change: Change, rng: Any) -> Change:
    """The change with the rank and the numbers of its update, where answers determine them."""
    (projection,) = [p for p in experiment.bench.anatomy.projections if p.name == change.module]
    outputs = experiment.answers.shape[1]
    rest = experiment.answers[list(rows)] - experiment.simulate((), rows)
    basis = choose_directions(rest, min(outputs, SEEN), rng)
    update = find_update(_measure(experiment, rows, projection, basis), len(rows))
    if update is None:
        return change
    determined = len(rows) * len(basis) >= DETERMINED * update.left.shape[1] * sum(
        projection.matrix.shape
    )
    return replace(
        change,
        rank=update.left.shape[1],
        delta=update.delta if determined and update.residual < EXPLAINED else None,
        errors=update.errors if determined and update.residual < EXPLAINED else None,
    )


def _measure(
    experiment: Experiment, rows: Sequence[int], projection: Projection, basis: Array
) -> Callable[[Array | None], tuple[Traces, Array]]:
    import torch

    given = [experiment.rows[n] for n in rows]

    def measure(delta: Array | None) -> tuple[Traces, Array]:
        kept = projection.matrix.clone()
        if delta is not None:
            projection.matrix.add_(torch.from_numpy(delta).to(kept.dtype))
        try:
            fresh = Experiment(experiment.bench)
            for n in rows:
                fresh.add(Call((experiment.rows[n],), "again"), experiment.answers[[n]])
            rest = (fresh.answers - fresh.simulate(())) @ basis.T
            traces = trace(experiment.bench, given, basis, [projection])
        finally:
            projection.matrix.copy_(kept)
        (found,) = traces.values()
        values = rest
        if delta is not None:
            starts = np.searchsorted(found.row, np.arange(len(given)))
            along = np.einsum("jto,to->tj", found.gradients, found.inputs @ delta.T, optimize=True)
            values = rest + np.add.reduceat(along, starts, axis=0)
        return found, values.ravel()

    return measure
