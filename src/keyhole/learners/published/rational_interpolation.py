"""Poles and weights of a sum of logistic terms in the number of copies of a token.

Statement. g(n) = sum_h w_h n e^a_h / (n e^a_h + 1), sampled at 2H distinct n > 0, determines
the a_h and w_h: g(n) / n is a strictly proper rational function with H poles n = -e^-a_h, and
the poles are the generalised eigenvalues of its Loewner pencil.

When it fails. The poles crowd on a half line, and the pencil loses digits exponentially in H:
about four digits per head, nothing left in float64 from six heads on. Kept as the baseline of
benchmarks/multi_head.py; learners use hard attention instead.

Source. Kim, Kim, Guo, arXiv 2608.03294 (the queries); Mayo, Antoulas, "A framework for the
solution of the generalized realization problem" (the pencil).
"""

import numpy as np
from scipy.linalg import eig

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned, InvalidArgument


def find_logistic_terms(
    copies: Float[Array, " m"], answers: Float[Array, " m"], heads: int
) -> tuple[Float[Array, " h"], Float[Array, " h"]]:
    """Log-odds a_h and weights w_h, by increasing a_h.

    >>> import numpy as np
    >>> n = np.arange(1.0, 5.0)
    >>> g = 2 * n * np.e / (n * np.e + 1) - n / (n + 1)
    >>> odds, weights = find_logistic_terms(n, g, 2)
    >>> bool(np.allclose(odds, [0, 1]) and np.allclose(weights, [-1, 2]))
    True
    """
    if len(copies) != len(answers) or len(copies) < 2 * heads:
        raise InvalidArgument(f"{heads} terms need {2 * heads} samples, got {len(copies)}")
    proper = answers / copies
    left, right = slice(0, None, 2), slice(1, None, 2)
    gaps = copies[left, None] - copies[None, right]
    loewner = (proper[left, None] - proper[None, right]) / gaps
    shifted = (answers[left, None] - answers[None, right]) / gaps
    poles = eig(shifted[:heads, :heads], loewner[:heads, :heads], right=False)
    if not np.isfinite(poles).all() or (np.abs(poles.imag) > 1e-3 * np.abs(poles)).any():
        raise IllConditioned("the poles are not real: too many heads for this precision")
    if (poles.real >= 0).any():
        raise IllConditioned("a pole is not negative: too many heads for this precision")
    odds = np.sort(-np.log(-poles.real))
    shares = copies[:, None] / (copies[:, None] + np.exp(-odds))
    return odds, np.linalg.lstsq(shares, answers, rcond=None)[0]
