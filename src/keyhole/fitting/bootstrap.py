"""Standard errors by repetition: the algebra is done again on perturbed answers.

A repetition that fails (NaN) leaves infinite standard errors. Few repetitions make single entries
look better than they are, so each error is at least the root mean square over its block.
"""

from collections.abc import Callable, Sequence

import numpy as np

from keyhole.arrays import Array


def bootstrap_errors(
    best: Sequence[Array], repeat: Callable[[], Sequence[Array]], repetitions: int
) -> tuple[Array, ...]:
    """Standard errors of the arrays in `best`: how far those that `repeat` makes of freshly
    perturbed answers scatter around them. The first axis of an array counts its blocks.

    >>> rng = np.random.default_rng(0)
    >>> (error,) = bootstrap_errors([np.zeros((1, 500))], lambda: [rng.normal(size=(1, 500))], 8)
    >>> bool(0.9 < error.min() < 1.1)
    True
    """
    squares = [np.zeros(part.shape) for part in best]
    for _ in range(repetitions):
        for total, found, part in zip(squares, repeat(), best, strict=True):
            total += np.nan_to_num((found - part) ** 2, nan=np.inf)
    return tuple(smooth_errors(np.sqrt(total / repetitions)) for total in squares)


def smooth_errors(errors: Array) -> Array:
    """Each error at least the root mean square over its block (the first axis counts blocks)."""
    axes = tuple(range(1, errors.ndim))
    return np.maximum(errors, np.sqrt((errors**2).mean(axis=axes, keepdims=True)))
