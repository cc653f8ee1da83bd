"""Attention weights and their inverse: softmax, its derivative, and log-odds with their errors.

softmax_i(s) = exp(s_i) / sum_j exp(s_j). Two weights a, b tell a score difference, log(a / b); an
error of a is one of the log-odds divided by a. A lone weight p is read against 1 - p, which shares
its error: logit(p) = log(p / (1 - p)) with error / (p (1 - p)).
"""

from typing import NamedTuple

import numpy as np
from scipy.special import expit

from keyhole.arrays import Array

__all__ = ["LogOdds", "expit", "log_ratio", "logit", "logit_with_error", "softmax", "softmax_jvp"]


class LogOdds(NamedTuple):
    """Score differences and their standard errors."""

    odds: Array
    errors: Array


def softmax(scores: Array, axis: int = -1, *, overwrite: bool = False) -> Array:
    """Attention weights along an axis; scores of any size are safe.

    >>> softmax(np.array([0.0, 1000.0]))
    array([0., 1.])
    """
    weights = np.subtract(
        scores, scores.max(axis=axis, keepdims=True), out=scores if overwrite else None
    )
    np.exp(weights, out=weights)
    weights /= weights.sum(axis=axis, keepdims=True)
    return np.asarray(weights)


def softmax_jvp(weights: Array, change: Array, axis: int = -1) -> Array:
    """Change of the weights for a change of the scores. The map is symmetric: it is its own
    adjoint."""
    last = np.moveaxis(weights, axis, -1), np.moveaxis(change, axis, -1)
    mean = np.einsum("...l,...l->...", *last)
    moved = change - np.expand_dims(mean, axis)
    moved *= weights
    return np.asarray(moved)


def logit(weight: Array) -> Array:
    """Log-odds of a weight; NaN where it is not between zero and one.

    >>> logit(np.array([0.5, 1.5]))
    array([ 0., nan])
    """
    inside = (weight > 0) & (weight < 1)
    safe = np.where(inside, weight, 0.5)
    return np.where(inside, np.log(safe) - np.log1p(-safe), np.nan)


def logit_with_error(weight: Array, error: Array | float) -> LogOdds:
    """Log-odds of a weight whose complement is known by subtraction, to first order."""
    return LogOdds(logit(weight), np.asarray(error / (weight * (1.0 - weight))))


def log_ratio(
    weight: Array,
    rest: Array | np.number | float,
    error: Array | float = 0.0,
    rest_error: Array | float = 0.0,
) -> LogOdds:
    """Log-odds of two weights with independent errors, to first order."""
    return LogOdds(np.log(weight / rest), np.hypot(error / weight, rest_error / rest))
