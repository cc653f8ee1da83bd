"""How many singular values are real: the only place that decides a rank.

Statement.  A matrix known up to errors of its entries has so many singular values that errors of
            this size cannot make; where the errors are not known, the spectrum itself shows where
            it ends.
Algebra.    Independent errors of standard deviation e in an m by n matrix have a largest singular
            value of about e (√m + √n): the noise edge. Errors that differ from entry to entry have
            the edge √(largest sum of squares of a row) + √(largest of a column). A value above the
            edge is no noise. Without errors: the rank is where neighbouring values fall most, if
            they fall by `fall` and to a small part of the largest.
When it fails. Weaker directions than the edge cannot be told from errors, and are left out. A
            spectrum that decays evenly has no fall, and is taken whole.
Source.     Davidson, Szarek (2001) for the edge; Latala (2005) for errors of unequal size.

Every decision is reported (`decisions`), with its margin: how far the nearest singular value lies
from the border, as a ratio.
"""

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.linalg.decisions import margin_of, note_decision

# Ratio of neighbouring singular values from which the first of them ends a spectrum whose errors
# are not known, and the part of the largest below which what follows must lie: values of random
# matrices fall less, except the last ones, which are no small part of the largest.
CLEAR_FALL = 10.0
SMALL_PART = 1e-2


def noise_edge(error: Float[Array, "m n"] | float, shape: tuple[int, int]) -> float:
    """The largest singular value that errors of these standard deviations make.

    Args:
        error: Standard deviation of every entry, or one for all.
        shape: Rows and columns of the matrix.

    >>> noise_edge(0.1, (4, 9))
    0.5
    """
    square = np.broadcast_to(np.square(error), shape)
    rows, columns = square.sum(axis=1).max(initial=0.0), square.sum(axis=0).max(initial=0.0)
    return float(np.sqrt(rows) + np.sqrt(columns))


def count_above(sizes: Float[Array, " n"], edge: float) -> int:
    """How many singular values errors cannot make.

    Args:
        sizes: Singular values, in any order.
        edge: The largest singular value that errors alone may show.

    >>> count_above(np.array([5.0, 1.0, 1e-9]), 1e-6)
    2
    """
    rank = int(np.sum(sizes > edge))
    note_decision("rank", rank, margin_of(sizes, edge))
    return rank


def count_above_share(sizes: Float[Array, " n"], share: float) -> int:
    """How many singular values exceed this share of the largest; of a zero matrix none.

    Args:
        sizes: Singular values, in any order.
        share: Relative size of what errors alone may show.
    """
    largest = float(sizes.max(initial=0.0))
    return count_above(sizes, share * largest) if largest > 0.0 else 0


def find_fall(
    sizes: Float[Array, " n"], fall: float = CLEAR_FALL, small: float = SMALL_PART
) -> int | None:
    """Behind how many singular values they fall most; None where they fall evenly.

    Args:
        sizes: Singular values, the largest first.
        fall: Ratio of neighbours from which one of them ends the spectrum.
        small: Part of the largest that what follows must not exceed.

    >>> find_fall(np.array([3.0, 2.0, 1e-4, 5e-5])), find_fall(np.array([3.0, 2.0, 1.0]))
    (2, None)
    """
    if len(sizes) < 2:
        return None
    falls = sizes[:-1] / np.maximum(sizes[1:], TINY)
    falls = np.where(sizes[1:] <= small * sizes[0], falls, 1.0)
    rank, steepest = int(np.argmax(falls)) + 1, float(falls.max())
    clear = steepest > fall
    note_decision("rank", rank if clear else len(sizes), margin_of(steepest, fall))
    return rank if clear else None


def find_first_fall(sizes: Float[Array, " n"], fall: float, edge: float) -> int:
    """Behind how many singular values the first clear fall is, where the errors that follow have
    falls of their own; all of them where there is none.

    Args:
        sizes: Singular values, the largest first.
        fall: Ratio of neighbours from which one of them ends the spectrum.
        edge: Values below this are errors, and as good as equal.

    >>> find_first_fall(np.array([3.0, 2.0, 1e-3, 1e-6]), 100.0, 1e-9)
    2
    """
    above = np.maximum(sizes, edge)
    falls = above[:-1] / np.maximum(above[1:], TINY)
    (places,) = np.nonzero(falls > fall)
    rank = int(places[0]) + 1 if len(places) else len(sizes)
    note_decision("rank", rank, margin_of(falls, fall))
    return rank
