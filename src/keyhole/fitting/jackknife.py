"""Standard errors of a fit by leaving one answer out: the one place for fits with a dense Jacobian.

Statement.  The variance of each unknown is the sum, over the answers, of the squared change that
            leaving this answer out makes.
Algebra.    With J = U S Vᵀ, H_q the block of U Uᵀ that belongs to answer q and r_q its residual,
            leaving q out moves the fit by V S⁻¹ U_qᵀ (I − H_q)⁻¹ r_q.
Why.        The numbers of one answer share the rounding of what is inside the box: they are one
            observation. A Fisher matrix of independent numbers, scaled by what is left, has bars
            that are a third too short; here no model of the noise is needed.
Fails.      Where an answer alone decides about a direction it leaves no residual there: the fit
            needs about half as many numbers again as it has unknowns.
Source.     Efron (1982); Bell and McCaffrey (2002) for clusters.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float


def list_jackknife_steps(
    jacobian: Float[Array, "numbers unknowns"],
    residual: Float[Array, " numbers"],
    groups: Sequence[int],
    rank: int,
) -> Iterator[Float[Array, " unknowns"]]:
    """What each answer moves the fit by; squares of the steps add up to the variances.

    Args:
        jacobian: derivative of the residual by the unknowns, at the fit.
        residual: what the fit leaves, in the same units.
        groups: how many numbers each answer has, in their order.
        rank: independent unknowns, where a step has more entries.

    Yields:
        One step for each answer.

    >>> x = np.arange(6.0)[:, None]
    >>> steps = list_jackknife_steps(x, np.array([0.0, 1, -1, 1, -1, 0.2]), [1] * 6, 1)
    >>> round(float(np.sqrt(sum(step[0] ** 2 for step in steps))), 3)
    0.133
    """
    left, back = _invert(jacobian, rank)
    for low, high in pairwise(np.cumsum([0, *groups])):
        own = left[low:high]
        free = np.eye(high - low) - own @ own.T
        yield np.asarray(back @ (own.T @ solve_leverage(free, residual[low:high])))


def list_fisher_steps(
    jacobian: Float[Array, "numbers unknowns"], rank: int
) -> Iterator[Float[Array, " unknowns"]]:
    """Independent steps that unit noise on every number makes; squares add up to the variances."""
    _, back = _invert(jacobian, rank)
    yield from back.T


def _invert(jacobian: Array, rank: int) -> tuple[Float[Array, "n r"], Float[Array, "unknowns r"]]:
    """U and V / S of the Jacobian, columns of one size; what no answer sees is uncertain."""
    norms = np.linalg.norm(jacobian, axis=0)
    norms = np.where(norms > 0, norms, 1.0)
    left, sizes, right = np.linalg.svd(jacobian / norms, full_matrices=False)
    left, sizes, right = left[:, :rank], sizes[:rank], right[:rank].T
    floor = UNIT_ROUNDOFF * max(float(sizes[0]), TINY)
    return left, right / norms[:, None] / np.maximum(sizes, floor)


def solve_leverage(free: Float[Array, "k k"], residual: Float[Array, " k"]) -> Float[Array, " k"]:
    """The residual of an answer that the fit had not seen. What it alone decides about left no
    residual to speak of, and is left out."""
    sizes, vectors = np.linalg.eigh(free)
    alone = sizes < 1e-6
    along = np.where(alone, 0.0, vectors.T @ residual / np.where(alone, 1.0, sizes))
    return np.asarray(vectors @ along)
