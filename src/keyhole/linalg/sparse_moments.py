"""Which few of many known nodes carry weight, from a few moments.

Statement. mu_k = sum_h g_h exp(i k theta_h), k = 0..K, with H <= K distinct nodes out of a known
list, determine the nodes and the real weights g_h: the Toeplitz matrix of the moments has rank H,
and a node belongs to the sum iff its vector of powers is orthogonal to the null space (Prony,
Pisarenko, MUSIC). On the unit circle this is well conditioned, unlike powers of real numbers.
With vector weights (rows of answers) any patterns do: the answers span the patterns in use.
"""

from typing import NamedTuple

import numpy as np
from scipy.linalg import toeplitz

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.linalg.rank import count_above_share


class Support(NamedTuple):
    """The nodes in use, their weights, and the relative misfit of the moments."""

    nodes: Int[Array, " h"]
    weights: Float[Array, "h *outputs"]
    misfit: float


def build_trigonometric_patterns(order: int, angles: Float[Array, " m"]) -> Float[Array, "p m"]:
    """Rows 1, cos(k theta), sin(k theta) for k = 1..order."""
    multiples = np.arange(1, order + 1)[:, None] * angles
    waves = np.stack([np.cos(multiples), np.sin(multiples)], axis=1).reshape(-1, len(angles))
    return np.vstack([np.ones((1, len(angles))), waves])


def find_support_from_moments(
    moments: Float[Array, " p"],
    angles: Float[Array, " m"],
    tolerance: float,
    *,
    constant_known: bool = True,
) -> Support:
    """Smallest support that explains `moments` (constant, then cosine and sine pairs) within
    `tolerance`; the best one found where none does.

    An unknown addition to the constant moment shifts all eigenvalues of the Toeplitz matrix alike:
    with `constant_known=False` the null space is where eigenvalues agree, not where they vanish.
    """
    order = (len(moments) - 1) // 2
    powers = np.concatenate([moments[:1] + 0j, moments[1::2] + 1j * moments[2::2]])
    values, vectors = np.linalg.eigh(toeplitz(powers, powers.conj()))
    table = np.exp(1j * np.arange(order + 1)[:, None] * angles)
    energy = np.abs(vectors.conj().T @ table) ** 2
    first = 0 if constant_known else 1
    patterns = build_trigonometric_patterns(order, angles)[first:]
    best = Support(np.zeros(0, int), np.zeros(0), np.inf)
    for count in list_plausible_counts(values, order - first, constant_known):
        null = find_null_space(values, order + 1 - count, constant_known)
        outside = energy[null].sum(axis=0)
        nodes = np.sort(np.argsort(outside, kind="stable")[:count])
        found = fit_support(patterns, moments[first:], nodes)
        if found.misfit < best.misfit:
            best = found
        if best.misfit <= tolerance:
            break
    return best


def find_null_space(
    values: Float[Array, " n"], spare: int, constant_known: bool
) -> Int[Array, " k"]:
    """Which `spare` eigenvalues belong to no node: the smallest, or the tightest cluster."""
    if constant_known:
        return np.argsort(np.abs(values), kind="stable")[:spare]
    spreads = values[spare - 1 :] - values[: len(values) - spare + 1]
    return np.arange(spare) + int(np.argmin(spreads))


def list_plausible_counts(values: Float[Array, " n"], most: int, constant_known: bool) -> list[int]:
    """How many nodes there may be, in increasing order: where the spectrum drops most."""
    counts_tried = 5  # numbers of nodes tried per set of moments
    if not constant_known:
        return list(range(1, most + 1))[-counts_tried:]
    sizes = np.sort(np.abs(values))[::-1]
    drops = np.log(np.maximum(sizes[1 : most + 1], TINY)) - np.log(sizes[:most] + TINY)
    return sorted(int(k) + 1 for k in np.argsort(drops, kind="stable")[:counts_tried])


def find_support_from_vectors(
    answers: Float[Array, "p outputs"], patterns: Float[Array, "p m"], tolerance: float
) -> Support:
    """The same from vector answers, one per pattern: support of the numerical rank."""
    left, sizes, _ = np.linalg.svd(answers)
    rank = count_above_share(sizes, tolerance)
    norms = np.linalg.norm(patterns, axis=0)
    outside = np.linalg.norm(left[:, rank:].T @ patterns, axis=0) / norms
    nodes = np.sort(np.argsort(outside, kind="stable")[:rank])
    return fit_support(patterns, answers, nodes)


def fit_support(patterns: Array, answers: Array, nodes: Array) -> Support:
    """Least squares on a given support."""
    weights = np.linalg.lstsq(patterns[:, nodes], answers, rcond=None)[0]
    rest = float(np.linalg.norm(answers - patterns[:, nodes] @ weights))
    return Support(nodes, weights, rest / max(float(np.linalg.norm(answers)), TINY))
